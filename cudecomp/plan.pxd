# SPDX-License-Identifier: Apache-2.0
# Public: the C level API. Functions over built-in C types and two opaque classes; see docs/cython.md.


cdef class Plan:
    cdef object _engine


cdef class Call:
    cdef object _bound


# Run `plan` from src to dst, addresses of arrays with the plan's memory shapes (all fields behind each other; dst is
# NULL for a plan in place), on a stream (NULL on the host device). As Plan.run, but without any check of the arrays.
# The GIL is taken inside, and given back while memory is copied and in MPI.
cdef int plan_run(Plan plan, void *src, void *dst, void *stream) except -1 nogil

# As Call.run and Call.replay.
cdef int call_run(Call call, void *stream) except -1 nogil
cdef int call_replay(Call call, void *stream) except -1 nogil
