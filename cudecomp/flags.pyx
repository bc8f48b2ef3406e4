# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns 64-bit words that processes tell each other their progress by; knows nothing of who waits for what."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t cudecomp_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static inline void cudecomp_store(uint64_t *word, uint64_t value) {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    """
    uint64_t cudecomp_load(const uint64_t *word) noexcept nogil
    void cudecomp_store(uint64_t *word, uint64_t value) noexcept nogil


def load(uintptr_t address):
    """Return the word at an address; what was written before it was stored is visible afterwards."""
    return cudecomp_load(<const uint64_t *> address)


def store(uintptr_t address, uint64_t value):
    """Store a word; whoever sees it sees what was written before."""
    cudecomp_store(<uint64_t *> address, value)


def read_words(uintptr_t address, Py_ssize_t count):
    """Return plain 64-bit words, for what a flag that was loaded before announces."""
    return [(<const int64_t *> address)[i] for i in range(count)]


def write_words(uintptr_t address, values):
    """Write plain 64-bit words, to be announced by a flag that is stored afterwards."""
    for i, value in enumerate(values):
        (<int64_t *> address)[i] = value
