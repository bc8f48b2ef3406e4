# SPDX-License-Identifier: Apache-2.0
"""The process grid: which rank sits at which coordinates, and which ranks share a row or a column with it.

This module must not know of arrays' layouts, MPI or CUDA: a rank is always an argument, never asked for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["ProcessGrid"]


def as_int(value: Any, what: str) -> int:
    """`value` as a plain int; TypeError, naming `what`, for anything that is not an integer (bool included)."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} must be an integer, got {value!r} of type {type(value).__name__}")


def as_ints(values: Any, what: str) -> tuple[int, ...]:
    """`values` as a tuple of plain ints; TypeError, naming `what`, if it is no sequence or holds a non-integer."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a sequence of integers, got {values!r} of type {type(values).__name__}")
    return tuple(as_int(value, f"{what}, entry {i},") for i, value in enumerate(values))


@dataclass(frozen=True, init=False, repr=False)
class ProcessGrid:
    """A Cartesian grid of ranks.

    A value: frozen, hashable and comparable. Every method is local and asks no communicator.

    Parameters
    ----------
    shape : sequence of int
        Number of ranks along each entry of the grid. At most one entry may be 0, which `size` then fills.
    size : int, optional
        Number of ranks. Needed if an entry of `shape` is 0; otherwise checked against the product of `shape`.
    rank_order : {"row", "column"}
        Which entry the ranks run along fastest: the last for ``"row"`` (rank = i * P_col + j), the first for
        ``"column"`` (rank = j * P_row + i).

    Attributes
    ----------
    shape : tuple of int
        Number of ranks along each entry, none of them 0.
    rank_order : str
        ``"row"`` or ``"column"``.

    Raises
    ------
    TypeError
        `shape` or `size` is not made of integers.
    ValueError
        An entry is negative, more than one is 0, `size` does not fit, or `rank_order` is unknown.
    """

    shape: tuple[int, ...]
    rank_order: str

    def __init__(self, shape: Sequence[int], size: int | None = None, rank_order: str = "row") -> None:
        if rank_order not in ("row", "column"):
            raise ValueError(f"ProcessGrid: rank_order must be 'row' or 'column', got {rank_order!r}")
        object.__setattr__(self, "shape", _filled(as_ints(shape, "ProcessGrid: shape"), size))
        object.__setattr__(self, "rank_order", rank_order)

    def __repr__(self) -> str:
        return f"ProcessGrid({self.shape}{'' if self.rank_order == 'row' else ', rank_order=' + repr(self.rank_order)})"

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def rank_strides(self) -> tuple[int, ...]:
        """Step in rank per step in each entry: ``rank == sum(c * s for c, s in zip(coords, rank_strides))``."""
        if self.rank_order == "row":
            return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return tuple(math.prod(self.shape[:i]) for i in range(len(self.shape)))

    def coords(self, rank: int) -> tuple[int, ...]:
        """Coordinates of `rank`, one per entry of the grid.

        Raises
        ------
        ValueError
            `rank` is not in [0, size).
        """
        rank = self._checked_rank(rank, "coords")
        return tuple(rank // stride % parts for stride, parts in zip(self.rank_strides, self.shape, strict=True))

    def rank(self, coords: Sequence[int]) -> int:
        """Rank at `coords`, the inverse of :meth:`coords`.

        Raises
        ------
        ValueError
            `coords` has the wrong length, or an entry is outside the grid.
        """
        coords = as_ints(coords, "ProcessGrid.rank: coords")
        if len(coords) != len(self.shape) or any(
            not 0 <= c < parts for c, parts in zip(coords, self.shape, strict=True)
        ):
            raise ValueError(f"ProcessGrid.rank: got coords {coords}, expected coordinates in a grid of {self.shape}")
        return sum(c * stride for c, stride in zip(coords, self.rank_strides, strict=True))

    def group(self, i: int, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` in grid entry `i` only, by rising coordinate; `rank` is one of them.

        Raises
        ------
        ValueError
            `i` is no entry of the grid, or `rank` is not in [0, size).
        """
        i = self._checked_entry(i, "group")
        stride = self.rank_strides[i]
        first = rank - self.coords(rank)[i] * stride
        return tuple(range(first, first + self.shape[i] * stride, stride))

    def row(self, rank: int) -> tuple[int, ...]:
        """Ranks in the same row of a two-entry grid: ``group(1, rank)``. ValueError for other grids."""
        self._check_two_entries("row")
        return self.group(1, rank)

    def column(self, rank: int) -> tuple[int, ...]:
        """Ranks in the same column of a two-entry grid: ``group(0, rank)``. ValueError for other grids."""
        self._check_two_entries("column")
        return self.group(0, rank)

    def neighbor(self, rank: int, axis: int, displacement: int = 1, periodic: bool = True) -> int | None:
        """Rank that lies `displacement` steps from `rank` along one entry of the grid.

        Parameters
        ----------
        rank : int
            Where to start.
        axis : int
            The grid entry to move along: an index into `shape`, not an axis of an array.
        displacement : int
            Steps to take, of either sign and any size. 0 is `rank` itself.
        periodic : bool
            Whether the grid wraps around.

        Returns
        -------
        int or None
            None where the step leaves a grid that does not wrap.

        Raises
        ------
        ValueError
            `axis` is no entry of the grid, or `rank` is not in [0, size).
        """
        axis = self._checked_entry(axis, "neighbor")
        here = self.coords(rank)[axis]
        there = here + as_int(displacement, "ProcessGrid.neighbor: displacement")
        if periodic:
            there %= self.shape[axis]
        elif not 0 <= there < self.shape[axis]:
            return None
        return rank + (there - here) * self.rank_strides[axis]

    @classmethod
    def choose(cls, size: int, global_shape: Sequence[int], rank_order: str = "row") -> ProcessGrid:
        """A good grid for an array, from its shape alone.

        Of all grids with ``len(global_shape) - 1`` entries this is the one that leaves the fewest ranks without items;
        of those, the one whose cuts have the smallest total area, summed over the pencils of all axes. Each item next
        to a cut is one that a halo update sends. Equal grids are decided in favour of the smaller first entry.

        Parameters
        ----------
        size : int
            Number of ranks.
        global_shape : sequence of int
            Shape of the array, in axis order.
        rank_order : {"row", "column"}
            As for the constructor.

        Raises
        ------
        ValueError
            `size` or an extent is below 1, or `global_shape` has fewer than two axes.
        """
        size = as_int(size, "ProcessGrid.choose: size")
        extents = as_ints(global_shape, "ProcessGrid.choose: global_shape")
        if size < 1:
            raise ValueError(f"ProcessGrid.choose: got size {size}, expected at least 1")
        if len(extents) < 2 or min(extents) < 1:
            raise ValueError(
                f"ProcessGrid.choose: got global_shape {extents}, expected two or more extents of at least 1"
            )
        shapes = _factorizations(size, len(extents) - 1)
        best = min((*_choice_cost(shape, extents), shape) for shape in shapes)[-1]
        return cls(best, rank_order=rank_order)

    def _checked_rank(self, rank: int, method: str) -> int:
        rank = as_int(rank, f"ProcessGrid.{method}: rank")
        if not 0 <= rank < self.size:
            raise ValueError(f"ProcessGrid.{method}: got rank {rank}, expected 0 <= rank < {self.size} for {self!r}")
        return rank

    def _checked_entry(self, i: int, method: str) -> int:
        i = as_int(i, f"ProcessGrid.{method}: grid entry")
        if not 0 <= i < len(self.shape):
            raise ValueError(f"ProcessGrid.{method}: got grid entry {i}, expected 0 <= entry < {len(self.shape)}")
        return i

    def _check_two_entries(self, method: str) -> None:
        if len(self.shape) != 2:
            raise ValueError(
                f"ProcessGrid.{method}: a grid of two entries has rows and columns, got shape {self.shape}"
            )


