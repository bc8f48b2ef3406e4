# SPDX-License-Identifier: Apache-2.0
"""Tests of the process grid."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, grids

from cudecomp.grid import ProcessGrid


@PROPERTY
@given(grids())
def test_coordinates_are_those_of_numpy(grid):
    order = {"row": "C", "column": "F"}[grid.rank_order]
    for rank in range(grid.size):
        coords = grid.coords(rank)
        assert coords == tuple(map(int, np.unravel_index(rank, grid.shape, order=order)))
        assert grid.rank(coords) == rank
        assert sum(c * s for c, s in zip(coords, grid.rank_strides, strict=True)) == rank


def test_rank_order():
    row, column = ProcessGrid((3, 4)), ProcessGrid((3, 4), rank_order="column")
    assert row.rank((1, 2)) == 1 * 4 + 2
    assert column.rank((1, 2)) == 2 * 3 + 1


@PROPERTY
@given(grids(), st.data())
def test_a_group_differs_in_one_entry_and_all_members_agree_on_it(grid, data):
    rank = data.draw(st.integers(0, grid.size - 1))
    entry = data.draw(st.integers(0, len(grid.shape) - 1))
    group = grid.group(entry, rank)
    assert rank in group
    assert [grid.coords(member)[entry] for member in group] == list(range(grid.shape[entry]))
    for member in group:
        assert grid.group(entry, member) == group
        others = [
            (a, b) for i, (a, b) in enumerate(zip(grid.coords(member), grid.coords(rank), strict=True)) if i != entry
        ]
        assert all(a == b for a, b in others)


def test_rows_and_columns():
    grid = ProcessGrid((2, 3))
    assert grid.row(4) == grid.group(1, 4) == (3, 4, 5)
    assert grid.column(4) == grid.group(0, 4) == (1, 4)


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2)])
def test_only_grids_of_two_entries_have_rows_and_columns(shape):
    for method in (ProcessGrid(shape).row, ProcessGrid(shape).column):
        with pytest.raises(ValueError, match="two entries"):
            method(0)


@PROPERTY
@given(grids(), st.data())
def test_neighbors_wrap_and_lead_back(grid, data):
    rank = data.draw(st.integers(0, grid.size - 1))
    entry = data.draw(st.integers(0, len(grid.shape) - 1))
    parts = grid.shape[entry]
    assert grid.neighbor(rank, entry, 0) == rank
    assert grid.neighbor(rank, entry, 0, periodic=False) == rank
    for sign in (1, -1):
        there = grid.neighbor(rank, entry, sign)
        assert there in grid.group(entry, rank)
        assert grid.neighbor(there, entry, -sign) == rank
        assert grid.neighbor(rank, entry, sign * (parts + 1)) == there
        assert grid.neighbor(rank, entry, sign * parts) == rank
        assert grid.neighbor(rank, entry, sign * parts, periodic=False) is None


def test_neighbors_at_an_edge_that_does_not_wrap():
    grid = ProcessGrid((2, 3))
    assert grid.neighbor(0, 1, -1, periodic=False) is None
    assert grid.neighbor(0, 1, 2, periodic=False) == 2
    assert grid.neighbor(0, 1, 3, periodic=False) is None
    assert grid.neighbor(0, 0) == 3


def test_size_fills_one_zero():
    assert ProcessGrid((0, 2), 4) == ProcessGrid((2, 0), 4) == ProcessGrid((2, 2))
    assert ProcessGrid((2, 0, 2), 12).shape == (2, 3, 2)
    assert ProcessGrid((0,), 7).shape == (7,)
    assert ProcessGrid((2, 3), 6).size == 6


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((0, 3), 4),
        ((2, 3), 4),
        ((-2, -2), 4),
        ((-2, -2), None),
        ((0, -2), 4),
        ((0, 0), 4),
        ((0, 2), None),
        ((), None),
        ((0, 1), 0),
        ((1, 1), -1),
    ],
)
def test_shapes_that_do_not_fit(shape, size):
    with pytest.raises(ValueError, match="ProcessGrid"):
        ProcessGrid(shape, size)


@pytest.mark.parametrize("shape", [4, None, "22", (2.0, 2), (True, 2), ("2", 2), (np.float64(2), 2), (np.True_, 2)])
def test_shapes_that_are_not_integers(shape):
    with pytest.raises(TypeError, match=r"ProcessGrid: shape.* must be"):
        ProcessGrid(shape)


def test_numpy_integers_become_plain():
    grid = ProcessGrid(np.array([2, 0]), np.int32(6))
    assert grid == ProcessGrid((2, 3))
    assert all(type(n) is int for n in grid.shape)
    assert type(grid.rank(np.array([1, 1]))) is int


def test_an_unknown_rank_order():
    with pytest.raises(ValueError, match="'row' or 'column', got 'C'"):
        ProcessGrid((2, 2), rank_order="C")


@pytest.mark.parametrize("rank", [-1, 6])
def test_ranks_out_of_range(rank):
    grid = ProcessGrid((2, 3))
    for method in (grid.coords, grid.row, grid.column, lambda r: grid.group(0, r), lambda r: grid.neighbor(r, 0)):
        with pytest.raises(ValueError, match=f"got rank {rank}, expected 0 <= rank < 6"):
            method(rank)
    with pytest.raises(TypeError, match="rank must be an integer"):
        grid.coords(1.0)


def test_coordinates_and_entries_out_of_range():
    grid = ProcessGrid((2, 3))
    for coords in [(2, 0), (0, -1), (0,), (0, 0, 0)]:
        with pytest.raises(ValueError, match="expected coordinates in a grid of"):
            grid.rank(coords)
    for entry in (-1, 2):
        with pytest.raises(ValueError, match=f"got grid entry {entry}"):
            grid.group(entry, 0)
        with pytest.raises(ValueError, match=f"got grid entry {entry}"):
            grid.neighbor(0, entry)


@PROPERTY
@given(grids())
def test_a_grid_is_a_value(grid):
    same = ProcessGrid(list(grid.shape), rank_order=grid.rank_order)
    grid.coords(0)
    assert same == grid
    assert hash(same) == hash(grid)
    assert eval(repr(grid)) == grid
    assert pickle.loads(pickle.dumps(grid)) == grid
    with pytest.raises(AttributeError):
        grid.shape = (1,)


def test_rank_order_is_part_of_the_value():
    assert ProcessGrid((2, 2)) != ProcessGrid((2, 2), rank_order="column")


@pytest.mark.parametrize(
    ("size", "global_shape", "expected"),
    [
        (4, (1000, 1, 1), (4, 1)),
        (4, (1, 1, 1000), (1, 4)),
        (7, (1000, 1, 1), (7, 1)),
        (7, (1, 1, 1000), (1, 7)),
        (7, (512, 512, 512), (1, 7)),
        (4, (512, 512, 512), (2, 2)),
        (12, (512, 512, 512), (3, 4)),
        (64, (512, 512, 512), (8, 8)),
        (5, (10, 10), (5,)),
        (8, (16, 16, 16, 16), (2, 2, 2)),
        (1, (3, 3, 3), (1, 1)),
    ],
)
def test_chosen_grids(size, global_shape, expected):
    assert ProcessGrid.choose(size, global_shape).shape == expected


@PROPERTY
@given(st.integers(1, 36), st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_a_chosen_grid_leaves_no_rank_idle_if_any_grid_does(size, global_shape):
    def is_busy(rows, columns):
        n0, n1, n2 = global_shape
        return rows <= min(n0, n1) and columns <= min(n1, n2)

    grid = ProcessGrid.choose(size, global_shape, rank_order="column")
    assert math.prod(grid.shape) == size
    assert grid.rank_order == "column"
    if any(is_busy(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0):
        assert is_busy(*grid.shape)


def test_choice_refuses_what_has_no_grid():
    for size, global_shape in [(0, (4, 4)), (4, (4,)), (4, (4, 0))]:
        with pytest.raises(ValueError, match=r"ProcessGrid\.choose"):
            ProcessGrid.choose(size, global_shape)
    with pytest.raises(TypeError, match="size must be an integer"):
        ProcessGrid.choose(4.0, (4, 4))
