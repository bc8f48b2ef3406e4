# SPDX-License-Identifier: Apache-2.0
"""Halo exchanges: all ranks in one process against NumPy's own padding of the whole array."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, pencils

from cudecomp import Pencil, ProcessGrid
from cudecomp import testing as reference
from cudecomp.halo import halo_exchange

OUTSIDE = -5  # what users put beyond walls


def whole(pencil, periods):
    """The values at any indices: a function of global indices along each axis, which may lie outside the array."""
    shape = pencil.global_shape
    values = np.arange(np.prod(shape)).reshape(shape)

    def at(indices):
        wrapped = [
            np.where(periods[a], i % shape[a], np.clip(i, 0, shape[a] - 1))
            for a, i in enumerate(map(np.asarray, indices))
        ]
        return values[np.ix_(*wrapped)]

    return at


def ranges(pencil, rank):
    """The global indices of all that a rank allocates but padding, per axis."""
    box = pencil.box(rank)
    return [np.arange(b - low, e + high) for b, e, (low, high) in zip(box.start, box.stop, pencil.halo, strict=True)]


def start_array(pencil, rank):
    """Memory of a rank: its interior, canaries in halo and padding."""
    return reference.fill(pencil, rank, "i8")


def updated(pencil, periods, axes):
    """The memory of all ranks after an update of `axes`."""
    ranks = range(pencil.grid.size)
    arrays = [start_array(pencil, rank) for rank in ranks]
    reference.run([halo_exchange(pencil, rank, periods, axes) for rank in ranks], arrays, arrays)
    return arrays


def in_axis_order(pencil, array):
    """The memory of a rank as an array in axis order, without padding."""
    view = array.transpose(np.argsort(pencil.order))
    return view[tuple(slice(n - pad) for n, pad in zip(view.shape, pencil.padding, strict=True))]


CASES = [
    ((8, 4, 4), (2, 1), 1), ((8, 4, 4), (1, 2), 1), ((6, 7, 8), (1, 4), 2), ((6, 7, 8), (4, 1), 2),
    ((6, 7, 8), (1, 1), 2), ((6, 7, 8), (1, 4), 1), ((6, 7, 8), (4, 1), 1), ((6, 7, 8), (1, 1), 1),
    ((5, 6, 7), (2, 3), ((2, 1), (0, 1), 1)), ((9, 9, 9), (3, 3), 4),
    ((4, 4, 4), (4, 1), 6), ((3, 2, 5), (2, 2), 1),
]  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("shape", "grid", "halo"), CASES)
def test_periodic_halos_repeat_the_whole_array(shape, grid, halo, axis):
    pencil = Pencil(shape, ProcessGrid(grid), axis, halo=halo, order=(2, 0, 1), padding=(1, 0, 2))
    at = whole(pencil, (True,) * 3)
    for rank, array in enumerate(updated(pencil, (True,) * 3, range(3))):
        if pencil.box(rank).size:
            np.testing.assert_array_equal(in_axis_order(pencil, array), at(ranges(pencil, rank)))


@pytest.mark.parametrize("periods", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(("shape", "grid", "halo"), CASES)
def test_walls_keep_what_is_beyond_them(shape, grid, halo, periods):
    pencil = Pencil(shape, ProcessGrid(grid), 1, halo=halo)
    at = whole(pencil, periods)
    for rank, array in enumerate(updated(pencil, periods, range(3))):
        if not pencil.box(rank).size:
            continue
        indices = ranges(pencil, rank)
        beyond = np.zeros([len(i) for i in indices], bool)
        for a, i in enumerate(indices):
            if not periods[a]:
                outside = (i < 0) | (i >= shape[a])
                beyond |= outside.reshape([-1 if b == a else 1 for b in range(3)])
        expected = np.where(beyond, reference.HALO, at(indices))
        np.testing.assert_array_equal(in_axis_order(pencil, array), expected)


def test_one_dimension_by_hand():
    pencil = Pencil((4, 1), ProcessGrid((1,)), 0, halo=(2, 0))
    array = np.array([0, 0, 3, 4, 5, 6, 0, 0]).reshape(8, 1)
    reference.run([halo_exchange(pencil, 0, (True, True), (0,))], [array], [array])
    assert array.ravel().tolist() == [5, 6, 3, 4, 5, 6, 3, 4]


@PROPERTY
@given(pencils(), st.data())
def test_what_is_sent_is_what_is_received(pencil, data):
    periods = data.draw(st.tuples(*[st.booleans()] * pencil.ndim))
    axes = data.draw(st.sets(st.integers(0, pencil.ndim - 1)))
    exchanges = [halo_exchange(pencil, rank, periods, sorted(axes)) for rank in range(pencil.grid.size)]
    sent = {(e.rank, m.peer): m.copies for e in exchanges for m in e.sends}
    received = {(m.peer, e.rank): m.copies for e in exchanges for m in e.recvs}
    assert sent == received


@PROPERTY
@given(pencils(), st.data())
def test_axes_in_one_step_or_one_after_the_other(pencil, data):
    """Also with values beyond walls: each axis takes the halo of the others along."""
    periods = data.draw(st.tuples(*[st.booleans()] * pencil.ndim))
    axes = data.draw(st.permutations(range(pencil.ndim)))
    ranks = range(pencil.grid.size)

    def begin():
        arrays = [start_array(pencil, rank) for rank in ranks]
        for rank, array in enumerate(arrays):
            cells = in_axis_order(pencil, array)
            for a, i in enumerate(ranges(pencil, rank)):
                outside = (i < 0) | (i >= pencil.global_shape[a])
                if not periods[a]:
                    cells[(slice(None),) * a + (outside,)] = OUTSIDE - rank
        return arrays

    once, steps = begin(), begin()
    reference.run([halo_exchange(pencil, rank, periods, axes) for rank in ranks], once, once)
    for axis in axes:
        reference.run([halo_exchange(pencil, rank, periods, (axis,)) for rank in ranks], steps, steps)
    for rank in ranks:
        if pencil.box(rank).size:
            np.testing.assert_array_equal(once[rank], steps[rank])


def test_nothing_is_read_that_is_written():
    pencil = Pencil((7, 6, 5), ProcessGrid((2, 2)), 0, halo=((2, 1), 1, 3))
    for rank, periods in itertools.product(range(4), itertools.product([False, True], repeat=3)):
        exchange = halo_exchange(pencil, rank, periods, (0, 1, 2))
        cells = [set(), set()]
        for side, messages, start in ((0, exchange.sends, 1), (1, exchange.recvs, 2)):
            for message in messages:
                for copy in message.copies:
                    box = [range(s, s + n) for s, n in zip(copy[start], copy.shape, strict=True)]
                    new = set(itertools.product(*box))
                    assert side == 0 or not new & cells[1], "a cell is filled twice"
                    cells[side] |= new
        assert not cells[0] & cells[1]
