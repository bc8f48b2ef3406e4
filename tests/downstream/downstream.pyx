# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""A module of somebody else that calls the C level of cudecomp; the tests build it with Cython and gcc alone."""

cimport cudecomp.plan
from cudecomp.plan cimport Call, Plan
from libc.stdint cimport uintptr_t


cdef class Loop:
    """Holds a plan and calls, as a solver would, and runs them from C."""

    cdef Plan plan
    cdef Call forward
    cdef Call backward

    def __init__(self, Plan plan not None, Call forward not None, Call backward not None):
        self.plan = plan
        self.forward = forward
        self.backward = backward

    def there_and_back(self, int times):
        """Run both calls `times` times without the GIL in between."""
        cdef int _i
        with nogil:
            for _i in range(times):
                cudecomp.plan.call_run(self.forward, NULL)
                cudecomp.plan.call_run(self.backward, NULL)

    def replay(self, int times):
        """The same with what was captured."""
        cdef int _i
        with nogil:
            for _i in range(times):
                cudecomp.plan.call_replay(self.forward, NULL)
                cudecomp.plan.call_replay(self.backward, NULL)

    def run_addresses(self, uintptr_t src, uintptr_t dst, uintptr_t stream=0):
        """Run the plan on memory that no Python object stands for."""
        with nogil:
            cudecomp.plan.plan_run(self.plan, <void *> src, <void *> dst, <void *> stream)
