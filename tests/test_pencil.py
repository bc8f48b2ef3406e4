# SPDX-License-Identifier: Apache-2.0
"""Tests of the pencil: what each rank holds, and how it lies in memory."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, pencils

from cudecomp import testing as reference
from cudecomp.grid import ProcessGrid
from cudecomp.pencil import Box, Pencil


def ranks(pencil):
    return range(pencil.grid.size)


@PROPERTY
@given(pencils())
def test_the_boxes_of_all_ranks_tile_the_array(pencil):
    times_held = np.zeros(pencil.global_shape, int)
    for rank in ranks(pencil):
        times_held[pencil.slices(rank)] += 1
        assert pencil.shape(rank)[pencil.axis] == pencil.global_shape[pencil.axis]
    assert (times_held == 1).all()


@PROPERTY
@given(pencils())
def test_start_shape_and_slices_are_those_of_the_box(pencil):
    for rank in ranks(pencil):
        box = pencil.box(rank)
        assert box.start == pencil.start(rank)
        assert box.shape == pencil.shape(rank)
        assert tuple((s.start, s.stop) for s in pencil.slices(rank)) == tuple(zip(box.start, box.stop, strict=True))
        assert box.size == math.prod(box.shape)


@PROPERTY
@given(pencils())
def test_axes_are_split_over_the_grid_entries_in_order(pencil):
    split = [axis for axis in range(pencil.ndim) if axis != pencil.axis]
    assert pencil.entry(pencil.axis) is None
    assert pencil.parts(pencil.axis) == 1
    assert [pencil.entry(axis) for axis in split] == list(range(pencil.ndim - 1))
    for rank in ranks(pencil):
        for axis, part in zip(split, pencil.grid.coords(rank), strict=True):
            assert pencil.start(rank)[axis] == pencil.cuts(axis)[part]
            assert pencil.parts(axis) == len(pencil.cuts(axis)) - 1


@PROPERTY
@given(pencils())
def test_memory_shape_and_strides_are_those_of_numpy(pencil):
    for rank in ranks(pencil):
        array = np.empty(pencil.memory_shape(rank), np.int8)
        if array.size:  # NumPy's strides of an empty array differ between its versions
            assert pencil.strides(rank) == array.strides
            assert pencil.axis_strides(rank) == array.transpose(np.argsort(pencil.order)).strides
        assert min(pencil.strides(rank)) == pencil.strides(rank)[-1] == 1
        assert pencil.size(rank) == array.size
        for axis, extent in zip(pencil.order, pencil.memory_shape(rank), strict=True):
            assert extent == pencil.shape(rank)[axis] + sum(pencil.halo[axis]) + pencil.padding[axis]


@PROPERTY
@given(pencils(), st.data())
def test_offsets_reach_every_cell_but_the_padding_once(pencil, data):
    rank = data.draw(st.integers(0, pencil.grid.size - 1))
    memory = np.arange(pencil.size(rank)).reshape(pencil.memory_shape(rank)).transpose(np.argsort(pencil.order))
    with_halo = memory[tuple(slice(0, n - pad) for n, pad in zip(memory.shape, pencil.padding, strict=True))]
    lowest = [start - low for start, (low, _) in zip(pencil.start(rank), pencil.halo, strict=True)]
    offsets = [
        pencil.offset(rank, [i + first for i, first in zip(place, lowest, strict=True)])
        for place in np.ndindex(with_halo.shape)
    ]
    assert offsets == with_halo.ravel().tolist()


@PROPERTY
@given(pencils(), st.data())
def test_interior_is_a_view_in_axis_order(pencil, data):
    rank = data.draw(st.integers(0, pencil.grid.size - 1))
    array = reference.poisoned(pencil, rank, np.int64)
    whole = np.arange(math.prod(pencil.global_shape)).reshape(pencil.global_shape)
    pencil.interior(array, rank)[...] = whole[pencil.slices(rank)]
    reference.check(pencil, rank, array)
    flat = np.full(pencil.size(rank) + 3, reference.POISON)
    flat[: array.size] = array.ravel()
    interior = pencil.interior(flat, rank)
    assert (interior == whole[pencil.slices(rank)]).all()
    assert interior.base is not None
    assert interior.size == 0 or np.shares_memory(interior, flat)


def test_interior_of_several_fields():
    pencil = Pencil((4, 5, 6), ProcessGrid((2, 2)), 0, order=(2, 0, 1), halo=(1, 0, (0, 2)), padding=(0, 1, 0))
    for shape in [(3, *pencil.memory_shape(1)), (3, pencil.size(1)), (3, pencil.size(1) + 5)]:
        fields = np.zeros(shape)
        pencil.interior(fields, 1)[...] = 1
        assert pencil.interior(fields, 1).shape == (3, *pencil.shape(1))
        assert fields.sum() == 3 * math.prod(pencil.shape(1))
        one = np.zeros(shape[1:])
        pencil.interior(one, 1)[...] = 1
        assert (fields == one).all()


def test_interior_permutes_where_transpose_swaps_two_axes():
    class Tensor(np.ndarray):
        def permute(self, axes):
            return np.ndarray.transpose(self, axes)

        def transpose(self, first, second):
            return np.swapaxes(self, first, second)

    pencil = Pencil((4, 5, 6), ProcessGrid((1, 1)), 0, order="contiguous")
    assert pencil.interior(np.zeros((5, 6, 4)).view(Tensor), 0).shape == (4, 5, 6)


def test_interior_refuses_other_shapes():
    pencil = Pencil((4, 5, 6), ProcessGrid((1, 1)), 0, order=(2, 1, 0))
    for shape in [(4, 5, 6), (119,), (2, 119), (2, 2, 120), (), (5, 4)]:
        with pytest.raises(ValueError, match=r"expected \(6, 5, 4\) in memory order or flat with at least 120 items"):
            pencil.interior(np.zeros(shape), 0)
    with pytest.raises(TypeError, match="expected an array, got list"):
        pencil.interior([0.0] * 120, 0)


def test_an_uneven_split():
    pencil = Pencil((25, 25, 25), ProcessGrid((4, 1)), 0)
    assert pencil.cuts(0) == (0, 25)
    assert pencil.cuts(1) == (0, 7, 13, 19, 25)
    assert pencil.cuts(2) == (0, 25)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_local_sizes_add_up(shape, axis):
    pencil = Pencil((25, 25, 25), ProcessGrid(shape), axis)
    assert sum(pencil.size(rank) for rank in ranks(pencil)) == 25**3


@pytest.mark.parametrize("shape", [(1, 3), (3, 1)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_more_ranks_than_items_along_an_axis(shape, axis):
    pencil = Pencil((2, 2, 3), ProcessGrid(shape), axis)
    assert sum(pencil.box(rank).size for rank in ranks(pencil)) == 12


def test_empty_parts_come_last():
    pencil = Pencil((8, 8, 8), ProcessGrid((1, 16)), 0)
    assert pencil.cuts(2) == (*range(8), *[8] * 9)
    assert [rank for rank in ranks(pencil) if pencil.box(rank).size == 0] == list(range(8, 16))
    assert pencil.shape(15) == (8, 8, 0)
    assert pencil.start(15) == (0, 0, 8)
    assert pencil.size(15) == 0


def test_a_rank_without_items_keeps_its_halo_and_padding():
    pencil = Pencil((4, 2, 4), ProcessGrid((3, 1)), 0, halo=(0, 1, 0), padding=(0, 3, 0))
    assert pencil.box(2).size == 0
    assert pencil.memory_shape(2) == (4, 5, 4)
    assert pencil.interior(np.zeros((4, 5, 4)), 2).shape == (4, 0, 4)


@pytest.mark.parametrize(
    ("extent", "dist", "parts", "expected"),
    [
        (10, 8, 4, (0, 2, 4, 6, 10)),
        (10, 10, 4, (0, 3, 6, 8, 10)),
        (10, 9, 4, (0, 3, 5, 7, 10)),
        (5, 2, 4, (0, 1, 5, 5, 5)),
        (5, 1, 1, (0, 5)),
        (4, 3, 3, (0, 1, 2, 4)),
    ],
)
def test_the_surplus_goes_to_the_last_part_that_is_not_empty(extent, dist, parts, expected):
    pencil = Pencil((6, extent), ProcessGrid((parts,)), 0, dist_shape=(6, dist))
    assert pencil.cuts(1) == expected
    assert pencil.cuts(0) == (0, 6)


@pytest.mark.parametrize("global_shape", [(2048, 1024, 1024), (4096, 4096, 4096)])
def test_sizes_beyond_32_bits(global_shape):
    pencil = Pencil(global_shape, ProcessGrid((1, 1)), 0, order="contiguous")
    assert pencil.size(0) == math.prod(global_shape)
    assert pencil.offset(0, [n - 1 for n in global_shape]) == math.prod(global_shape) - 1
    assert pencil.strides(0) == (global_shape[2] * global_shape[0], global_shape[0], 1)


def test_orders():
    grid = ProcessGrid((1, 1))
    assert [Pencil((2, 3, 4), grid, axis, order="contiguous").order for axis in range(3)] == [
        (1, 2, 0),
        (2, 0, 1),
        (0, 1, 2),
    ]
    pencil = Pencil((2, 3, 4), grid, 0, order=(1, 2, 0))
    assert pencil.memory_shape(0) == (3, 4, 2)
    assert pencil.strides(0) == (8, 2, 1)
    assert pencil.axis_strides(0) == (1, 8, 2)
    assert Pencil((2, 3, 4), grid, 0).order == (0, 1, 2)


def test_halo_and_padding_in_all_their_forms():
    def halo(value):
        return Pencil((4, 4, 4), ProcessGrid((2, 2)), 0, halo=value).halo

    assert halo(None) == halo(0) == ((0, 0),) * 3
    assert halo(2) == halo([2, 2, 2]) == halo(((2, 2),) * 3) == ((2, 2),) * 3
    assert halo((0, (2, 1), np.int64(3))) == halo(np.array([[0, 0], [2, 1], [3, 3]])) == ((0, 0), (2, 1), (3, 3))
    pencil = Pencil((4, 4, 4), ProcessGrid((2, 2)), 0, padding=(1, 0, 2))
    assert pencil.padding == (1, 0, 2)
    assert pencil.memory_shape(0) == (5, 2, 4)
    assert Pencil((4, 4, 4), ProcessGrid((2, 2)), 0, padding=1).padding == (1, 1, 1)


def test_the_pencil_along_another_axis():
    grid = ProcessGrid((2, 2))
    pencil = Pencil((4, 5, 6), grid, 0, order="contiguous", halo=1, padding=2, dist_shape=(4, 4, 4))
    assert pencil.pencil(1) == Pencil((4, 5, 6), grid, 1, order="contiguous", dist_shape=(4, 4, 4))
    assert pencil.pencil(2).pencil(0).order == (1, 2, 0)
    assert pencil.pencil(1, order=None).order == (0, 1, 2)
    changed = pencil.pencil(1, order=(2, 1, 0), halo=3, padding=1, dist_shape=None, grid=ProcessGrid((4, 1)))
    assert changed == Pencil((4, 5, 6), ProcessGrid((4, 1)), 1, order=(2, 1, 0), halo=3, padding=1)
    assert Pencil((4, 5, 6), grid, 0, order=(2, 1, 0)).pencil(1).order == (0, 1, 2)
    with pytest.raises(TypeError, match="got global_shape, rank, expected changes to grid, order"):
        pencil.pencil(1, global_shape=(4, 4, 4), rank=0)


@PROPERTY
@given(pencils())
def test_a_pencil_is_a_value(pencil):
    same = Pencil(
        list(pencil.global_shape),
        ProcessGrid(pencil.grid.shape, rank_order=pencil.grid.rank_order),
        pencil.axis,
        order="contiguous" if pencil.contiguous else pencil.order,
        halo=pencil.halo,
        padding=pencil.padding,
        dist_shape=pencil.dist_shape,
    )
    pencil.box(0)
    assert same == pencil
    assert hash(same) == hash(pencil)
    assert eval(repr(pencil)) == pencil
    assert pickle.loads(pickle.dumps(pencil)) == pencil
    with pytest.raises(AttributeError):
        pencil.axis = 0


def test_every_argument_is_part_of_the_value():
    grid = ProcessGrid((2, 2))
    plain = Pencil((4, 4, 4), grid, 0)
    changes = [{"order": (1, 0, 2)}, {"order": "contiguous"}, {"halo": 1}, {"padding": 1}, {"dist_shape": (4, 4, 3)}]
    others = [Pencil((4, 4, 4), grid, 0, **change) for change in changes]
    others += [Pencil((4, 4, 5), grid, 0), Pencil((4, 4, 4), ProcessGrid((4, 1)), 0), Pencil((4, 4, 4), grid, 1)]
    assert len({plain, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_shape": (4, 0, 4)}, "expected two or more extents, each at least 1"),
        ({"global_shape": (4,)}, "expected two or more extents"),
        ({"global_shape": (4, 4)}, "an array of 2 axes takes a grid of 1 entries"),
        ({"axis": 3}, "got axis 3, expected 0 <= axis < 3"),
        ({"axis": -1}, "got axis -1"),
        ({"order": (0, 1)}, r"got order \(0, 1\), expected a permutation of \(0, 1, 2\)"),
        ({"order": (0, 1, 1)}, "expected a permutation"),
        ({"order": "C"}, "got order 'C', expected None, 'contiguous' or a permutation"),
        ({"halo": -1}, "neither negative"),
        ({"halo": (1, 1)}, "expected one entry per axis, 3 in all"),
        ({"halo": (1, 1, (1, 2, 3))}, "for axis 2, expected"),
        ({"halo": (1, (0, -1), 1)}, "for axis 1, expected"),
        ({"padding": -1}, "none negative"),
        ({"padding": (1, 1)}, "expected one entry per axis, 3 in all"),
        ({"dist_shape": (4, 4)}, "expected one entry per axis"),
        ({"dist_shape": (4, 4, 5)}, "from 1 to that of global_shape"),
        ({"dist_shape": (4, 0, 4)}, "from 1 to that of global_shape"),
    ],
)
def test_values_that_do_not_fit(changes, message):
    arguments = {"global_shape": (4, 4, 4), "grid": ProcessGrid((2, 2)), "axis": 0} | changes
    with pytest.raises(ValueError, match=f"^Pencil: .*{message}"):
        Pencil(**arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"global_shape": 64},
        {"global_shape": (4.0, 4, 4)},
        {"grid": (2, 2)},
        {"axis": "x"},
        {"axis": True},
        {"axis": 1.0},
        {"order": (0, 1, 2.0)},
        {"order": 1},
        {"halo": 1.5},
        {"halo": (1, 1, (1, True))},
        {"halo": "111"},
        {"padding": (0, 0, 0.5)},
        {"padding": "111"},
        {"dist_shape": 4},
    ],
)
def test_values_of_the_wrong_type(changes):
    arguments = {"global_shape": (4, 4, 4), "grid": ProcessGrid((2, 2)), "axis": 0} | changes
    with pytest.raises(TypeError, match=r"^Pencil: .* must be"):
        Pencil(**arguments)


def test_ranks_axes_and_indices_out_of_range():
    pencil = Pencil((4, 4, 4), ProcessGrid((2, 2)), 0)
    methods = [pencil.box, pencil.start, pencil.shape, pencil.slices, pencil.memory_shape, pencil.strides, pencil.size]
    for method, rank in itertools.product(methods, (-1, 4)):
        with pytest.raises(ValueError, match=f"got rank {rank}"):
            method(rank)
    for method, axis in itertools.product([pencil.entry, pencil.parts, pencil.cuts], (-1, 3)):
        with pytest.raises(ValueError, match=f"got axis {axis}"):
            method(axis)
    with pytest.raises(ValueError, match="expected 3 entries"):
        pencil.offset(0, (0, 0))


def test_boxes_intersect():
    box = Box((0, 2), (4, 6))
    assert box.shape == (4, 4)
    assert box.size == 16
    assert box.intersect(Box((3, 0), (9, 3))) == Box((3, 2), (4, 3))
    assert box.intersect(Box((4, 0), (9, 9))).size == 0
    assert box.intersect(Box((7, 7), (9, 9))).shape == (0, 0)
    assert box.intersect(box) == box
