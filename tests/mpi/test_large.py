# SPDX-License-Identifier: Apache-2.0
"""Messages of more than 2^31 - 1 bytes and items."""

import numpy as np
import pytest
from mpi4py import MPI

from cudecomp import Pencil, ProcessGrid, TransposePlan

SIZE = MPI.COMM_WORLD.Get_size()
ITEMS = (1 << 31) + 4099  # of one message, with one byte each
PIECE = 1 << 24


def available():
    """The memory that this machine could still give, in bytes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def stamped(array, first):
    """Fill with a pattern that tells places apart, piece by piece: a second array of this size would not fit."""
    for start in range(0, array.size, PIECE):
        piece = array[start : start + (PIECE)]
        piece[...] = pattern(first + start, piece.size)


def pattern(first, count):
    return np.tile(np.arange(127, dtype=np.int8), count // 127 + 2)[first % 127 :][:count]


def wrong(array, first):
    starts = range(0, array.size, PIECE)
    pieces = ((start, array[start : start + (PIECE)]) for start in starts)
    return [
        f"wrong after {first + start}" for start, piece in pieces if (piece != pattern(first + start, piece.size)).any()
    ]


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.skipif(SIZE != 2, reason="for 2 ranks")
@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
def test_a_message_beyond_31_bits(comm, verdict, backend):
    """One row that lies on rank 0 alone is spread over both ranks: the message is one half of it."""
    enough = comm.bcast(available() > 4 * ITEMS + (3 << 30))
    if not enough:
        pytest.skip(f"needs {(4 * ITEMS >> 30) + 3} GiB of memory")
    grid = ProcessGrid((2,))
    src, dst = Pencil((1, 2 * ITEMS), grid, 1), Pencil((1, 2 * ITEMS), grid, 0)
    with TransposePlan(src, dst, "i1", comm, backend=backend) as plan:
        a, b = np.empty(src.size(comm.rank), np.int8), plan.empty_dst().reshape(-1)
        stamped(a, 0)
        plan.run(a, b)
        assert b.size == ITEMS
        verdict(wrong(b, comm.rank * ITEMS))


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.skipif(SIZE != 2, reason="for 2 ranks")
def test_a_packed_message_beyond_31_bits(comm, verdict):
    """In place, so that all of it goes through the workspace."""
    enough = comm.bcast(available() > 7 * ITEMS + (3 << 30))
    if not enough:
        pytest.skip(f"needs {(7 * ITEMS >> 30) + 3} GiB of memory")
    grid = ProcessGrid((2,))
    src, dst = Pencil((1, 2 * ITEMS), grid, 1), Pencil((1, 2 * ITEMS), grid, 0)
    with TransposePlan(src, dst, "i1", comm, backend="mpi_p2p", inplace=True) as plan:
        buffer = plan.empty_src()
        if comm.rank == 0:
            stamped(buffer[: 2 * ITEMS], 0)
        plan.run(buffer)
        verdict(wrong(buffer[:ITEMS], comm.rank * ITEMS))
