# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""A filter along all axes of a distributed array: a loop in C over three pencils and the transposes between them."""

from cudecomp.plan cimport Call, call_run


cdef void average(double[:, :, ::1] lines) noexcept nogil:
    """Replace each item by (left + 2 * item + right) / 4 along the fastest dimension, which is periodic."""
    cdef Py_ssize_t i, j, k, n = lines.shape[2]
    cdef double first, left, here
    for i in range(lines.shape[0]):
        for j in range(lines.shape[1]):
            first, left = lines[i, j, 0], lines[i, j, n - 1]
            for k in range(n):
                here = lines[i, j, k]
                lines[i, j, k] = (left + 2 * here + (lines[i, j, k + 1] if k + 1 < n else first)) / 4
                left = here


def smooth(double[:, :, ::1] x, double[:, :, ::1] y, double[:, :, ::1] z, Call x_to_y not None, Call y_to_z not None,
           Call z_to_x not None, int steps):
    """Filter x along all axes, `steps` times.

    x, y and z are the arrays that the calls are bound to, in memory order, each with its own axis fastest.
    """
    cdef int _step
    with nogil:
        for _step in range(steps):
            average(x)
            call_run(x_to_y, NULL)
            average(y)
            call_run(y_to_z, NULL)
            average(z)
            call_run(z_to_x, NULL)
