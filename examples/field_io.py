# SPDX-License-Identifier: Apache-2.0
"""Save a field to HDF5 and restart from it on other ranks, in another layout: every rank writes and reads its slices.

It needs h5py (`pip install h5py`). With one that has MPI, all ranks write one file. Otherwise each rank writes a
file of its own, and rank 0 one that shows them as a whole. Both are read alike, by any number of ranks.

Run it on any number of ranks, in a folder that all of them see: mpiexec -n 4 python examples/field_io.py [folder]
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import cudecomp

SHAPE = (24, 20, 18)


def save(path, name, array, pencil, comm):
    """Write a field, given by this rank's array in memory order; collective."""
    values = pencil.interior(array, comm.rank)
    if h5py.get_config().mpi:
        with h5py.File(path, "w", driver="mpio", comm=comm) as file:
            file.create_dataset(name, pencil.global_shape, values.dtype)[pencil.slices(comm.rank)] = values
    else:
        with h5py.File(part_of(path, comm.rank), "w") as file:
            file[name] = values
        if comm.rank == 0:
            join(path, name, values.dtype, pencil)
    comm.Barrier()  # nobody reads before all have written


def join(path, name, dtype, pencil):
    """Write the file that shows the files of all ranks as one; pencils know all ranks, so nobody has to be asked."""
    layout = h5py.VirtualLayout(pencil.global_shape, dtype)
    for rank in range(pencil.grid.size):
        if pencil.box(rank).size:
            layout[pencil.slices(rank)] = h5py.VirtualSource(part_of(path, rank).name, name, pencil.shape(rank))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset(name, layout)


def load(path, name, array, pencil, rank):
    """Read this rank's part of a field into its array, halo and padding excepted; local."""
    with h5py.File(path) as file:
        pencil.interior(array, rank)[...] = file[name][pencil.slices(rank)]


def part_of(path, rank):
    """The file that a rank writes where h5py has no MPI."""
    return path.with_suffix(f".{rank}.h5")


def linear_index(pencil, rank):
    """The linear index in the whole array of each item of a rank, in axis order."""
    return np.ravel_multi_index(np.ogrid[pencil.slices(rank)], SHAPE)


comm = MPI.COMM_WORLD
with ExitStack() as stack:
    if len(sys.argv) > 1:
        folder = sys.argv[1]
    else:
        folder = comm.bcast(stack.enter_context(tempfile.TemporaryDirectory()) if comm.rank == 0 else None)
    path = Path(folder) / "field.h5"

    # The run that ends: pencils of axis 0 with a halo, on all ranks.
    x = cudecomp.Pencil(SHAPE, cudecomp.ProcessGrid.choose(comm.size, SHAPE), axis=0, halo=1)
    field = cudecomp.empty(x, np.float64, comm.rank)
    x.interior(field, comm.rank)[...] = linear_index(x, comm.rank)
    save(path, "u", field, x, comm)

    # The run that goes on: slabs of axis 2, contiguous along axis 2, on one rank less where there are several.
    wrong, fewer = 0, max(comm.size - 1, 1)
    if comm.rank < fewer:
        z = cudecomp.Pencil(SHAPE, cudecomp.ProcessGrid((fewer, 1)), axis=2, order="contiguous")
        again = cudecomp.empty(z, np.float64, comm.rank)
        load(path, "u", again, z, comm.rank)
        wrong = int(not np.array_equal(z.interior(again, comm.rank), linear_index(z, comm.rank)))
    wrong = comm.allreduce(wrong)
    if comm.rank == 0:
        how = "one file" if h5py.get_config().mpi else "a file per rank"
        print(f"{comm.size} ranks wrote {how}, {fewer} read it: {'right' if not wrong else f'wrong on {wrong} ranks'}")
raise SystemExit(bool(wrong))
