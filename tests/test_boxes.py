# SPDX-License-Identifier: Apache-2.0
"""The translation of copies into boxes: the same bytes move, in the largest units and the fewest dimensions."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudecomp.boxes import DIMS, UNITS, compile_copies, copy_unit
from cudecomp.schedule import Copy, packed_strides

FEW = settings(deadline=None, max_examples=150)


@st.composite
def layouts(draw, shape):
    """An offset, and strides of a box of `shape` with gaps, its axes in any order."""
    order = draw(st.permutations(range(len(shape))))
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    return draw(st.integers(0, 5)), packed_strides(tuple(n + g for n, g in zip(shape, gaps, strict=True)), tuple(order))


@st.composite
def copies(draw, most=6):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=most)))
    (src_offset, src), (dst_offset, dst) = draw(layouts(shape)), draw(layouts(shape))
    return Copy(shape, draw(st.integers(0, 2)), src_offset, src, draw(st.integers(0, 2)), dst_offset, dst)


itemsizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32])


def moves_of_copy(copy, itemsize):
    """The set of (source byte, destination byte) of a copy."""
    for index in itertools.product(*map(range, copy.shape)):
        src = copy.src_offset + sum(i * s for i, s in zip(index, copy.src_strides, strict=True))
        dst = copy.dst_offset + sum(i * s for i, s in zip(index, copy.dst_strides, strict=True))
        for byte in range(itemsize):
            yield src * itemsize + byte, dst * itemsize + byte


def moves_of_box(box):
    for index in itertools.product(*map(range, box.extent)):
        src = box.src_offset + sum(i * s for i, s in zip(index, box.src_stride, strict=True))
        dst = box.dst_offset + sum(i * s for i, s in zip(index, box.dst_stride, strict=True))
        for byte in range(box.unit):
            yield src + byte, dst + byte


@FEW
@given(copies(), itemsizes)
def test_boxes_move_the_bytes_of_the_copy(copy, itemsize):
    boxes = compile_copies([[copy]], itemsize)
    moved = [move for box in boxes for move in moves_of_box(box)]
    assert sorted(moved) == sorted(moves_of_copy(copy, itemsize))
    assert {(box.src_base, box.dst_base, box.segment) for box in boxes} == {(copy.src_base, copy.dst_base, 0)}


@FEW
@given(copies(), itemsizes)
def test_boxes_obey_the_c_abi(copy, itemsize):
    for box in compile_copies([[copy]], itemsize):
        assert len(box.extent) == len(box.src_stride) == len(box.dst_stride) == DIMS
        assert box.unit == copy_unit(itemsize)
        assert min(box.extent) >= 1
        for number in (*box.src_stride, *box.dst_stride, box.src_offset, box.dst_offset):
            assert number % box.unit == 0
        used = [d for d in range(DIMS) if box.extent[d] > 1]
        assert used == list(range(DIMS - len(used), DIMS))  # unused ones come first
        assert list(box.dst_stride[DIMS - len(used) :]) == sorted(box.dst_stride[DIMS - len(used) :], reverse=True)
        assert all(box.src_stride[d] == box.dst_stride[d] == 0 for d in range(DIMS - len(used)))


@FEW
@given(copies(), itemsizes)
def test_neighbours_are_merged(copy, itemsize):
    """No two dimensions that follow each other could be one."""
    for box in compile_copies([[copy]], itemsize):
        used = [d for d in range(DIMS) if box.extent[d] > 1]
        for slow, fast in itertools.pairwise(used):
            joined = all(s[slow] == s[fast] * box.extent[fast] for s in (box.src_stride, box.dst_stride))
            # Peeling may bring two together, but nothing else.
            assert not joined or len(compile_copies([[copy]], itemsize)) > 1


@FEW
@given(copies(most=8), itemsizes)
def test_only_what_does_not_fit_is_peeled(copy, itemsize):
    """The fastest dimension of either side stays in the box, and as few boxes as possible are made."""
    boxes = compile_copies([[copy]], itemsize)
    dims = [n for n in (*copy.shape, itemsize // copy_unit(itemsize)) if n > 1]
    if len(dims) <= DIMS:
        assert len(boxes) == 1
    else:
        extents = sorted(dims)[: len(dims) - DIMS]
        # Never more boxes than the longest of the shorter dimensions allow.
        assert len(boxes) <= math.prod(sorted(dims)[2 : 2 + len(extents)] or extents)
    for strides in ("src_strides", "dst_strides"):
        live = [(s * itemsize, n) for s, n in zip(getattr(copy, strides), copy.shape, strict=True) if n > 1]
        fastest = min(live)[0] if live and itemsize == copy_unit(itemsize) else None
        for box in boxes:
            if fastest is not None:
                assert fastest in getattr(box, strides[:3] + "_stride")


@pytest.mark.parametrize("itemsize", range(1, 65))
def test_units_are_the_largest_that_divide(itemsize):
    unit = copy_unit(itemsize)
    assert unit in UNITS
    assert itemsize % unit == 0
    assert all(itemsize % other for other in UNITS if other > unit)


@pytest.mark.parametrize("itemsize", [1, 3, 8, 12, 24])
def test_a_block_without_gaps_is_one_run(itemsize):
    strides = packed_strides((3, 4, 5), (0, 1, 2))
    (box,) = compile_copies([[Copy((3, 4, 5), 0, 7, strides, 1, 9, strides)]], itemsize)
    assert box.extent == (1, 1, 1, 60 * itemsize // box.unit)
    assert (box.src_offset, box.dst_offset) == (7 * itemsize, 9 * itemsize)


def test_a_common_permutation_is_one_run():
    strides = packed_strides((3, 4, 5), (2, 0, 1))
    (box,) = compile_copies([[Copy((3, 4, 5), 0, 0, strides, 1, 0, strides)]], 4)
    assert box.extent == (1, 1, 1, 60)


def test_segments_are_numbered_in_order():
    copy = Copy((2,), 0, 0, (1,), 1, 0, (1,))
    boxes = compile_copies([[copy], [], [copy, copy]], 8)
    assert [box.segment for box in boxes] == [0, 2, 2]
    assert compile_copies([], 8) == compile_copies([[], []], 8) == []
