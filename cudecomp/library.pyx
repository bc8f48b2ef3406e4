# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns the loading of shared libraries at run time; knows nothing of what is in them."""

import os

cdef extern from "dlfcn.h" nogil:
    void *dlopen(const char *filename, int flags)
    void *dlsym(void *handle, const char *symbol)
    char *dlerror()
    int RTLD_NOW
    int RTLD_LOCAL
    int RTLD_NOLOAD

ctypedef int (*question)() noexcept nogil


cdef void *open_symbol(str path, str symbol) except NULL:
    """Load a library, for as long as the process lives, and return a symbol of it; ImportError if there is none."""
    cdef bytes encoded = os.fsencode(path), name = symbol.encode()
    cdef void *handle = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
    if handle == NULL:
        raise ImportError(f"{path} cannot be loaded: {dlerror().decode()}")
    cdef void *found = dlsym(handle, name)
    if found == NULL:
        raise ImportError(f"{path} has no symbol {symbol}")
    return found


def call_symbol(str path, str symbol):
    """Return what `int symbol(void)` of a library that is loaded already answers; None where there is none."""
    cdef bytes encoded = os.fsencode(path), name = symbol.encode()
    cdef void *handle = dlopen(encoded, RTLD_NOW | RTLD_NOLOAD)
    cdef void *found = dlsym(handle, name) if handle != NULL else NULL
    return (<question> found)() if found != NULL else None
