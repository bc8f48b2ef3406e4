# SPDX-License-Identifier: Apache-2.0
"""Transposes over MPI: all orders, a pairwise covering of everything else, and the special shapes of groups."""

import itertools

import numpy as np
import pytest
from covering import pairwise
from exercise import DTYPES, WAYS, Trial
from mpi4py import MPI

from cudecomp import Pencil, ProcessGrid, TransposePlan, Workspace
from cudecomp import testing as reference

SIZE = MPI.COMM_WORLD.Get_size()
MOVERS = ("mpi_p2p", "mpi_p2p_pl", "mpi_a2a", "direct")
BACKENDS = (*MOVERS, "auto")
# The grid that is neither a row nor a column where there is one, and the others.
GRIDS = {
    1: ((1, 1),),
    2: ((2, 1), (1, 2)),
    3: ((3, 1), (1, 3)),
    4: ((2, 2), (4, 1), (1, 4)),
    6: ((2, 3), (3, 2), (1, 6)),
}
GRIDS = GRIDS.get(SIZE, ((SIZE, 1), (1, SIZE)))
ORDERS = list(itertools.permutations(range(3)))

SHAPES = {"uneven": (7, 10, 5), "empty": (2, 3, 5), "odd": (11, 3, 13), "2-D": (9, 13), "4-D": (3, 7, 4, 5)}
HALOS = {
    "none": (None, None),
    "same": (1, 1),
    "low": ([(1, 0), (0, 0), (2, 0), (1, 0)], None),
    "high": (None, [(0, 2), (0, 1), (0, 0), (0, 3)]),
    "mixed": ([(0, 1), (1, 0), (2, 1), (0, 0)], [(1, 2), (0, 0), (0, 1), (1, 0)]),
}
PADDINGS = {"none": (None, None), "src": ([1, 0, 2, 1], None), "dst": (None, [0, 2, 0, 1]), "both": (1, [2, 0, 1, 0])}
ORDER_PAIRS = {
    "identity": (None, None),
    "contiguous": ("contiguous", "contiguous"),
    "to contiguous": (None, "contiguous"),
    "reversed": ("contiguous", "reversed"),
    "mixed": ("mixed", None),
}
FACTORS = {
    "pair": ("0-1", "1-2", "2-1", "1-0", "0-2", "2-0", "0-0", "grid 0-0", "grid 0-2", "grid 1-0"),
    "dtype": tuple(DTYPES),
    "backend": BACKENDS,
    "shape": tuple(SHAPES),
    "inplace": (False, True),
    "halo": tuple(HALOS),
    "padding": tuple(PADDINGS),
    "fields": (1, 3),
    "form": ("array", "sequence", "flat"),
    "order": tuple(ORDER_PAIRS),
    "rank_order": ("row", "column"),
    "grid": tuple(range(len(GRIDS))),
    "dist": (False, True),
    "way": tuple(WAYS),
}
ROWS = pairwise(FACTORS)


def grid_of(number, ndim, rank_order):
    """A grid of ndim - 1 entries out of GRIDS, for arrays of 2 to 4 axes."""
    shape = GRIDS[number % len(GRIDS)]
    shape = {2: (SIZE,), 3: shape, 4: (shape[0], 1, shape[1])}[ndim]
    return ProcessGrid(shape, rank_order=rank_order)


def order_of(name, ndim):
    if name == "reversed":
        return tuple(reversed(range(ndim)))
    return (1, 0, *range(2, ndim)) if name == "mixed" else name


def pencils_of(row):
    """The two pencils of a row of the covering."""
    shape = SHAPES[row["shape"]]
    ndim = len(shape)
    axes = [min(int(axis), ndim - 1) for axis in row["pair"].removeprefix("grid ").split("-")]
    numbers = [row["grid"], row["grid"] + row["pair"].startswith("grid")]
    dist = tuple(max(1, n - 2) for n in shape) if row["dist"] else None
    halos, paddings, orders = HALOS[row["halo"]], PADDINGS[row["padding"]], ORDER_PAIRS[row["order"]]
    return [
        Pencil(
            shape,
            grid_of(numbers[side], ndim, row["rank_order"]),
            axes[side],
            order=order_of(orders[side], ndim),
            halo=_cut(halos[side], ndim),
            padding=_cut(paddings[side], ndim),
            dist_shape=dist if side == 0 else None,
        )
        for side in range(2)
    ]


