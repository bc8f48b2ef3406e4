# SPDX-License-Identifier: Apache-2.0
"""Tools for the tests of programs that use this package: arrays whose values tell where they belong, and virtual ranks.

The reference carries out exchanges with NumPy slicing. It takes from pencils and exchanges what to copy, and nothing
about where it lies in memory: neither `Pencil.offset` nor `Pencil.interior` is used here, so that both can be tested
against it. It knows nothing of plans.

Every interior item is its linear global index g, in C order over `global_shape`, as `items` casts it. Halo cells are
`HALO`, padding is `PADDING`, and what has not been written yet is `POISON`, cast likewise. Comparisons are of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .exchange import Exchange
from .grid import as_int, as_ints
from .halo import halo_exchange
from .pencil import Pencil

__all__ = ["HALO", "PADDING", "POISON", "VirtualRanks", "check", "fill", "items", "mismatch", "poisoned", "run"]

#: What halo cells are filled with.
HALO = -1
#: What padding is filled with.
PADDING = -7
#: What is filled in where something is to be written.
POISON = -99

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array] | Mapping[int, Array]


def items(values: Any, dtype: Any) -> Array:
    """Return integers as items of any fixed size.

    Integers wrap modulo the range of `dtype`, a bool is the lowest bit, a complex item is g - 1j*g, and anything else
    that is not a float (void, structured) repeats the eight bytes of g.

    Parameters
    ----------
    values : array of int
        Of any shape.
    dtype : dtype-like
        Of the items.
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


def fill(pencil: Pencil, rank: int, dtype: Any = np.int64) -> Array:
    """Return a new array of a rank: linear global indices inside, `HALO` and `PADDING` around. Local.

    Parameters
    ----------
    pencil, rank
        The layout, and whose part. The array has `memory_shape`, in memory order.
    dtype : dtype-like
        Of the items, which are what `items` makes of the indices.
    """
    starts, strides = pencil.start(rank), np.cumprod((1, *pencil.global_shape[:0:-1]))[::-1]
    index = [start + np.arange(n) for start, n in zip(starts, pencil.shape(rank), strict=True)]
    values = sum(i * stride for i, stride in zip(np.ix_(*index), strides, strict=True))
    return _with_canaries(pencil, items(values, dtype))


def poisoned(pencil: Pencil, rank: int, dtype: Any = np.int64) -> Array:
    """Return a new array of a rank to be written to: `POISON` inside, `HALO` and `PADDING` around. Local.

    Parameters
    ----------
    pencil, rank, dtype
        As for `fill`.
    """
    return _with_canaries(pencil, np.broadcast_to(items(POISON, dtype), pencil.shape(rank)))


def mismatch(pencil: Pencil, rank: int, array: Array, expected: Array | None = None) -> str | None:
    """Return what is wrong with the array of a rank, or None: a value inside, or a halo or padding cell. Local.

    Parameters
    ----------
    pencil, rank
        The layout, and whose part it is.
    array : ndarray
        Of `memory_shape`, in memory order, or flat; cells beyond the end of a flat one are not looked at.
    expected : ndarray, optional
        Of `memory_shape`, in memory order. Default: what `fill` gives.
    """
    array = _shaped(pencil, rank, array)
    expected = fill(pencil, rank, array.dtype) if expected is None else expected
    if expected.shape != array.shape or expected.dtype != array.dtype:
        raise ValueError(
            f"mismatch: expected has shape {expected.shape} and dtype {expected.dtype}, "
            f"the array of rank {rank} {array.shape} and {array.dtype}"
        )
    wrong = np.argwhere(_different(array, expected))
    if not len(wrong):
        return None
    place = tuple(map(int, wrong[0]))
    return (
        f"rank {rank}: {len(wrong)} of {array.size} items are wrong; at {place} of {array.shape} in memory order "
        f"got {array[place]!r}, expected {expected[place]!r}; {pencil!r}"
    )


def check(pencil: Pencil, rank: int, array: Array, expected: Array | None = None) -> None:
    """Raise AssertionError with the text of `mismatch`, if there is one. Local.

    Parameters
    ----------
    pencil, rank, array, expected
        As for `mismatch`.
    """
    wrong = mismatch(pencil, rank, array, expected)
    if wrong is not None:
        raise AssertionError(wrong)


