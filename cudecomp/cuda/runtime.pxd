# SPDX-License-Identifier: Apache-2.0
# Private: CUDA streams, events and completion flags.
from libc.stdint cimport uint64_t

from cuda.bindings cimport cyruntime as rt


cdef int check(rt.cudaError_t status, str call) except -1


cdef class Event:
    cdef rt.cudaEvent_t handle


cdef class Stream:
    cdef rt.cudaStream_t handle


cdef class Flags:
    cdef readonly object memory
    cdef uint64_t *value
    cdef readonly Py_ssize_t count
    cdef readonly uint64_t epoch
