# SPDX-License-Identifier: Apache-2.0
"""Smooth a plane wave with the compiled module `smooth`, and compare it with what theory says.

Build the module first, as the README beside this file shows. Then, on any number of ranks:
mpiexec -n 4 python main.py
"""

from contextlib import ExitStack

import numpy as np
from mpi4py import MPI
from smooth import smooth

import cudecomp

SHAPE, WAVES, STEPS = (24, 20, 18), (1, 2, 3), 10
comm = MPI.COMM_WORLD
grid = cudecomp.ProcessGrid.choose(comm.size, SHAPE)
pencils = [cudecomp.Pencil(SHAPE, grid, axis, order="contiguous") for axis in range(3)]
x, y, z = (cudecomp.empty(pencil, np.float64, comm.rank) for pencil in pencils)

# cos of the sum of the phases along the axes; each pass along an axis multiplies it by (1 + cos(2 pi m / n)) / 2.
angles = [2 * np.pi * m / n for m, n in zip(WAVES, SHAPE, strict=True)]
phases = np.ix_(*(angle * np.arange(n) for angle, n in zip(angles, SHAPE, strict=True)))
wave = np.cos(phases[0] + phases[1] + phases[2])[pencils[0].slices(comm.rank)]
inside = pencils[0].interior(x, comm.rank)
inside[...] = wave

with ExitStack() as stack:
    calls = []
    for a, b in ((0, 1), (1, 2), (2, 0)):
        plan = stack.enter_context(cudecomp.TransposePlan(pencils[a], pencils[b], np.float64, comm))
        calls.append(plan.bind((x, y, z)[a], (x, y, z)[b]))
    smooth(x, y, z, *calls, STEPS)

expected = wave * np.prod([(1 + np.cos(angle)) / 2 for angle in angles]) ** STEPS
error = comm.allreduce(np.abs(inside - expected).max(initial=0), MPI.MAX)
if comm.rank == 0:
    print(f"{comm.size} ranks in a {grid.shape} grid, {STEPS} steps: the largest error is {error:.1e}")
raise SystemExit(bool(error > 1e-13))