def run(exchanges: Sequence[Exchange], srcs: Arrays, dsts: Arrays) -> None:
    """Carry out an exchange over all ranks in this process.

    Each message is taken out of the sender's array as its sends say, and put into the receiver's as its receives say.

    Parameters
    ----------
    exchanges : sequence of Exchange
        That of each rank, by rank.
    srcs, dsts : sequence or mapping of int to ndarray
        The array of each rank, by rank: of `memory_shape`, in memory order, or flat. They may be the same arrays.

    Raises
    ------
    AssertionError
        What is sent is not what is received, or lies outside a rank's array.
    """
    sent = {
        (exchange.rank, peer): [_cut(exchange.src, exchange.rank, srcs, c.src_start, c.shape).copy() for c in copies]
        for exchange in exchanges
        for peer, copies in exchange.sends
    }
    for exchange in exchanges:
        for peer, copies in exchange.recvs:
            boxes = sent.pop((peer, exchange.rank), [])
            if [box.shape for box in boxes] != [copy.shape for copy in copies]:
                raise AssertionError(f"rank {peer} sends other boxes to rank {exchange.rank} than it expects")
            for copy, box in zip(copies, boxes, strict=True):
                _cut(exchange.dst, exchange.rank, dsts, copy.dst_start, copy.shape)[...] = box
    if sent:
        raise AssertionError(f"sent and never received: (sender, receiver) {sorted(sent)}")