def _cut(value, ndim):
    return value[:ndim] if isinstance(value, list) else value


def row_name(row):
    return " ".join(str(value) if not isinstance(value, bool) else f"{name}={value}" for name, value in row.items())


@pytest.mark.parametrize("row", ROWS, ids=[f"{number}" for number in range(len(ROWS))])
def test_covering(comm, verdict, row):
    src, dst = pencils_of(row)
    options = {"fields": row["fields"], "inplace": row["inplace"], "backend": row["backend"]}
    with TransposePlan(src, dst, DTYPES[row["dtype"]], comm, **options) as plan, plan.reverse() as back:
        found = []
        for stamp, one in enumerate((plan, back)):
            found += Trial(one, stamp, row["form"]).run(row["way"])
        verdict([f"{row_name(row)}: {text}" for text in found])


@pytest.mark.parametrize(("backend", "rank_order"), [*zip(MOVERS, ["row", "column"] * 2, strict=True)])
def test_all_pairs_of_orders(comm, verdict, backend, rank_order):
    grid = ProcessGrid(GRIDS[0], rank_order=rank_order)
    found = []
    for a, b in itertools.product(ORDERS, ORDERS):
        src, dst = Pencil((5, 6, 7), grid, 0, order=a), Pencil((5, 6, 7), grid, 1, order=b)
        with TransposePlan(src, dst, "f8", comm, backend=backend) as plan:
            found += Trial(plan).run()
    verdict(found)


@pytest.mark.parametrize("backend", MOVERS)
def test_every_dtype_in_every_direction(comm, verdict, backend):
    """Smoke: each dtype travels between all neighbours and across, with one shared workspace."""
    grid = ProcessGrid(GRIDS[0])
    pencils = [Pencil((5, 6, 7), grid, axis, order="contiguous") for axis in range(3)]
    found, workspace = [], Workspace(comm)
    others = ["bool", "u1", "u4", "i8", "f2", "c8", "M8[ns]", ">f8", "S5", "U2", "g"]
    for dtype in [*DTYPES.values(), *(map(np.dtype, others) if backend == "mpi_p2p" else ())]:
        for a, b in ((0, 1), (1, 2), (2, 1), (1, 0), (0, 2), (2, 0)):
            with TransposePlan(pencils[a], pencils[b], dtype, comm, backend=backend, workspace=workspace) as plan:
                src, dst = plan.empty_src(), plan.empty_dst()
                wanted = dst.copy()
                for array, pencil in ((src, pencils[a]), (wanted, pencils[b])):
                    words = np.ascontiguousarray(raw_words(pencil, plan.rank, dtype.itemsize))
                    array.view(np.uint8).reshape(-1)[:] = words.reshape(-1)
                plan.run(src, dst)
                if dst.tobytes() != wanted.tobytes():
                    found.append(f"{dtype} {a}-{b} is wrong")
    verdict(found)


def raw_words(pencil, rank, itemsize):
    """Bytes that tell the items of a rank's array apart, whatever their type."""
    index = reference.fill(pencil, rank, np.int64)
    return (index[..., None] * 31 + np.arange(itemsize) * 7).astype(np.uint8)


@pytest.mark.parametrize("backend", MOVERS)
@pytest.mark.parametrize("rank_order", ["row", "column"])
def test_uneven_parts_in_a_single_group(comm, verdict, backend, rank_order):
    """All ranks in one group, sizes all different: the block that stays on a rank is right in every step."""
    shape = (2 * SIZE + 1, 3 * SIZE - 1, SIZE + 2)
    found = []
    for entries in ((SIZE, 1), (1, SIZE)):
        pencils = [Pencil(shape, ProcessGrid(entries, rank_order=rank_order), axis) for axis in range(3)]
        for a, b in itertools.permutations(range(3), 2):
            with TransposePlan(pencils[a], pencils[b], "c16", comm, backend=backend) as plan:
                found += Trial(plan).run()
    verdict(found)


