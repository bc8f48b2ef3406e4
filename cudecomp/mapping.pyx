# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns a mapping of a file into this process; knows nothing of what is in it.

The module `mmap` keeps a file descriptor per mapping before Python 3.13. A rank maps memory of all others, and many
systems allow 1024 descriptors.
"""

from libc.errno cimport errno
from libc.stdint cimport uintptr_t

import os

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int file, long offset)
    int munmap(void *address, size_t length)
    void *MAP_FAILED
    int MAP_SHARED
    int PROT_READ
    int PROT_WRITE


cdef class Mapping:
    """The first bytes of an open file, shared and writable, as long as this object lives; OSError if it cannot be."""

    cdef void *start
    cdef size_t length

    def __cinit__(self, int file, size_t nbytes):
        self.start = MAP_FAILED
        self.length = nbytes
        self.start = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
        if self.start == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))

    @property
    def address(self):
        """Where the mapping starts."""
        return <uintptr_t> self.start

    def __dealloc__(self):
        if self.start != MAP_FAILED:
            munmap(self.start, self.length)
