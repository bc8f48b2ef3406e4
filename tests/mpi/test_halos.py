# SPDX-License-Identifier: Apache-2.0
"""Halo updates over every transport against the reference, which plays all ranks."""

import numpy as np
import pytest
import updates
from exercise import same_bytes

from cudecomp import HaloPlan, Pencil, ProcessGrid

GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)], 4: [(2, 2), (4, 1)], 6: [(2, 3)], 8: [(2, 4)]}


def grids(comm):
    return GRIDS.get(comm.size, [(comm.size, 1)])


@pytest.mark.parametrize("backend", ["auto", "direct", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
def test_halos_equal_the_reference(comm, verdict, backend):
    found = []
    for pencil, options, dtype in updates.cases(grids(comm)):
        found += updates.problems(pencil, dtype, comm, {**options, "backend": backend})
    verdict(found)


@pytest.mark.parametrize("backend", ["auto", "direct", "mpi_p2p"])
def test_arrays_that_peers_do_not_know(comm, verdict, backend):
    found = []
    for pencil, options, dtype in updates.cases(grids(comm)):
        before, after = updates.outcome(pencil, options["periods"], options["axes"], dtype)
        with HaloPlan(pencil, dtype, comm, backend=backend, **options) as plan:
            own = np.empty(plan.empty_src().shape, dtype)
            for way, run in updates.WAYS.items():
                own[...] = before[comm.rank]
                run(plan, own)
                if not same_bytes(own, np.broadcast_to(after[comm.rank], own.shape)):
                    found.append(f"{way}: {pencil}, {options}")
    verdict(found)


@pytest.mark.parametrize("fields", [1, 3])
@pytest.mark.parametrize("backend", ["direct", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
def test_faces_without_gaps_are_neither_packed_nor_unpacked(comm, verdict, backend, fields):
    """Planes along the slowest axis leave from the array and land in it, one message each, two of them to one peer on
    two ranks; the collective takes one message per peer, so that it packs those two.
    """
    found = []
    for width, order, axis in [(1, None, 0), ((2, 1), (1, 2, 0), 1)]:
        shape = tuple(4 * comm.size if a == axis else 80 for a in range(3))
        halo = tuple(width if a == axis else 1 for a in range(3))
        pencil = Pencil(shape, ProcessGrid((comm.size, 1)), 1 - axis, halo=halo, order=order)
        before, after = updates.outcome(pencil, (True,) * 3, (axis,), "f8")
        options = {"periods": True, "axes": axis, "backend": backend, "fields": fields}
        with HaloPlan(pencil, "f8", comm, **options) as plan:
            array = plan.empty_src()
            for _ in range(3):
                array[...] = before[comm.rank]
                plan.run(array)
                if not same_bytes(array, np.broadcast_to(after[comm.rank], array.shape)):
                    found.append(f"{pencil}, {options}")
            found += [f"{options}: {text}" for text in not_in_effect(plan)]
    verdict(found)


def not_in_effect(plan):
    """What is wrong with the messages of a plan that updates one axis, whose faces have no gaps."""
    size, by_message = plan.comm.size, plan.backend != "direct" and plan.comm.size > 1
    if plan.backend == "mpi_a2a" and (size == 2 or plan.fields > 1):
        return []
    count = 2 * plan.fields if by_message else 0
    texts = [f"{count} of {count} messages leave from the source array", f"{count} of {count} messages land in"]
    found = [repr(plan)] if by_message and not all(t in repr(plan) and t in plan.explain() for t in texts) else []
    if plan.stats["messages"] != 3 * count:
        found.append(f"{plan.stats['messages']} messages in 3 runs, expected {3 * count}")
    if by_message and plan.workspace_bytes:
        found.append(f"{plan.workspace_bytes} bytes of workspace")
    return found


@pytest.mark.parametrize("backend", ["direct", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
@pytest.mark.parametrize("width", [(1, 0), (0, 1), (2, 2)], ids=str)
def test_one_direction_alone_and_within_one_array(comm, verdict, backend, width):
    """Ranks at a wall only send or only receive; rows without gaps leave from, and land in, the array itself."""
    pencil = Pencil((3 * comm.size, 4, 5), ProcessGrid((comm.size, 1)), 1, halo=(width, 0, 0))
    before, after = updates.outcome(pencil, (False,) * 3, None, "f8")
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
    pencil = Pencil((8, 9, 10), ProcessGrid(grids(comm)[0]), 2, halo=2)
    before, after = updates.outcome(pencil, (True, True, False), None, "f8")
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
