# SPDX-License-Identifier: Apache-2.0
"""Transposes between GPU arrays whose ranks map each other's memory: results, graphs, order, stamped runs, failures."""

import itertools

import pytest
from device import grids, inplace_problems_of, problems_of

from cudecomp import Pencil, TransposePlan

pytestmark = pytest.mark.gpu

LAUNCHES = ["fused", "per_peer"]


def direct(x, y, comm, dtype="f8", **options):
    return TransposePlan(x, y, dtype, comm, device="cuda", backend="direct", **options)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_transposes_equal_the_reference(comm, verdict, launch):
    found = []
    cases = itertools.cycle(itertools.product(["f4", "c16", "i2", "i1"], [(0, 1), (1, 2), (0, 2), (2, 1), (1, 0)]))
    for grid, shape in itertools.product(grids(comm), [(3, 5, 2), (25, 26, 27), (64, 32, 33)]):
        for graphs, mapped, orders in itertools.product(
            [False, True], [False, True], [(None, None), ("contiguous", "contiguous"), (None, (2, 0, 1))]
        ):
            dtype, (a, b) = next(cases)
            x = Pencil(shape, grid, a, order=orders[0], halo=((1, 0), 0, 2))
            y = Pencil(shape, grid, b, order=orders[1], padding=(0, 1, 3))
            with direct(x, y, comm, dtype, launch=launch) as plan:
                found += problems_of(plan, graphs=graphs, empty=plan.empty_dst if mapped else None)
    verdict(found)


def test_all_orders(comm, verdict):
    found = []
    grid = grids(comm)[0]
    for a, b in itertools.product(itertools.permutations(range(3)), repeat=2):
        with direct(Pencil((5, 6, 7), grid, 0, order=a), Pencil((5, 6, 7), grid, 1, order=b), comm) as plan:
            found += problems_of(plan, rounds=1)
    verdict(found)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_in_place_and_fields(comm, verdict, launch):
    found = []
    for grid, fields, graphs in itertools.product(grids(comm), [1, 3], [False, True]):
        x, y = Pencil((16, 15, 14), grid, 0), Pencil((16, 15, 14), grid, 1, order="contiguous", halo=1)
        with direct(x, y, comm, launch=launch, inplace=True, fields=fields) as plan:
            found += inplace_problems_of(plan, graphs)
    verdict(found)