@pytest.mark.parametrize("backend", MOVERS)
def test_groups_without_peers(comm, verdict, backend):
    """A rank that nothing is sent to and nothing comes from is no error: groups of one, and all items on one rank."""
    row, column = ProcessGrid((1, SIZE)), ProcessGrid((SIZE, 1))
    pairs = [
        (Pencil((4, 5, 6), row, 0), Pencil((4, 5, 6), row, 1)),  # entry of one rank
        (Pencil((4, 5, 6), column, 1), Pencil((4, 5, 6), column, 2)),
        (Pencil((4, 5, 6), row, 1), Pencil((4, 5, 6), row, 1, order="contiguous")),
        (Pencil((1, 1, 6), row, 0), Pencil((1, 1, 6), row, 2)),  # to rank 0 only
        (Pencil((1, 1, 1), row, 0), Pencil((1, 1, 1), column, 2)),
        (Pencil((2, 2, 3), row, 0), Pencil((2, 2, 3), row, 1)),
        (Pencil((2, 2, 3), column, 0), Pencil((2, 2, 3), row, 2)),
    ]
    found = []
    for src, dst in pairs:
        for inplace in (False, True):
            with TransposePlan(src, dst, "f8", comm, backend=backend, inplace=inplace) as plan:
                for stamp in range(2):
                    found += Trial(plan, stamp).run()
    verdict(found)


@pytest.mark.skipif(SIZE != 3, reason="for 3 ranks: groups {0, 1} and {2}")
@pytest.mark.parametrize("backend", MOVERS)
def test_a_group_of_two_and_one_alone(comm, verdict, backend):
    """Two ranks exchange all there is, the third has no items at all."""
    src = Pencil((2, 2, 3), ProcessGrid((3, 1)), 2)
    dst = Pencil((2, 2, 3), ProcessGrid((3, 1)), 0)
    with TransposePlan(src, dst, "f8", comm, backend=backend) as plan, plan.reverse() as back:
        verdict([text for one in (plan, back) for text in Trial(one).run()])


@pytest.mark.parametrize("backend", MOVERS)
def test_empty_parts_there_and_back(comm, verdict, backend):
    """More ranks than items along an axis, on both long grids, between all pencils."""
    found = []
    for entries in ((SIZE, 1), (1, SIZE)):
        pencils = [Pencil((3, 5, 2), ProcessGrid(entries), axis) for axis in range(3)]
        for a, b in itertools.permutations(pencils, 2):
            for inplace in (False, True):
                with TransposePlan(a, b, "f8", comm, backend=backend, inplace=inplace) as plan, plan.reverse() as back:
                    found += Trial(plan).run() + Trial(back, 1).run()
    verdict(found)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", MOVERS)
def test_halo_on_one_side_only(comm, verdict, backend, inplace):
    """Halo in one of the two pencils, on one of the two sides, in either direction."""
    grid = ProcessGrid(GRIDS[0])
    found = []
    for halo in ([(1, 0), (0, 0), (0, 0)], [(0, 0), (0, 2), (0, 0)], [(0, 0), (0, 0), (3, 0)]):
        for a, b in ((halo, None), (None, halo)):
            src = Pencil((6, 7, 8), grid, 0, halo=a)
            dst = Pencil((6, 7, 8), grid, 1, halo=b)
            with TransposePlan(src, dst, "f4", comm, backend=backend, inplace=inplace) as plan, plan.reverse() as back:
                found += Trial(plan).run() + Trial(back, 1).run()
    verdict(found)


def test_pencil_to_slab_and_other_grids(comm, verdict):
    """Across from axis 0 to 2, to slabs, and to every other grid and rank order of as many ranks."""
    shape, found = (7, 6, 5), []
    grids = [ProcessGrid(entries, rank_order=order) for entries in GRIDS for order in ("row", "column")]
    for number, (a, b) in enumerate(itertools.product(grids, grids)):
        backend = MOVERS[number % len(MOVERS)]
        for axes in ((0, 2), (0, 0)):
            src, dst = Pencil(shape, a, axes[0], halo=1), Pencil(shape, b, axes[1], order="contiguous")
            with TransposePlan(src, dst, "f8", comm, backend=backend) as plan:
                found += Trial(plan).run()
    verdict(found)