def _filled(shape: tuple[int, ...], size: int | None) -> tuple[int, ...]:
    """`shape` with its 0 entry filled from `size`, checked."""
    if not shape or min(shape) < 0:
        raise ValueError(f"ProcessGrid: got shape {shape}, expected one or more entries, none of them negative")
    if size is not None:
        size = as_int(size, "ProcessGrid: size")
        if size < 1:
            raise ValueError(f"ProcessGrid: got size {size}, expected at least 1")
    zeros = shape.count(0)
    if zeros == 0:
        if size is not None and math.prod(shape) != size:
            raise ValueError(f"ProcessGrid: shape {shape} has {math.prod(shape)} ranks, but size is {size}")
        return shape
    if zeros > 1 or size is None:
        raise ValueError(f"ProcessGrid: got shape {shape} and size {size}; one 0 entry can be filled, and needs a size")
    known = math.prod(n for n in shape if n)
    if size % known:
        raise ValueError(f"ProcessGrid: the 0 in shape {shape} cannot be filled, {size} ranks do not divide by {known}")
    return tuple(n or size // known for n in shape)


def _factorizations(size: int, entries: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `size` as an ordered product of so many factors."""
    if entries == 1:
        yield (size,)
        return
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    for first in sorted({*small, *(size // n for n in small)}):
        for rest in _factorizations(size // first, entries - 1):
            yield (first, *rest)


def _choice_cost(shape: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, int]:
    """Ranks without items, and items on one side of all cuts, both summed over the pencils of all axes."""
    items = math.prod(extents)
    idle = area = 0
    for axis in range(len(extents)):
        split = extents[:axis] + extents[axis + 1 :]
        used = [min(parts, n) for parts, n in zip(shape, split, strict=True)]
        idle += math.prod(shape) - math.prod(used)
        area += sum((parts - 1) * (items // n) for parts, n in zip(used, split, strict=True))
    return idle, area
