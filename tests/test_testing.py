# SPDX-License-Identifier: Apache-2.0
"""The tools for users' tests: values by hand, virtual ranks against NumPy, and faults that must be noticed."""

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, pairs, pencils

from cudecomp import Exchange, HaloPlan, Pencil, ProcessGrid, TransposePlan, testing
from cudecomp.testing import HALO, PADDING, POISON, VirtualRanks

X = Pencil((5, 6, 7), ProcessGrid((2, 2)), 0, halo=(1, 0, (0, 2)), padding=(0, 1, 0))
Y = X.pencil(1, order="contiguous", padding=1)
RANKS, RANKS_2 = VirtualRanks(4), VirtualRanks(2)


def linear(pencil):
    return np.arange(np.prod(pencil.global_shape)).reshape(pencil.global_shape)


def test_values_by_hand():
    pencil = Pencil((2, 3), ProcessGrid((2,)), 0, order=(1, 0), halo=(0, (1, 0)), padding=(1, 0))
    first, second = RANKS_2.fill(pencil)
    assert first.tolist() == [[HALO, HALO, PADDING], [0, 3, PADDING], [1, 4, PADDING]]
    assert second.tolist() == [[HALO, HALO, PADDING], [2, 5, PADDING]]
    assert testing.poisoned(pencil, 1).tolist() == [[HALO, HALO, PADDING], [POISON, POISON, PADDING]]


@PROPERTY
@given(pairs())
def test_a_transpose_gives_the_filled_arrays(pair):
    src, dst = pair
    ranks = VirtualRanks(src.grid.size)
    given_arrays = ranks.fill(src)
    ranks.check(dst, ranks.transpose(src, dst, given_arrays))
    ranks.check(src, given_arrays)


@PROPERTY
@given(pencils())
def test_scatter_and_gather(pencil):
    ranks = VirtualRanks(pencil.grid.size)
    parts = ranks.scatter(linear(pencil), pencil)
    ranks.check(pencil, parts)
    np.testing.assert_array_equal(ranks.gather(parts, pencil), linear(pencil))


@PROPERTY
@given(pencils(), st.data())
def test_halos_take_the_arguments_of_a_plan(pencil, data):
    """One flag or several, one axis or several; the halo is that of the exchange of each axis in turn."""
    ranks = VirtualRanks(pencil.grid.size)
    periods = data.draw(st.one_of(st.booleans(), st.tuples(*[st.booleans()] * pencil.ndim)))
    arrays = ranks.fill(pencil)
    once = ranks.update_halos(pencil, arrays, periods)
    steps = arrays
    for axis in range(pencil.ndim):
        steps = ranks.update_halos(pencil, steps, periods, axis)
    ranks.check(pencil, arrays)  # the given ones are as they were
    ranks.check(pencil, once, steps)
    ranks.check(pencil, ranks.update_halos(pencil, arrays, periods, ()))


def test_halos_by_hand():
    pencil = Pencil((4, 3), ProcessGrid((2,)), 1, halo=(1, 0))
    low, high = RANKS_2.update_halos(pencil, RANKS_2.fill(pencil), periods=(True, False))
    assert low[:, 0].tolist() == [9, 0, 3, 6]
    assert high[:, 0].tolist() == [3, 6, 9, 0]
    low, high = RANKS_2.update_halos(pencil, RANKS_2.fill(pencil), periods=False, axes=0)
    assert low[:, 0].tolist() == [HALO, 0, 3, 6]
    assert high[:, 0].tolist() == [3, 6, 9, HALO]


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "V3", "?"])
def test_plans_give_what_virtual_ranks_give(dtype):
    x = Pencil((5, 6, 7), ProcessGrid((1, 1)), 0, halo=2, padding=1)
    y = x.pencil(2, order="contiguous", halo=1)
    alone = VirtualRanks(1)
    a, b = testing.fill(x, 0, dtype), testing.poisoned(y, 0, dtype)
    with TransposePlan(x, y, dtype) as plan:
        plan.run(a, b)
    alone.check(y, [b])
    alone.check(y, [b], alone.transpose(x, y, alone.fill(x, dtype)))
    with HaloPlan(x, dtype, periods=(True, False, True)) as plan:
        plan.run(a)
    alone.check(x, [a], alone.update_halos(x, alone.fill(x, dtype), periods=(True, False, True)))


