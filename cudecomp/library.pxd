# SPDX-License-Identifier: Apache-2.0
# Private: symbols of shared libraries.


cdef void *open_symbol(str path, str symbol) except NULL
