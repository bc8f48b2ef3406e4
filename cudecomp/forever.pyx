# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns what must stay until the process has ended, later than any Python object; knows nothing of what it is.

A list would not do: the interpreter empties it before MPI is finalized, and MPI may write until then.
"""

from cpython.ref cimport Py_INCREF


def keep(object thing):
    """Never free an object, nor what it refers to."""
    Py_INCREF(thing)
