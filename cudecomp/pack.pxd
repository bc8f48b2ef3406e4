# SPDX-License-Identifier: Apache-2.0
# Private: pack programs and address tables, for the compiled modules of this package. Not part of the C level API.
from libc.stdint cimport int32_t, int64_t


cdef extern from "pack.h" nogil:
    ctypedef struct cudecomp_box:
        int64_t extent[4]
        int64_t src_stride[4]
        int64_t dst_stride[4]
        int64_t src_offset
        int64_t dst_offset
        int32_t src_base
        int32_t dst_base
        int32_t unit
        int32_t segment

    ctypedef struct cudecomp_flag:
        int64_t offset
        int64_t base

    ctypedef struct cudecomp_program:
        pass

    ctypedef struct cudecomp_kernel_table:
        int32_t abi
        int32_t device
        const char *(*error_string)(int status) noexcept nogil
        int (*create)(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
                      int64_t base_count, int64_t slot_count, int32_t max_blocks,
                      cudecomp_program **program) noexcept nogil
        int (*destroy)(cudecomp_program *program) noexcept nogil
        int (*run)(cudecomp_program *program, void *const *bases, int64_t first, int64_t last,
                   void *stream) noexcept nogil
        int (*run_list)(cudecomp_program *program, void *const *bases, const int64_t *segments, int64_t count,
                        void *stream) noexcept nogil
        int (*retain)(void *stream, void *kept, void (*release)(void *kept) noexcept nogil) noexcept nogil

    int CUDECOMP_ABI


# Frees something of a device; returns a status.
ctypedef int (*release_function)(void *thing) noexcept nogil

cdef void abandon(release_function release, void *thing) noexcept
cdef const cudecomp_kernel_table *kernel_table(str device) except NULL


cdef class AddressTable:
    cdef void **address
    cdef readonly Py_ssize_t count


cdef class PackProgram:
    cdef const cudecomp_kernel_table *kernels
    cdef cudecomp_program *program
    cdef int64_t *listed
    cdef readonly Py_ssize_t segments
    cdef readonly Py_ssize_t bases
    cdef readonly str device

    cdef int usable(self, AddressTable table) except -1
    cdef int launch(self, AddressTable table, int64_t first, int64_t last, void *stream) except -1
    cdef int check(self, str call, int status) except -1
