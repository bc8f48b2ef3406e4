# SPDX-License-Identifier: Apache-2.0
"""Transpose a distributed array from pencils of axis 0 to pencils of axis 1, and check every item.

Run it on any number of ranks: mpiexec -n 4 python examples/transpose.py
"""

import numpy as np
from mpi4py import MPI

import cudecomp

comm = MPI.COMM_WORLD
grid = cudecomp.ProcessGrid.choose(comm.size, (60, 50, 40))
x = cudecomp.Pencil((60, 50, 40), grid, axis=0)  # axis 0 is whole, axes 1 and 2 are cut by the grid
y = x.pencil(1)  # axis 1 is whole


def linear_index(pencil):
    """The linear index in the whole array of each item that this rank holds, in axis order."""
    whole = np.arange(np.prod(pencil.global_shape)).reshape(pencil.global_shape)
    return whole[pencil.slices(comm.rank)]


with cudecomp.TransposePlan(x, y, np.float64, comm) as plan:
    a, b = plan.empty_src(), plan.empty_dst()
    x.interior(a, plan.rank)[...] = linear_index(x)
    plan.run(a, b)
    right = np.array_equal(y.interior(b, plan.rank), linear_index(y))
    if comm.rank == 0:
        print(plan.explain())

wrong = comm.allreduce(not right)
if comm.rank == 0:
    print("every item is in its place" if not wrong else f"items are wrong on {wrong} ranks")
raise SystemExit(bool(wrong))
