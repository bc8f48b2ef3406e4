/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of signals between ranks whose memory a GPU can address: who may write where, and what has been written.
 *
 * For each pair of ranks and run k: free(k), the receiver says where its arrays are and that they may be written; then
 * the writes; then written(k). Each rank has a control memory with lines for each peer, which that peer alone writes:
 * a line that holds written(k), and from CUDECOMP_LINE bytes on the epoch of free(k) followed by two words per field,
 * (registration number, byte offset) of the field's array. Epochs are compared with >=.
 *
 * All functions return 0, a negative CUDECOMP_* status of pack.h, or a positive cudaError_t.
 */
#ifndef CUDECOMP_SIGNAL_H
#define CUDECOMP_SIGNAL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDECOMP_LINE 128      /* bytes; no two writers share a line */
#define CUDECOMP_MAX_FIELDS 64 /* places are passed by value */

/* What a signal does, or-ed. In this order: */
enum {
    CUDECOMP_OFFER = 1,  /* begin a run: free(k) to all sources, with the places of this rank's arrays */
    CUDECOMP_ADMIT = 2,  /* wait for free(k) of all peers that are written to, and fill in their slots */
    CUDECOMP_ARRIVE = 4, /* wait for written(k) of all sources */
    CUDECOMP_LEAVE = 8,  /* no other run comes: tell all peers */
    CUDECOMP_FAIL = 16   /* the same, and what was offered may not be written any more */
};

/* Why signals have stopped for good: the upper half of the status word; the lower half is the peer's rank. */
enum { CUDECOMP_TIMED_OUT = 1, CUDECOMP_PEER_LEFT = 2, CUDECOMP_LEFT = 3 };

/* A pair of ranks. All addresses are those of this process's device. */
typedef struct {
    uint64_t *theirs; /* this rank's lines in the peer's control memory */
    uint64_t *mine;   /* the peer's lines in this rank's control memory */
    char **table;     /* where the peer's registrations are mapped, by number */
    int32_t peer;     /* its rank */
    int32_t put;      /* the first of its slots: one per field, then one for written(k); -1: nothing is written there */
    int32_t source;   /* whether it writes into this rank's memory */
    int32_t unused;
} cudecomp_edge;

typedef struct cudecomp_signals cudecomp_signals;

typedef struct {
    /* Make the signals of one plan on the current device. `slots` is the device's array of slots, `status` a zeroed
     * word of host memory that the device can write, `timeout` nanoseconds, or 0 for none. May synchronise. */
    int (*create)(const cudecomp_edge *edges, int64_t count, int64_t fields, char **slots, uint64_t *status,
                  uint64_t timeout, cudecomp_signals **signals);

    /* Free signals that no launched or captured work uses any more. NULL is allowed. May synchronise. */
    int (*destroy)(cudecomp_signals *signals);

    /* Launch what `what` says, one block, on `stream` (a cudaStream_t). `places` has 2 * fields words, read before this
     * returns; NULL without OFFER. Once signals have stopped, slots are null and nothing is waited for. */
    int (*signal)(cudecomp_signals *signals, int32_t what, const uint64_t *places, void *stream);

    /* Tell the allocation that device memory belongs to: its start, its bytes, and a number that no other allocation of
     * this process ever has. */
    int (*allocation)(uint64_t address, uint64_t *start, uint64_t *bytes, uint64_t *identity);

    const char *(*error_string)(int status);
} cudecomp_signal_table;

const cudecomp_signal_table *cudecomp_signal_functions(void);

#ifdef __cplusplus
}
#endif
#endif
