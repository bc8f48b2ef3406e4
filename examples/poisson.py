# SPDX-License-Identifier: Apache-2.0
"""Solve laplace(u) = f in a periodic box with FFTs along the whole axis of each pencil.

Run it on any number of ranks: mpiexec -n 4 python examples/poisson.py
"""

from contextlib import ExitStack

import numpy as np
from mpi4py import MPI

import cudecomp

SHAPE = (48, 40, 36)
comm = MPI.COMM_WORLD
rank = comm.rank
grid = cudecomp.ProcessGrid.choose(comm.size, SHAPE)
pencils = [cudecomp.Pencil(SHAPE, grid, axis, order="contiguous") for axis in range(3)]
arrays = [cudecomp.empty(pencil, np.complex128, rank) for pencil in pencils]
views = [pencil.interior(array, rank) for pencil, array in zip(pencils, arrays, strict=True)]  # in axis order


def along(pencil, axis, values):
    """The part of an axis that this rank holds, ready to be combined with those of the other axes."""
    part = values[pencil.slices(rank)[axis]]
    return part.reshape([-1 if a == axis else 1 for a in range(3)])


# A right-hand side with a known answer: u = sin(x) cos(2 y) sin(3 z), and laplace(u) = -(1 + 4 + 9) u.
x, y, z = (along(pencils[0], axis, 2 * np.pi * np.arange(n) / n) for axis, n in enumerate(SHAPE))
exact = np.sin(x) * np.cos(2 * y) * np.sin(3 * z)
views[0][...] = -14 * exact

with ExitStack() as stack:
    # One workspace serves all plans: they never run at the same time.
    workspace = cudecomp.Workspace(comm)
    forward, back = [], []
    for a in (0, 1):
        plan = cudecomp.TransposePlan(pencils[a], pencils[a + 1], np.complex128, comm, workspace=workspace)
        forward.append(stack.enter_context(plan))
        back.append(stack.enter_context(plan.reverse()))

    for a in (0, 1, 2):
        views[a][...] = np.fft.fft(views[a], axis=a)
        if a < 2:
            forward[a].run(arrays[a], arrays[a + 1])

    k2 = sum(along(pencils[2], axis, np.fft.fftfreq(n, 1 / n) ** 2) for axis, n in enumerate(SHAPE))
    views[2][...] *= -np.divide(1, k2, out=np.zeros_like(k2), where=k2 > 0)  # the mean of u is free: 0

    for a in (2, 1, 0):
        views[a][...] = np.fft.ifft(views[a], axis=a)
        if a > 0:
            back[a - 1].run(arrays[a], arrays[a - 1])

error = comm.allreduce(np.abs(views[0] - exact).max(initial=0), MPI.MAX)
if rank == 0:
    print(f"{comm.size} ranks in a {grid.shape} grid: the largest error is {error:.1e}")
raise SystemExit(bool(error > 1e-12))
