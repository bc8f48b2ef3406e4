# SPDX-License-Identifier: Apache-2.0
"""Owns random geometries: pencils, grids and hosts of every kind by seed and number; knows nothing of what is tested.

All ranks draw the same ones without talking to each other, and a number is enough to draw one again.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from cudecomp import Pencil, ProcessGrid

SEED = 20260731


class Transpose(NamedTuple):
    """A random transpose: two pencils over equally many ranks, and a host for each rank."""

    src: Pencil
    dst: Pencil
    nodes: tuple[int, ...]


class Halo(NamedTuple):
    """A random halo update, and a host for each rank."""

    pencil: Pencil
    periods: tuple[bool, ...]
    axes: tuple[int, ...]
    nodes: tuple[int, ...]


def generator(number: int) -> np.random.Generator:
    """The random numbers of one geometry."""
    return np.random.default_rng([SEED, number])


def one_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def transpose(rng: np.random.Generator, size: int, longest: int = 9) -> Transpose:
    """Draw a transpose over `size` ranks, of an array of 2 to 4 axes of at most `longest` items."""
    shape = _shape(rng, longest)
    grid = _grid(rng, size, len(shape) - 1)
    other = grid if rng.random() < 0.5 else _grid(rng, size, len(shape) - 1)
    return Transpose(_pencil(rng, shape, grid), _pencil(rng, shape, other), _nodes(rng, size))


def halo(rng: np.random.Generator, size: int, longest: int = 9) -> Halo:
    """Draw a halo update over `size` ranks; one width in eight is deeper than what a neighbour has."""
    shape = _shape(rng, longest)
    ndim = len(shape)
    width = longest if rng.random() < 0.125 else 2
    pencil = _pencil(rng, shape, _grid(rng, size, ndim - 1), width)
    periods = tuple(bool(bit) for bit in rng.integers(0, 2, ndim))
    axes = tuple(axis for axis in range(ndim) if rng.random() < 0.75)
    return Halo(pencil, periods, axes, _nodes(rng, size))


def _shape(rng: np.random.Generator, longest: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, longest + 1, rng.integers(2, 5)))


def _grid(rng: np.random.Generator, size: int, entries: int) -> ProcessGrid:
    parts = (part for part in range(1, size + 1) if size % part == 0)
    shapes = [shape for shape in itertools.product(parts, repeat=entries) if math.prod(shape) == size]
    return ProcessGrid(one_of(rng, *shapes), rank_order=one_of(rng, "row", "column"))


def _pencil(rng: np.random.Generator, shape: tuple[int, ...], grid: ProcessGrid, width: int = 2) -> Pencil:
    ndim = len(shape)

    def widths(most: int) -> list[int]:
        return [int(n) for n in rng.integers(0, most + 1, ndim)]

    halos = list(zip(widths(width), widths(width), strict=True))
    return Pencil(
        shape,
        grid,
        int(rng.integers(ndim)),
        order=one_of(rng, None, "contiguous", tuple(int(axis) for axis in rng.permutation(ndim))),
        halo=one_of(rng, None, halos, halos),
        padding=one_of(rng, None, widths(2)),
        dist_shape=one_of(rng, None, None, tuple(int(rng.integers(1, n + 1)) for n in shape)),
    )


def _nodes(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    """Hosts of neighbouring ranks, hosts dealt out in turn, one host for all, or any."""
    several = int(rng.integers(1, size + 1))
    neighbours = tuple(rank // several for rank in range(size))
    in_turn = tuple(rank % several for rank in range(size))
    return one_of(rng, neighbours, in_turn, (0,) * size, tuple(int(n) for n in rng.integers(0, size, size)))
