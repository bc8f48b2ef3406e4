/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of the kernel libraries: pack programs, that is lists of strided box copies in numbered segments.
 *
 * libcudecomp_host and libcudecomp_cuda both export one symbol, `cudecomp_kernels`, that returns a table of these
 * functions. A library knows strides and bases; it knows nothing of axes, peers or messages.
 *
 * All functions return 0, a negative CUDECOMP_* status, or a positive cudaError_t; none throws. A program may be run by
 * one thread at a time; different programs are independent.
 */
#ifndef CUDECOMP_PACK_H
#define CUDECOMP_PACK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDECOMP_ABI 2
#define CUDECOMP_DIMS 4

enum {
    CUDECOMP_INVALID = -1,  /* an argument is out of its range */
    CUDECOMP_NO_MEMORY = -2 /* the host has no memory left */
};

enum { CUDECOMP_DEVICE_HOST = 0, CUDECOMP_DEVICE_CUDA = 1 };

/* Copy a box of units: for every index (i0, i1, i2, i3) below `extent`, `unit` bytes from
 * bases[src_base] + src_offset + sum(i * src_stride) to bases[dst_base] + dst_offset + sum(i * dst_stride).
 * Dimensions run from slowest to fastest in the destination; unused ones come first, with extent 1 and stride 0.
 * Strides and offsets are bytes, multiples of `unit`; bases are aligned to `unit`. No extent is 0. Source and
 * destination boxes of one program do not overlap. */
typedef struct {
    int64_t extent[CUDECOMP_DIMS];
    int64_t src_stride[CUDECOMP_DIMS];
    int64_t dst_stride[CUDECOMP_DIMS];
    int64_t src_offset;
    int64_t dst_offset;
    int32_t src_base;
    int32_t dst_base;
    int32_t unit;    /* 1, 2, 4, 8 or 16 */
    int32_t segment; /* ascending over the boxes of a program */
} cudecomp_box;

/* A segment's flag: a naturally aligned uint64_t at bases[base] + offset that the kernels set, with release semantics
 * at system scope, to the number of times this segment has been completed since the program was created. A segment
 * without boxes counts as well. base < 0: no flag. */
typedef struct {
    int64_t offset;
    int64_t base;
} cudecomp_flag;

typedef struct cudecomp_program cudecomp_program;

typedef struct {
    int32_t abi;    /* CUDECOMP_ABI */
    int32_t device; /* CUDECOMP_DEVICE_* */

    /* The text of a status that a function of this table returned; static storage. */
    const char *(*error_string)(int status);

    /* Compile `boxes` into a program for the current device. `flags` has one entry per segment, or is NULL.
     * `base_count` is the length of the table that run will be given. `max_blocks` bounds the thread blocks of a launch
     * (0: as many as fill the device; ignored on the host). May allocate and synchronise.
     *
     * Slots are bases that earlier work on the device decides about: base number base_count + i, for i < slot_count, is
     * the address in word i of the array of addresses at the last entry of the table, read while the program runs. A
     * box whose slot is null is left out, and so is a flag. CUDA only; on the host slot_count is 0. */
    int (*create)(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
                  int64_t base_count, int64_t slot_count, int32_t max_blocks, cudecomp_program **program);

    /* Free a program that no launched or captured work uses any more. NULL is allowed. May synchronise. */
    int (*destroy)(cudecomp_program *program);

    /* Copy the segments first <= s < last, in this order, each followed by its flag. `bases` are the addresses of this
     * run, read before run returns. CUDA: one launch on `stream` (a cudaStream_t), nothing is allocated, no call that
     * a stream capture forbids. Host: done when it returns; `stream` is NULL. */
    int (*run)(cudecomp_program *program, void *const *bases, int64_t first, int64_t last, void *stream);

    /* The same for the listed segments, in the order listed. CUDA: as few launches as the parameter space allows. */
    int (*run_list)(cudecomp_program *program, void *const *bases, const int64_t *segments, int64_t count,
                    void *stream);

    /* Have the graph that `stream` is being captured into, and all that is made of it, hold an object: afterwards
     * release(kept) is called, on any thread; it may call no CUDA function. CUDA only, NULL on the host. */
    int (*retain)(void *stream, void *kept, void (*release)(void *kept));
} cudecomp_kernel_table;

const cudecomp_kernel_table *cudecomp_kernels(void);

#ifdef __cplusplus
}
#endif
#endif
