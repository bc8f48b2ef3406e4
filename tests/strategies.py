# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for geometry: small process grids and pencils of every kind, empty parts included."""

import itertools
import math

from hypothesis import settings
from hypothesis import strategies as st

from cudecomp.grid import ProcessGrid
from cudecomp.pencil import Pencil

PROPERTY = settings(deadline=None, max_examples=60)
MOST_RANKS = 16


def rank_orders():
    return st.sampled_from(["row", "column"])


@st.composite
def grids(draw, entries=None):
    """Process grids of at most MOST_RANKS ranks."""
    shape = []
    for _ in range(draw(st.integers(1, 3)) if entries is None else entries):
        shape.append(draw(st.integers(1, min(5, MOST_RANKS // math.prod(shape)))))
    return ProcessGrid(draw(st.permutations(shape)), rank_order=draw(rank_orders()))


@st.composite
def pencils(draw, global_shape=None, grid=None):
    """Pencils of an array of 2 to 4 axes; each argument that is given is kept."""
    if global_shape is None:
        global_shape = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    ndim = len(global_shape)
    per_axis = {"min_size": ndim, "max_size": ndim}
    width = st.integers(0, 2)
    return Pencil(
        global_shape,
        draw(grids(ndim - 1)) if grid is None else grid,
        draw(st.integers(0, ndim - 1)),
        order=draw(st.one_of(st.sampled_from([None, "contiguous"]), st.permutations(range(ndim)))),
        halo=draw(st.one_of(st.none(), width, st.lists(st.one_of(width, st.tuples(width, width)), **per_axis))),
        padding=draw(st.one_of(st.none(), width, st.lists(width, **per_axis))),
        dist_shape=draw(st.one_of(st.none(), st.tuples(*(st.integers(1, n) for n in global_shape)))),
    )


@st.composite
def pairs(draw):
    """Two pencils of one array over equally many ranks, all else drawn apart."""
    src = draw(pencils())
    size, entries = src.grid.size, src.ndim - 1
    shapes = [s for s in itertools.product(range(1, size + 1), repeat=entries) if math.prod(s) == size]
    other = ProcessGrid(draw(st.sampled_from(shapes)), rank_order=draw(rank_orders()))
    return src, draw(pencils(global_shape=src.global_shape, grid=draw(st.sampled_from([src.grid, other]))))
