# SPDX-License-Identifier: Apache-2.0
"""The reference: carries out exchanges with NumPy slicing, playing all ranks in one process, and checks the results.

It knows pencils and exchanges only, and takes from them what to copy and nothing about where it lies in memory: neither
`Pencil.offset` nor `Pencil.interior` is used here, so that both can be tested against it.

Every interior item is its linear global index g, in C order over `global_shape`, as `items` casts it. Halo cells are -1
and padding is -7, cast likewise. All comparisons are of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cudecomp.exchange import Exchange
from cudecomp.pencil import Pencil

HALO = -1
PADDING = -7
POISON = -99

Arrays = Sequence[np.ndarray] | Mapping[int, np.ndarray]


def items(values: Any, dtype: Any) -> np.ndarray:
    """Integers as items of any fixed size.

    Integers wrap modulo the range of `dtype`, a bool is the lowest bit, a complex item is g - 1j*g, and anything else
    that is not a float (void, structured) repeats the eight bytes of g.
    """
    values, dtype = np.asarray(values, np.int64), np.dtype(dtype)
    if dtype.kind in "iuf":
        with np.errstate(over="ignore"):  # float16 ends at 65504
            return values.astype(dtype)
    if dtype.kind == "b":
        return (values & 1).astype(dtype)
    if dtype.kind == "c":
        return (values - 1j * values).astype(dtype)
    shifts = 8 * (np.arange(dtype.itemsize) % 8)
    return (values[..., np.newaxis] >> shifts).astype(np.uint8).view(dtype)[..., 0]


def fill(pencil: Pencil, rank: int, dtype: Any) -> np.ndarray:
    """New array of `memory_shape`, in memory order: the right values inside, canaries in halo and padding."""
    starts, strides = pencil.start(rank), np.cumprod((1, *pencil.global_shape[:0:-1]))[::-1]
    index = [start + np.arange(n) for start, n in zip(starts, pencil.shape(rank), strict=True)]
    values = sum(i * stride for i, stride in zip(np.ix_(*index), strides, strict=True))
    return _with_canaries(pencil, items(values, dtype))


def poisoned(pencil: Pencil, rank: int, dtype: Any) -> np.ndarray:
    """New array of `memory_shape`, in memory order: POISON inside, canaries in halo and padding."""
    return _with_canaries(pencil, np.broadcast_to(items(POISON, dtype), pencil.shape(rank)))


def run(exchanges: Sequence[Exchange], srcs: Arrays, dsts: Arrays) -> None:
    """Carry out an exchange over all ranks.

    Each message is taken out of the sender's array as its sends say, and put into the receiver's as its receives say.

    Parameters
    ----------
    exchanges : sequence of Exchange
        That of each rank, by rank.
    srcs, dsts : sequence or mapping of int to ndarray
        The array of each rank, by rank: of `memory_shape`, in memory order, or flat.
    """
    sent = {
        (exchange.rank, peer): [_cut(exchange.src, exchange.rank, srcs, c.src_start, c.shape).copy() for c in copies]
        for exchange in exchanges
        for peer, copies in exchange.sends
    }
    for exchange in exchanges:
        for peer, copies in exchange.recvs:
            for copy, data in zip(copies, sent.pop((peer, exchange.rank)), strict=True):
                _cut(exchange.dst, exchange.rank, dsts, copy.dst_start, copy.shape)[...] = data
    assert not sent, f"sent and never received: (sender, receiver) {sorted(sent)}"


def mismatch(pencil: Pencil, rank: int, array: np.ndarray, expected: np.ndarray | None = None) -> str | None:
    """What is wrong with the memory of `rank`, or None: interior values, or a halo or padding cell that was touched.

    Parameters
    ----------
    pencil, rank
        The layout, and whose memory it is.
    array : ndarray
        The memory: of `memory_shape`, in memory order, or flat; cells beyond the end of a flat one are not looked at.
    expected : ndarray, optional
        Of `memory_shape`, in memory order. Default: what `fill` gives.
    """
    array = _shaped(pencil, rank, array)
    expected = fill(pencil, rank, array.dtype) if expected is None else expected
    wrong = np.argwhere((_bytes(array) != _bytes(expected)).any(axis=-1))
    if not len(wrong):
        return None
    place = tuple(map(int, wrong[0]))
    return (
        f"rank {rank}: {len(wrong)} of {array.size} items are wrong; at {place} of {array.shape} in memory order "
        f"got {array[place]!r}, expected {expected[place]!r}; {pencil!r}"
    )


def check(pencil: Pencil, rank: int, array: np.ndarray, expected: np.ndarray | None = None) -> None:
    """AssertionError with the text of `mismatch`, if there is one."""
    wrong = mismatch(pencil, rank, array, expected)
    assert wrong is None, wrong


def _with_canaries(pencil: Pencil, interior: np.ndarray) -> np.ndarray:
    """New array, in memory order: canaries around an interior given in axis order."""
    padding = [(0, n) for n in pencil.padding]
    padded = np.pad(np.zeros(interior.shape, bool), pencil.halo, constant_values=True)
    cells = np.pad(np.where(padded, HALO, 0), padding, constant_values=PADDING)
    array = items(cells, interior.dtype)
    array[_region(pencil, (0,) * pencil.ndim, interior.shape)] = interior
    return np.ascontiguousarray(array.transpose(pencil.order))


def _region(pencil: Pencil, place: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """A box that begins at `place`, counted from the interior, in an array in axis order with halo."""
    return tuple(slice(low + i, low + i + n) for (low, _), i, n in zip(pencil.halo, place, shape, strict=True))


def _cut(pencil: Pencil, rank: int, arrays: Arrays, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """View of a box of global indices in the memory of `rank`, in axis order."""
    array = _shaped(pencil, rank, arrays[rank]).transpose(np.argsort(pencil.order))
    region = _region(pencil, [i - first for i, first in zip(start, pencil.start(rank), strict=True)], shape)
    for axis, (part, extent) in enumerate(zip(region, array.shape, strict=True)):
        assert 0 <= part.start < part.stop <= extent - pencil.padding[axis], f"{start}, {shape} is outside rank {rank}"
    return array[region]


def _shaped(pencil: Pencil, rank: int, array: np.ndarray) -> np.ndarray:
    shape = pencil.memory_shape(rank)
    return array if array.shape == shape else array[: pencil.size(rank)].reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of each item along a new last axis."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
