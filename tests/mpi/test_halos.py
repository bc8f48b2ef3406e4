# SPDX-License-Identifier: Apache-2.0
"""Halo updates over every transport against the reference, which plays all ranks."""

import itertools

import numpy as np
import pytest
import reference
from exercise import same_bytes

from cudecomp import HaloPlan, Pencil, ProcessGrid
from cudecomp.halo import halo_exchange

GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (4, 1)], 6: [(2, 3)], 8: [(2, 4)]}
CASES = [
    ((8, 6, 5), 1, (True, True, True), None, "f8", 1),
    ((9, 8, 7), ((2, 1), (0, 2), 1), (True, False, True), None, "f4", 1),
    ((7, 9, 4), 2, (False, False, False), (0, 2), "c16", 1),
    ((6, 7, 8), 3, (True, False, False), None, "i2", 3),
    ((3, 2, 5), 1, (True, True, False), None, "V12", 1),
    ((6, 6, 6), 7, (True, True, True), (1, 2), "i1", 1),
]


def outcome(pencil, periods, axes, dtype):
    """The memory of all ranks before and after an update."""
    ranks = range(pencil.grid.size)
    before = [reference.fill(pencil, rank, dtype) for rank in ranks]
    after = [array.copy() for array in before]
    axes = tuple(range(pencil.ndim)) if axes is None else axes
    reference.run([halo_exchange(pencil, rank, periods, axes) for rank in ranks], after, after)
    return before, after


@pytest.mark.parametrize("backend", ["auto", "direct", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
def test_halos_equal_the_reference(comm, verdict, backend):
    found = []
    grids = GRIDS.get(comm.size, [(comm.size, 1)])
    for (shape, halo, periods, axes, dtype, fields), grid, axis in itertools.product(CASES, grids, range(3)):
        order = list(itertools.permutations(range(3)))[(axis + fields) % 6]
        pencil = Pencil(shape, ProcessGrid(grid), axis, halo=halo, order=order, padding=(0, 1, 2))
        before, after = outcome(pencil, periods, axes, dtype)
        options = {"periods": periods, "axes": axes, "backend": backend, "fields": fields}
        with HaloPlan(pencil, dtype, comm, **options) as plan:
            own = plan.empty_src() if axis else np.empty(plan.empty_src().shape, dtype)  # known to peers, or not
            call = plan.bind(own)
            for attempt in (
                plan.run,
                lambda _, call=call: call.run(),
                lambda _, call=call: (call.start(), call.wait()),
            ):
                own[...] = before[comm.rank]
                attempt(own)
                wanted = np.broadcast_to(after[comm.rank], own.shape)
                if not same_bytes(own, wanted):
                    found.append(f"{pencil}, {options}")
    verdict(found)


@pytest.mark.parametrize("backend", ["direct", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
@pytest.mark.parametrize("width", [(1, 0), (0, 1), (2, 2)], ids=str)
def test_one_direction_alone_and_within_one_array(comm, verdict, backend, width):
    """Ranks at a wall only send or only receive; rows without gaps leave from, and land in, the array itself."""
    pencil = Pencil((3 * comm.size, 4, 5), ProcessGrid((comm.size, 1)), 1, halo=(width, 0, 0))
    before, after = outcome(pencil, (False,) * 3, None, "f8")
    found = []
    with HaloPlan(pencil, "f8", comm, periods=False, backend=backend, timeout=20) as plan:
        array = plan.empty_src()
        for _ in range(5):
            array[...] = before[comm.rank]
            plan.run(array)
            found += [] if same_bytes(array, after[comm.rank]) else [f"{array}"]
    verdict(found)


def test_hosts_made_up(comm, verdict):
    """Ranks of other hosts get messages within the same update."""
    found = []
    pencil = Pencil((8, 9, 10), ProcessGrid(GRIDS.get(comm.size, [(comm.size, 1)])[0]), 2, halo=2)
    before, after = outcome(pencil, (True, True, False), None, "f8")
    for nodes in ([rank % 2 for rank in range(comm.size)], [rank // 2 for rank in range(comm.size)]):
        with HaloPlan(pencil, "f8", comm, periods=(True, True, False), backend="direct", nodes=nodes) as plan:
            array = plan.empty_src()
            for _ in range(3):
                array[...] = before[comm.rank]
                plan.run(array)
                found += [] if same_bytes(array, after[comm.rank]) else [f"{nodes}"]
    verdict(found)


def test_arguments_that_are_wrong_or_differ(comm, alike):
    pencil = Pencil((8, 9, 10), ProcessGrid((1, comm.size)), 0, halo=1)
    alike(TypeError, ["periods"], lambda: HaloPlan(pencil, "f8", comm, periods=None))
    alike(ValueError, ["periods has 2"], lambda: HaloPlan(pencil, "f8", comm, periods=(True, True)))
    alike(ValueError, ["axes"], lambda: HaloPlan(pencil, "f8", comm, periods=True, axes=(0, 0)))
    alike(ValueError, ["axes"], lambda: HaloPlan(pencil, "f8", comm, periods=True, axes=3))
    if comm.size > 1:
        first, wide = comm.rank == 0, Pencil((8, 9, 10), ProcessGrid((1, comm.size)), 0, halo=2)
        alike(ValueError, ["HaloPlan: periods differs"], lambda: HaloPlan(pencil, "f8", comm, periods=first))
        axes = (0,) if first else None
        alike(ValueError, ["HaloPlan: axes differs"], lambda: HaloPlan(pencil, "f8", comm, periods=True, axes=axes))
        mine = wide if first else pencil
        alike(ValueError, ["HaloPlan: pencil differs"], lambda: HaloPlan(mine, "f8", comm, periods=True))
    with HaloPlan(pencil, "f8", comm, periods=True, check=True) as plan:
        one, other = plan.empty_src(), plan.empty_src()
        alike(ValueError, ["one array"], lambda: plan.run(one, other))