PLACES = {
    "inside": (lambda array: array.transpose(np.argsort(Y.order))[0, 0, 0:1], "got np.int64(3), expected np.int64(0)"),
    "padding": (lambda array: array.reshape(-1)[-1:], "expected np.int64(-7)"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_wrong_cell_is_named(name):
    place, text = PLACES[name]
    arrays = RANKS.fill(Y)
    place(arrays[0])[...] = 3
    with pytest.raises(AssertionError) as caught:
        RANKS.check(Y, arrays)
    assert text in str(caught.value)
    assert str(caught.value).startswith("rank 0: 1 of ")
    assert testing.mismatch(Y, 0, arrays[0]) == str(caught.value)
    assert testing.mismatch(Y, 1, arrays[1]) is None
    with pytest.raises(AssertionError):
        testing.check(Y, 0, arrays[0])
    testing.check(Y, 0, arrays[0], arrays[0])


def test_all_wrong_ranks_are_named():
    with pytest.raises(AssertionError) as caught:
        RANKS.check(X, RANKS.poisoned(X))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [f"rank {rank}" for rank in range(4)]


def exchanges(**other):
    """Those of all ranks from X to Y; `other` gives those of one rank."""
    return [other.get(f"rank{rank}", Exchange(X, Y, rank)) for rank in range(4)]


def messages(exchange, side):
    return {message.peer: list(message.copies) for message in getattr(exchange, side)}


def test_exchanges_that_do_not_match():
    whole = Exchange(X, Y, 1)
    sends, recvs = messages(whole, "sends"), messages(whole, "recvs")
    peer = next(peer for peer in recvs if peer != 1)
    (copy,) = recvs[peer]
    faults = {
        "sent and never received: .*": (sends, {p: c for p, c in recvs.items() if p != peer}),
        f"rank 1 sends other boxes to rank {peer} than it expects": ({1: sends[1]}, recvs),
        f"rank {peer} sends other boxes to rank 1": (sends, recvs | {peer: [copy._replace(shape=(1, 1, 1))]}),
        "is outside the array of rank 1": (sends, recvs | {peer: [copy._replace(dst_start=(0, 40, 0))]}),
    }
    for text, (some_sends, some_recvs) in faults.items():
        wrong = Exchange.from_copies(X, Y, 1, some_sends, some_recvs)
        with pytest.raises(AssertionError, match=text):
            testing.run(exchanges(rank1=wrong), RANKS.fill(X), RANKS.poisoned(Y))
    moved = RANKS.poisoned(Y)
    testing.run(exchanges(rank1=whole), RANKS.fill(X), moved)
    RANKS.check(Y, moved)


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (lambda: VirtualRanks(0), ValueError, "VirtualRanks: got size 0, expected at least 1"),
        (lambda: VirtualRanks("2"), TypeError, "VirtualRanks: size must be an integer"),
        (lambda: RANKS_2.fill(X), ValueError, r"VirtualRanks.fill: got ProcessGrid.* expected a grid of 2 ranks"),
        (lambda: RANKS.check(X, RANKS.fill(X)[:3]), ValueError, "VirtualRanks.check: got arrays of shapes"),
        (lambda: RANKS.gather(RANKS.fill(Y), X), ValueError, "VirtualRanks.gather: got arrays of shapes"),
        (lambda: RANKS.scatter(np.zeros(3), X), ValueError, r"VirtualRanks.scatter: got shape \(3,\)"),
        (lambda: RANKS.update_halos(X, RANKS.fill(X), True, 3), ValueError, "got axes 3, expected some of 0 to 2"),
        (lambda: RANKS.update_halos(X, RANKS.fill(X), True, 0.5), TypeError, "axes, entry 0, must be an integer"),
        (lambda: RANKS.update_halos(X, RANKS.fill(X), None), ValueError, "VirtualRanks.update_halos: periods is None"),
        (lambda: RANKS.update_halos(X, RANKS.fill(X), (True, True)), ValueError, "VirtualRanks.update_halos: periods"),
    ],
)
def test_what_is_refused(action, kind, text):
    with pytest.raises(kind, match=text):
        action()


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(testing) == (0, 6)


def test_the_size_is_shown():
    assert repr(RANKS) == "VirtualRanks(4)"
    assert eval(repr(RANKS)).size == 4


def test_fields_of_any_dtype_are_told_apart():
    """Every dtype tells more than one item from the next, so that a shifted box is noticed."""
    for dtype in ("i1", "f2", "c8", "V3", "S5", [("a", "i4"), ("b", "f8")]):
        values = testing.items(np.arange(100), dtype)
        assert values.dtype == np.dtype(dtype)
        assert all(a.tobytes() != b.tobytes() for a, b in itertools.pairwise(values))


def test_arrays_that_cannot_be_compared():
    pencil = Pencil((3, 4, 5), ProcessGrid((1, 1)), 0)
    array = testing.fill(pencil, 0, "f8")
    for wrong in (array.reshape(5, 4, 3), array.reshape(-1, 1), array.reshape(-1)[:-1]):
        with pytest.raises(ValueError, match="expected the memory shape"):
            testing.check(pencil, 0, wrong)
    for expected in (np.zeros(1), array.astype("f4"), array[0]):
        with pytest.raises(ValueError, match="expected has shape"):
            testing.check(pencil, 0, array, expected)


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", np.dtype([("a", "i1"), ("b", "f8")], align=True)])
def test_bytes_between_values_do_not_count(dtype):
    pencil = Pencil((3, 4, 5), ProcessGrid((1, 1)), 0, halo=1, padding=1)
    array, again = testing.fill(pencil, 0, dtype), testing.fill(pencil, 0, dtype)
    testing.check(pencil, 0, array)
    again.reshape(-1)[-1] = again.reshape(-1)[0]
    with pytest.raises(AssertionError, match="1 of"):
        testing.check(pencil, 0, again, array)


def test_generators_of_arrays():
    ranks = testing.VirtualRanks(2)
    pencil = Pencil((4, 4, 4), ProcessGrid((1, 2)), 0)
    arrays = ranks.fill(pencil, "f8")
    with pytest.raises(AssertionError):
        ranks.check(pencil, (0 * array for array in arrays))
    ranks.check(pencil.pencil(1), ranks.transpose(pencil, pencil.pencil(1), (array for array in arrays)))
