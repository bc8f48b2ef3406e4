# SPDX-License-Identifier: Apache-2.0
# Private: device work as lists of steps, and CUDA graphs of it.
from libc.stdint cimport int64_t

from cuda.bindings cimport cyruntime as rt

from cudecomp.pack cimport cudecomp_kernel_table, cudecomp_program, PackProgram

# Puts something onto a stream, which may be capturing; returns a status that the step's `fail` understands, 0 if well.
ctypedef int (*issue_function)(void *argument, void *stream, bint capturing) noexcept nogil

ctypedef struct PackArguments:
    const cudecomp_kernel_table *kernels
    cudecomp_program *program
    void **bases
    int64_t first
    int64_t singles
    int64_t last
    rt.cudaEvent_t *events
    Py_ssize_t event_count


cdef class Step:
    cdef issue_function issue
    cdef void *argument

    cdef int fail(self, int status) except -1


cdef class PackStep(Step):
    cdef PackArguments pack
    cdef PackProgram program
    cdef object kept


cdef class Work:
    cdef readonly tuple steps
    cdef readonly bint lands
    cdef readonly object kept
    cdef Py_ssize_t count
    cdef issue_function *issues
    cdef void **arguments

    cdef int put(self, void *stream, bint capturing, Py_ssize_t *reached) noexcept nogil
    cdef int fail(self, Py_ssize_t reached, int status) except -1


cdef class Graph:
    cdef rt.cudaGraphExec_t handle
    cdef readonly Work work
