# SPDX-License-Identifier: Apache-2.0
# Private: signals between ranks from the device.
from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "signal.h" nogil:
    ctypedef struct cudecomp_edge:
        uint64_t *theirs
        uint64_t *mine
        char **table
        int32_t peer
        int32_t put
        int32_t source

    ctypedef struct cudecomp_signals:
        pass

    ctypedef struct cudecomp_signal_table:
        int (*create)(const cudecomp_edge *edges, int64_t count, int64_t fields, char **slots, uint64_t *status,
                      uint64_t timeout, cudecomp_signals **signals) noexcept nogil
        int (*destroy)(cudecomp_signals *signals) noexcept nogil
        int (*signal)(cudecomp_signals *signals, int32_t what, const uint64_t *places, void *stream) noexcept nogil
        int (*allocation)(uint64_t address, uint64_t *start, uint64_t *size, uint64_t *identity) noexcept nogil
        const char *(*error_string)(int status) noexcept nogil


cdef const cudecomp_signal_table *signal_table() except NULL


cdef class Signals:
    cdef cudecomp_signals *signals
    cdef const cudecomp_signal_table *table
    cdef readonly int fields
    cdef object memory
    cdef uint64_t *status

    cdef int check(self, str call, int status) except -1
