# SPDX-License-Identifier: Apache-2.0
"""Owns the translation of copies into the boxes of the kernels' C ABI; knows nothing of where the copies come from."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from .schedule import Copy

DIMS = 4  # CUDECOMP_DIMS of kernels/pack.h
UNITS = (16, 8, 4, 2, 1)


class KernelBox(NamedTuple):
    """A cudecomp_box: extents in units, the rest in bytes; dimensions from slowest to fastest in the destination."""

    extent: tuple[int, ...]
    src_stride: tuple[int, ...]
    dst_stride: tuple[int, ...]
    src_offset: int
    dst_offset: int
    src_base: int
    dst_base: int
    unit: int
    segment: int


class _Dim(NamedTuple):
    extent: int
    src: int  # bytes
    dst: int  # bytes


def copy_unit(itemsize: int) -> int:
    """Return the largest copy unit, in bytes, that divides an item."""
    return next(unit for unit in UNITS if itemsize % unit == 0)


def compile_copies(segments: Iterable[Iterable[Copy]], itemsize: int) -> list[KernelBox]:
    """Translate segments of copies of items into boxes, in the order of the segments."""
    return [box for number, copies in enumerate(segments) for copy in copies for box in _boxes(copy, itemsize, number)]


def _boxes(copy: Copy, itemsize: int, segment: int) -> Iterable[KernelBox]:
    unit = copy_unit(itemsize)
    dims = _merged(copy, itemsize, unit)
    kept, peeled = _peel(dims)
    kept = [_Dim(1, 0, 0)] * (DIMS - len(kept)) + kept
    src, dst = copy.src_offset * itemsize, copy.dst_offset * itemsize
    for index in product(*(range(dim.extent) for dim in peeled)):
        yield KernelBox(
            tuple(dim.extent for dim in kept),
            tuple(dim.src for dim in kept),
            tuple(dim.dst for dim in kept),
            src + sum(i * dim.src for i, dim in zip(index, peeled, strict=True)),
            dst + sum(i * dim.dst for i, dim in zip(index, peeled, strict=True)),
            copy.src_base,
            copy.dst_base,
            unit,
            segment,
        )


def _merged(copy: Copy, itemsize: int, unit: int) -> list[_Dim]:
    """Return the dimensions of more than one unit, slowest in the destination first, contiguous neighbours joined."""
    dims = [
        _Dim(n, s * itemsize, d * itemsize)
        for n, s, d in zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True)
        if n > 1
    ]
    if itemsize > unit:
        dims.append(_Dim(itemsize // unit, unit, unit))
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: (-dim.dst, -dim.src)):
        last = merged[-1] if merged else None
        if last and last.src == dim.src * dim.extent and last.dst == dim.dst * dim.extent:
            merged[-1] = _Dim(last.extent * dim.extent, dim.src, dim.dst)
        else:
            merged.append(dim)
    return merged


def _peel(dims: list[_Dim]) -> tuple[list[_Dim], list[_Dim]]:
    """Split off the shortest dimensions beyond DIMS, never the fastest of either side; each index of them is a box."""
    kept, peeled = list(dims), []
    while len(kept) > DIMS:
        fastest = {kept[-1], min(kept, key=lambda dim: dim.src)}
        shortest = min((dim for dim in kept if dim not in fastest), key=lambda dim: dim.extent)
        kept.remove(shortest)
        peeled.append(shortest)
    return kept, peeled