class VirtualRanks:
    """All ranks of a communicator that is not there: one process plays them, with NumPy alone.

    The array of each rank is an item of a list, by rank, of the pencil's `memory_shape` for that rank, in memory order.
    Nothing that is given to a method is changed; what it returns is new. All methods are local.

    Parameters
    ----------
    size : int
        How many ranks; that of the pencils' grids.

    Raises
    ------
    TypeError, ValueError
        Of all methods: a grid of another size, another number of arrays, or a shape that does not fit.

    Examples
    --------
    >>> from cudecomp import Pencil, ProcessGrid, testing
    >>> x = Pencil((16, 12, 10), ProcessGrid((2, 3)), axis=0)
    >>> y = x.pencil(1, order="contiguous")
    >>> ranks = testing.VirtualRanks(6)
    >>> moved = ranks.transpose(x, y, ranks.fill(x))
    >>> ranks.check(y, moved)
    """

    def __init__(self, size: int):
        self.size = as_int(size, "VirtualRanks: size")
        if self.size < 1:
            raise ValueError(f"VirtualRanks: got size {size}, expected at least 1")

    def __repr__(self) -> str:
        return f"VirtualRanks({self.size})"

    def fill(self, pencil: Pencil, dtype: Any = np.int64) -> list[Array]:
        """Return arrays of linear global indices with canaries around, as for `testing.fill` with `pencil`, `dtype`."""
        return [fill(pencil, rank, dtype) for rank in self._ranks("fill", pencil)]

    def poisoned(self, pencil: Pencil, dtype: Any = np.int64) -> list[Array]:
        """Return arrays to be written to, as for `testing.poisoned` with `pencil` and `dtype`."""
        return [poisoned(pencil, rank, dtype) for rank in self._ranks("poisoned", pencil)]

    def check(self, pencil: Pencil, arrays: Sequence[Array], expected: Sequence[Array] | None = None) -> None:
        """Raise AssertionError if an array is not as `expected`.

        Parameters
        ----------
        pencil : Pencil
            The layout.
        arrays, expected : sequence of ndarray
            Of each rank. Expected by default: what `fill` gives, halo and padding included.
        """
        wrong = [
            mismatch(pencil, rank, array, None if expected is None else expected[rank])
            for rank, array in enumerate(self._given("check", pencil, arrays))
        ]
        if any(wrong):
            raise AssertionError("\n".join(filter(None, wrong)))

    def scatter(self, array: Any, pencil: Pencil) -> list[Array]:
        """Return the parts of a whole array, with `HALO` and `PADDING` around.

        Parameters
        ----------
        array : array-like
            Of the global shape, in axis order.
        pencil : Pencil
            Which part each rank gets.
        """
        array, ranks = np.asarray(array), self._ranks("scatter", pencil)
        if array.shape != pencil.global_shape:
            raise ValueError(f"VirtualRanks.scatter: got shape {array.shape}, expected {pencil.global_shape}")
        return [_with_canaries(pencil, array[pencil.slices(rank)]) for rank in ranks]

    def gather(self, arrays: Sequence[Array], pencil: Pencil) -> Array:
        """Return the whole array, in axis order, that parts belong to.

        Parameters
        ----------
        arrays : sequence of ndarray
            Of each rank; only interiors are read.
        pencil : Pencil
            Which part each rank has.
        """
        arrays = self._given("gather", pencil, arrays)
        whole = np.empty(pencil.global_shape, arrays[0].dtype)
        for rank in range(self.size):
            if pencil.box(rank).size:
                whole[pencil.slices(rank)] = _cut(pencil, rank, arrays, pencil.start(rank), pencil.shape(rank))
        return whole

    def transpose(self, src: Pencil, dst: Pencil, arrays: Sequence[Array]) -> list[Array]:
        """Return what a TransposePlan would write to arrays from `poisoned`.

        Parameters
        ----------
        src, dst : Pencil
            The layouts.
        arrays : sequence of ndarray
            Of each rank, in the layout `src`.
        """
        arrays = self._given("transpose", src, arrays)
        moved = self.poisoned(dst, arrays[0].dtype)
        run([Exchange(src, dst, rank) for rank in range(self.size)], arrays, moved)
        return moved

    def update_halos(
        self,
        pencil: Pencil,
        arrays: Sequence[Array],
        periods: bool | Sequence[bool],
        axes: int | Sequence[int] | None = None,
    ) -> list[Array]:
        """Return what a HaloPlan would make of the arrays.

        Parameters
        ----------
        pencil : Pencil
            The layout, with halos.
        arrays : sequence of ndarray
            Of each rank.
        periods : bool or sequence of bool
            Per axis, whether it is periodic.
        axes : int or sequence of int, optional
            The axes whose halos are filled; None: all.
        """
        arrays = [array.copy() for array in self._given("update_halos", pencil, arrays)]
        flags: list[Any] = list(periods) if isinstance(periods, Iterable) else [periods] * pencil.ndim
        if len(flags) != pencil.ndim or not all(isinstance(flag, bool | np.bool_) for flag in flags):
            raise ValueError(f"VirtualRanks.update_halos: periods is {periods!r}, expected a flag, or one per axis")
        given = range(pencil.ndim) if axes is None else axes if isinstance(axes, Iterable) else (axes,)
        chosen = as_ints(given, "VirtualRanks.update_halos: axes")
        if not set(chosen) <= set(range(pencil.ndim)):
            raise ValueError(f"VirtualRanks.update_halos: got axes {axes!r}, expected some of 0 to {pencil.ndim - 1}")
        run([halo_exchange(pencil, rank, flags, chosen) for rank in range(self.size)], arrays, arrays)
        return arrays

    def _ranks(self, method: str, pencil: Pencil) -> range:
        if pencil.grid.size != self.size:
            raise ValueError(f"VirtualRanks.{method}: got {pencil.grid!r}, expected a grid of {self.size} ranks")
        return range(self.size)

    def _given(self, method: str, pencil: Pencil, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays of all ranks after checking them."""
        shapes, arrays = [pencil.memory_shape(rank) for rank in self._ranks(method, pencil)], list(arrays)
        found = [np.shape(array) for array in arrays]
        if found != shapes:
            raise ValueError(f"VirtualRanks.{method}: got arrays of shapes {found}, expected {shapes}, one per rank")
        return arrays


def _with_canaries(pencil: Pencil, interior: Array) -> Array:
    """Return a new array in memory order: canaries around an interior given in axis order."""
    padding = [(0, n) for n in pencil.padding]
    padded = np.pad(np.zeros(interior.shape, bool), pencil.halo, constant_values=True)
    cells = np.pad(np.where(padded, HALO, 0), padding, constant_values=PADDING)
    array = items(cells, interior.dtype)
    array[_region(pencil, (0,) * pencil.ndim, interior.shape)] = interior
    return np.ascontiguousarray(array.transpose(pencil.order))


def _region(pencil: Pencil, place: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return a box that begins at `place`, counted from the interior, in an array in axis order with halo."""
    return tuple(slice(low + i, low + i + n) for (low, _), i, n in zip(pencil.halo, place, shape, strict=True))


def _cut(pencil: Pencil, rank: int, arrays: Arrays, start: Sequence[int], shape: Sequence[int]) -> Array:
    """Return a view of a box of global indices in the memory of `rank`, in axis order."""
    array = _shaped(pencil, rank, arrays[rank]).transpose(np.argsort(pencil.order))
    region = _region(pencil, [i - first for i, first in zip(start, pencil.start(rank), strict=True)], shape)
    ends = [extent - pad for extent, pad in zip(array.shape, pencil.padding, strict=True)]
    if not all(0 <= part.start < part.stop <= end for part, end in zip(region, ends, strict=True)):
        raise AssertionError(f"the box of shape {tuple(shape)} at {tuple(start)} is outside the array of rank {rank}")
    return array[region]


def _shaped(pencil: Pencil, rank: int, array: Array) -> Array:
    shape = pencil.memory_shape(rank)
    if array.shape == shape:
        return array
    if array.ndim != 1 or array.size < pencil.size(rank):
        raise ValueError(
            f"the array of rank {rank} has shape {array.shape}, expected the memory shape {shape}, "
            f"or flat with at least {pencil.size(rank)} items"
        )
    return array[: pencil.size(rank)].reshape(shape)


def _different(a: Array, b: Array) -> Array:
    """Tell for each item whether two arrays differ there, bit by bit but for bytes that mean nothing."""
    if a.dtype.names:
        fields = [_different(a[name], b[name]) for name in a.dtype.names]
        return np.any([field.any(axis=tuple(range(a.ndim, field.ndim))) for field in fields], axis=0)
    if a.dtype.char in "gG":  # long doubles have some
        return (a != b) & ~((a != a) & (b != b))
    a, b = (np.ascontiguousarray(one).view(np.uint8).reshape(*one.shape, one.dtype.itemsize) for one in (a, b))
    return (a != b).any(axis=-1)