def test_a_ramp_to_2_to_the_40_is_bit_exact(comm):
    """Values with 41 significant bits, and with every mantissa bit in use, come back as they were."""
    pencil = Pencil((8, 9, 10), ProcessGrid(GRIDS[0]), 0)
    ramp = np.linspace(0, 2.0**40, 720).reshape(8, 9, 10)
    ramp[0, 0, 1:4] = np.array([0x7FF8DEADBEEF0001, 0x8000000000000000, 0x0000000000000001], np.uint64).view("f8")
    with TransposePlan(pencil, pencil.pencil(1), "f8", comm) as there, there.reverse() as back:
        a, b, c = there.empty_src(), there.empty_dst(), there.empty_src()
        pencil.interior(a, there.rank)[...] = ramp[pencil.slices(there.rank)]
        there.run(a, b)
        back.run(b, c)
        assert b.tobytes() == np.ascontiguousarray(ramp[there.dst.slices(there.rank)]).tobytes()
        assert c.tobytes() == a.tobytes()


def test_pencils_are_unchanged_by_plans(comm):
    pencil = Pencil((8, 9, 10), ProcessGrid(GRIDS[0]), 0, halo=1)
    before = repr(pencil), hash(pencil)
    with TransposePlan(pencil, pencil.pencil(1), "f8", comm), TransposePlan(pencil, pencil.pencil(2), "i2", comm):
        assert (repr(pencil), hash(pencil)) == before
    assert pencil == Pencil((8, 9, 10), ProcessGrid(GRIDS[0]), 0, halo=1)


def test_local_sizes_add_up(comm):
    """25^3 items are neither lost nor doubled, by any pencil."""
    for axis in range(3):
        pencil = Pencil((25, 25, 25), ProcessGrid(GRIDS[0]), axis)
        assert comm.allreduce(int(np.prod(pencil.shape(comm.rank)))) == 25**3


def test_rewrites_are_in_effect(comm):
    """Messages that need no pack leave from the array: the workspace holds no room for them."""
    grid = ProcessGrid((SIZE, 1))
    dst = Pencil((2 * SIZE, 2 * SIZE, 6), grid, 1)  # split over axis 0
    slab = Pencil((2 * SIZE, 2 * SIZE, 6), grid, 0)  # split over axis 1
    with TransposePlan(slab, dst, "f8", comm, backend="mpi_p2p") as plan:
        half = 2 * 2 * 6 * 8  # bytes of one message
        assert plan.workspace_bytes <= (SIZE - 1) * (-(-half // 256) * 256)
        assert ("leave from the source array" in plan.explain()) == (SIZE > 1)
        assert not Trial(plan).run()
        assert plan.stats["messages"] == SIZE - 1


@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_p2p_pl"])
def test_large_fields_without_gaps_travel_one_by_one(comm, verdict, backend):
    """On one end each lies in its own array, on the other in the workspace; the messages of a peer keep their order."""
    grid, shape = ProcessGrid((SIZE, 1)), (4 * SIZE, 4 * SIZE, 400)
    src, dst = Pencil(shape, grid, 0), Pencil(shape, grid, 1)
    found, count = [], 3 * (SIZE - 1)
    with TransposePlan(src, dst, "f8", comm, backend=backend, fields=3) as plan, plan.reverse() as back:
        for stamp, way in enumerate(("run", "call", "split", "poll")):
            found += Trial(plan, stamp, "sequence").run(way) + Trial(back, stamp).run(way)
        for one, place in ((plan, "leave from the source array"), (back, "land in the destination array")):
            if SIZE > 1 and f"{count} of {count} messages {place}" not in one.explain():
                found.append(one.explain())
            if one.stats["messages"] != 4 * count:
                found.append(f"{one.stats['messages']} messages in 4 runs, expected {4 * count}")
    verdict(found)
