# SPDX-License-Identifier: Apache-2.0
"""Whole arrays on one rank and their parts on all: every root, layout and form; errors alike; memory; long messages."""

import itertools
import tracemalloc

import numpy as np
import pytest
from exercise import DTYPES, same_bytes
from mpi4py import MPI

from cudecomp import Pencil, ProcessGrid, gather, scatter, testing, whole

SIZE = MPI.COMM_WORLD.Get_size()
LAST = SIZE - 1
GRIDS = [(SIZE, 1), (1, SIZE), *([(2, SIZE // 2)] if SIZE % 2 == 0 else [])]
SHAPES = [(9, 8, 7), (3, 5, 2), (1, 2, 1)]  # the last ones leave ranks without interior
several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")


def linear(shape, dtype="f8", fields=None):
    """The whole array whose parts `testing.fill` gives; fields are some thousands apart."""
    indices = np.arange(np.prod(shape)).reshape(shape)
    return testing.items(indices if fields is None else np.stack([indices + 1000 * f for f in range(fields)]), dtype)


def layouts():
    """Pencils with halos and padding, in all orders in turn."""
    orders = itertools.cycle(itertools.permutations(range(3)))
    for shape, grid, axis in itertools.product(SHAPES, GRIDS, range(3)):
        for rank_order in ("row", "column"):
            yield Pencil(
                shape,
                ProcessGrid(grid, rank_order=rank_order),
                axis,
                order=next(orders),
                halo=((1, 0), 2, (0, 1)),
                padding=(0, 1, 2),
            )


def test_every_layout_and_root(comm, verdict):
    found = []
    turns = itertools.cycle(itertools.product(range(SIZE), DTYPES.values()))
    for pencil, (root, dtype) in zip(layouts(), turns, strict=False):
        array = linear(pencil.global_shape, dtype) if comm.rank == root else None
        out = testing.poisoned(pencil, comm.rank, dtype)
        same = scatter(array, pencil, comm, root, out=out) is out
        wrong = testing.mismatch(pencil, comm.rank, out)
        back = gather(out, pencil, comm, root)
        if comm.rank == root:
            right = same_bytes(back, array) and back.shape == array.shape and back.dtype == array.dtype
        else:
            right = back is None
        if wrong or not right or not same:
            found.append(f"root {root}, {dtype}, {pencil}: {wrong or 'not as before'}")
    verdict(found)


@pytest.mark.parametrize("form", ["new", "array", "sequence", "flat"])
def test_fields(comm, verdict, form):
    pencil = next(layouts())
    shape, ranks = pencil.global_shape, testing.VirtualRanks(SIZE)
    fields = linear(shape, "i4", 3)
    expected = [ranks.scatter(field, pencil)[comm.rank] for field in fields]
    out = np.stack([testing.poisoned(pencil, comm.rank, "i4")] * 3)
    if form == "flat":
        out = np.concatenate([out.reshape(3, -1), np.zeros((3, 5), "i4")], axis=1)
    out = {"new": None, "sequence": list(out)}.get(form, out)
    part = scatter(fields if comm.rank == LAST else "not looked at", pencil, comm, LAST, out=out, fields=3)
    if form == "new":
        expected = [np.where(testing.fill(pencil, comm.rank) < 0, 0, one) for one in expected]
    found = [testing.mismatch(pencil, comm.rank, mine, one) for mine, one in zip(part, expected, strict=True)]
    whole_array = np.full((*shape, 3), -1, "i4").transpose(3, 0, 1, 2) if comm.rank == 0 else "not looked at"
    back = gather(part, pencil, comm, out=whole_array, fields=3)
    if comm.rank == 0 and not (back is whole_array and same_bytes(back, fields)):
        found.append("the whole array is wrong")
    verdict([text for text in found if text])


def test_pieces_of_several_messages(comm, verdict, monkeypatch):
    """Messages that end within an item, and others that end with the piece."""
    found = []
    for most in (13, 8, 1 << 20):
        monkeypatch.setattr(whole, "MESSAGE", most)
        for pencil in itertools.islice(layouts(), 6):
            array = linear(pencil.global_shape, "c16") if comm.rank == LAST else None
            part = scatter(array, pencil, comm, LAST, out=testing.poisoned(pencil, comm.rank, "c16"))
            wrong = testing.mismatch(pencil, comm.rank, part)
            back = gather(part, pencil, comm)
            if comm.rank == 0 and not same_bytes(back, linear(pencil.global_shape, "c16")):
                wrong = "the whole array is wrong"
            found += [f"{most} bytes, {pencil}: {wrong}"] if wrong else []
    verdict(found)


def test_groups_at_once(comm, verdict):
    """Ranks of either half have a whole array of their own."""
    half = comm.Split(comm.rank % 2)
    pencil = Pencil((6, 5, 4), ProcessGrid((half.size, 1)), 2, order="contiguous", halo=1)
    array = linear((6, 5, 4)) + 100 * (comm.rank % 2)
    back = gather(scatter(array, pencil, half), pencil, half)
    verdict([] if half.rank or same_bytes(back, array) else ["the halves mix"])
    half.Free()


@several
def test_a_root_holds_one_piece(comm, verdict):
    """Not a copy of the whole array: the largest part, and its own."""
    pencil = Pencil((64, 64, 64), ProcessGrid((SIZE, 1)), 1, order="contiguous")
    array = linear((64, 64, 64)) if comm.rank == 0 else None
    out, found = np.empty(pencil.memory_shape(comm.rank)), []
    target = np.empty_like(array) if comm.rank == 0 else None
    scatter(array, pencil, comm, out=out)  # makes the communicator
    passing = range(1, SIZE) if comm.rank == 0 else (comm.rank,)
    most = max(pencil.box(rank).size for rank in passing) * 8
    for name, action in {
        "scatter": lambda: scatter(array, pencil, comm, out=out),
        "gather": lambda: gather(out, pencil, comm, out=target),
    }.items():
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if not most <= peak <= most + 65536:
            found.append(f"{name}: {peak} bytes, expected {most}")
    verdict(found)


X, Y = (Pencil((6, 7, 8), ProcessGrid((SIZE, 1)), axis, halo=1) for axis in (0, 1))

# What the last rank does instead of scattering, the kind of error and a part of its text.
BAD_SCATTERS = {
    "pencil": ({"pencil": Y}, ValueError, "scatter: pencil differs over the ranks"),
    "no pencil": ({"pencil": None}, TypeError, "scatter: pencil is a NoneType"),
    "root": ({"root": LAST}, ValueError, "scatter: root differs over the ranks"),
    "no root": ({"root": SIZE}, ValueError, f"scatter: root is {SIZE}"),
    "fields": ({"fields": 2}, ValueError, "scatter: fields differs over the ranks: 1 on rank"),
    "out shape": ({"out": np.zeros((2, 2, 2))}, ValueError, "scatter: out has shape (2, 2, 2)"),
    "out dtype": ({"out": np.zeros(X.memory_shape(LAST), "f4")}, TypeError, "expected float64"),
    "out": ({"out": "here"}, TypeError, "scatter: out is a str"),
    "device": ({"device": "abacus"}, ValueError, "scatter: device is 'abacus'"),
}
BAD_GATHERS = {
    "pencil": ({"pencil": Y}, ValueError, "gather: pencil differs over the ranks"),
    "dtype": ({"array": np.zeros(X.memory_shape(LAST), "f4")}, ValueError, "gather: dtype differs over the ranks"),
    "shape": ({"array": np.zeros((2, 2, 2))}, ValueError, "gather: array has shape (2, 2, 2)"),
    "nothing": ({"array": None}, TypeError, "gather: array is a NoneType"),
}


@several
@pytest.mark.parametrize("name", BAD_SCATTERS)
def test_a_bad_argument_of_scatter(comm, alike, name):
    change, kind, text = BAD_SCATTERS[name]
    arguments = {"array": linear((6, 7, 8)), "pencil": X, "comm": comm} | (change if comm.rank == LAST else {})
    alike(kind, [text], lambda: scatter(**arguments))


@several
@pytest.mark.parametrize("name", BAD_GATHERS)
def test_a_bad_argument_of_gather(comm, alike, name):
    change, kind, text = BAD_GATHERS[name]
    arguments = {"array": testing.fill(X, comm.rank, "f8"), "pencil": X, "comm": comm}
    alike(kind, [text], lambda: gather(**arguments | (change if comm.rank == LAST else {})))


def test_what_is_wrong_on_the_root(comm, alike):
    """All ranks learn of it."""
    part = testing.fill(X, comm.rank, "f8")
    alike(ValueError, ["scatter: array has shape (6, 7, 9)"], lambda: scatter(np.zeros((6, 7, 9)), X, comm, LAST))
    alike(TypeError, ["scatter: array is a NoneType"], lambda: scatter(None, X, comm, LAST))
    alike(TypeError, ["without Python objects"], lambda: scatter(np.zeros((6, 7, 8), object), X, comm, LAST))
    alike(ValueError, ["gather: out has shape (2,)"], lambda: gather(part, X, comm, LAST, out=np.zeros(2)))
    alike(TypeError, ["gather: out has dtype"], lambda: gather(part, X, comm, LAST, out=np.zeros((6, 7, 8), "i8")))
    assert gather(scatter(linear((6, 7, 8)), X, comm), X, comm) is None or comm.rank == 0


@several
def test_one_scatters_while_the_others_gather(comm, raised):
    """Each names its own call, and all the same reason."""
    mine = scatter if comm.rank == LAST else gather
    array = linear((6, 7, 8)) if comm.rank == LAST else testing.fill(X, comm.rank, "f8")
    reasons = [(kind, text.partition(": ")[2]) for kind, text in raised(lambda: mine(array, X, comm))]
    assert len(set(reasons)) == 1
    assert reasons[0][0] == "ValueError"
    assert "operation differs over the ranks: gather on rank" in reasons[0][1]


def test_what_is_no_communicator():
    with pytest.raises(TypeError, match=r"comm is a str, expected an mpi4py\.MPI\.Intracomm or None"):
        scatter(linear((6, 7, 8)), X, "world")


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.skipif(SIZE != 2, reason="for 2 ranks")
def test_a_piece_beyond_31_bits(comm, verdict):
    """Rank 0 has one item, rank 1 all others."""
    items = (1 << 31) + 4099
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    if not comm.bcast(free > 4 * items + (2 << 30)):
        pytest.skip(f"needs {(4 * items >> 30) + 3} GiB of memory")
    pencil = Pencil((1, items), ProcessGrid((2,)), 0, dist_shape=(1, 2))
    assert pencil.shape(1) == (1, items - 1)
    marks = np.array([0, 1, 2, 255, 1 << 30, (1 << 31) - 1, 1 << 31, items - 2, items - 1])
    array = None
    if comm.rank == 0:
        array = np.zeros((1, items), np.int8)
        array[0, marks] = 1 + np.arange(marks.size)
    part = scatter(array, pencil, comm)
    found = []
    if comm.rank == 1:
        right = np.array_equal(part[0, marks[1:] - 1], 2 + np.arange(marks.size - 1))
        found += [] if right and np.count_nonzero(part) == marks.size - 1 else ["the part is wrong"]
    if comm.rank == 0:
        array[...] = 77
    gather(part, pencil, comm, out=array)
    if comm.rank == 0:
        right = np.array_equal(array[0, marks], 1 + np.arange(marks.size))
        found += [] if right and np.count_nonzero(array) == marks.size else ["the whole array is wrong"]
    verdict(found)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [None, 2])
def test_device_arrays(comm, verdict, fields):
    """The library's own and CuPy's; halo and padding stay as they were."""
    cupy = pytest.importorskip("cupy")
    found = []
    for pencil in itertools.islice(layouts(), 4):
        array = linear(pencil.global_shape, "f8", fields)
        before = testing.poisoned(pencil, comm.rank, "f8")
        out = cupy.asarray(before if fields is None else np.stack([before] * fields))
        scatter(array, pencil, comm, out=out, fields=fields)
        new = scatter(array, pencil, comm, fields=fields, device="cuda")
        back = gather(out, pencil, comm, LAST, fields=fields)
        again = gather(new, pencil, comm, LAST, fields=fields)
        wrong = testing.mismatch(pencil, comm.rank, cupy.asnumpy(out if fields is None else out[0]))
        right = comm.rank != LAST or (same_bytes(back, array) and same_bytes(again, array))
        if wrong or not right:
            found.append(f"{pencil}: {wrong or 'the whole array is wrong'}")
    verdict(found)


def test_arrays_that_overlap(comm, alike):
    """What is written must not share memory with anything else, on any rank."""
    pencil = Pencil((4, 4 * comm.size, 4), ProcessGrid((1, comm.size)), 2)
    whole = np.zeros(pencil.global_shape)
    part = whole.reshape(-1)[: pencil.size(comm.rank)]
    other = np.zeros(pencil.memory_shape(comm.rank))
    first = comm.rank == 0
    alike(ValueError, ["scatter", "overlap"], lambda: scatter(whole, pencil, comm, out=part if first else other))
    alike(ValueError, ["gather", "overlap"], lambda: gather(part if first else other, pencil, comm, out=whole))
    wholes = np.zeros((2, *pencil.global_shape))
    alike(ValueError, ["scatter", "overlap"], lambda: scatter(wholes, pencil, comm, fields=2, out=[other, other]))
