# SPDX-License-Identifier: Apache-2.0
"""The pencil: which box of a global array each rank holds, and how that box lies in memory.

This module must not know of MPI, CUDA or dtypes: sizes and strides are in items, and a rank is always an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .grid import ProcessGrid, as_int, as_ints

__all__ = ["Box", "Pencil"]

_CHANGES = ("grid", "order", "halo", "padding", "dist_shape")


class Box(NamedTuple):
    """A half-open box of global indices, in axis order.

    Attributes
    ----------
    start, stop : tuple of int
        First index along each axis, and one beyond the last. ``stop == start`` along an axis means an empty box.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """The box of indices that are in `other` too; its extent is 0 along each axis where they do not meet."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))


@dataclass(frozen=True, init=False, repr=False)
class Pencil:
    """How a global array is split over a process grid, and how each rank's part lies in memory.

    A pencil along `axis` leaves that axis whole. The other axes, in increasing order, are split over the entries of the
    grid in order. N items over P parts make N // P each, and one more for the first N % P; parts may be empty.

    A value: frozen, hashable and comparable. Every method is local and asks no communicator.

    Parameters
    ----------
    global_shape : sequence of int
        Shape of the global array, in axis order: two or more extents, each at least 1.
    grid : ProcessGrid
        A grid of ``len(global_shape) - 1`` entries. An entry of 1 leaves its axis whole too, which makes a slab.
    axis : int
        The axis that is not split.
    order : None, "contiguous" or sequence of int
        The axes from slowest to fastest in memory. None is the identity; ``"contiguous"`` is (axis + 1, ..., axis),
        cyclic, with the pencil's own axis fastest.
    halo : None, int or sequence
        Ghost cells, in axis order. One int stands for both sides of every axis; otherwise one entry per axis, each an
        int or a pair (low, high).
    padding : None, int or sequence of int
        Unused cells at the high end of each axis, beyond the halo, in axis order. One int stands for every axis.
    dist_shape : None or sequence of int
        Split the axes as if the array had this shape, ``1 <= dist_shape[a] <= global_shape[a]``. What `global_shape`
        has beyond it goes to the last part that is not empty.

    Attributes
    ----------
    global_shape, grid, axis
        As given.
    order : tuple of int
        The axes from slowest to fastest in memory.
    contiguous : bool
        Whether `order` was given as ``"contiguous"``, which :meth:`pencil` hands on.
    halo : tuple of (int, int)
        (low, high) per axis, in axis order.
    padding : tuple of int
        Per axis, in axis order.
    dist_shape : tuple of int or None
        As given.

    Raises
    ------
    TypeError
        `grid` is no ProcessGrid, or something that must be an integer is not.
    ValueError
        An argument has the wrong length or an entry out of range.
    """

    global_shape: tuple[int, ...]
    grid: ProcessGrid
    axis: int
    order: tuple[int, ...]
    contiguous: bool
    halo: tuple[tuple[int, int], ...]
    padding: tuple[int, ...]
    dist_shape: tuple[int, ...] | None

    def __init__(
        self,
        global_shape: Sequence[int],
        grid: ProcessGrid,
        axis: int,
        *,
        order: Sequence[int] | str | None = None,
        halo: int | Sequence[int | Sequence[int]] | None = None,
        padding: int | Sequence[int] | None = None,
        dist_shape: Sequence[int] | None = None,
    ) -> None:
        extents = _checked_extents(global_shape)
        if not isinstance(grid, ProcessGrid):
            raise TypeError(f"Pencil: grid must be a ProcessGrid, got {grid!r} of type {type(grid).__name__}")
        if len(grid.shape) != len(extents) - 1:
            raise ValueError(
                f"Pencil: an array of {len(extents)} axes takes a grid of {len(extents) - 1} entries, got {grid!r}"
            )
        set_field = object.__setattr__
        set_field(self, "global_shape", extents)
        set_field(self, "grid", grid)
        set_field(self, "axis", _checked_axis(axis, len(extents), "Pencil"))
        set_field(self, "order", _normalized_order(order, self.axis, len(extents)))
        set_field(self, "contiguous", isinstance(order, str))
        set_field(self, "halo", _normalized_halo(halo, len(extents)))
        set_field(self, "padding", _normalized_padding(padding, len(extents)))
        set_field(self, "dist_shape", None if dist_shape is None else _checked_dist_shape(dist_shape, extents))

    def __repr__(self) -> str:
        text = f"Pencil({self.global_shape}, {self.grid!r}, axis={self.axis}"
        if self.contiguous:
            text += ", order='contiguous'"
        elif self.order != tuple(range(self.ndim)):
            text += f", order={self.order}"
        if any(map(any, self.halo)):
            text += f", halo={self.halo}"
        if any(self.padding):
            text += f", padding={self.padding}"
        if self.dist_shape is not None:
            text += f", dist_shape={self.dist_shape}"
        return text + ")"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.global_shape)

    def entry(self, axis: int) -> int | None:
        """The grid entry that `axis` is split over, or None for the pencil's own axis.

        Raises
        ------
        ValueError
            `axis` is not in [0, ndim).
        """
        axis = _checked_axis(axis, self.ndim, "Pencil.entry")
        return None if axis == self.axis else axis - (axis > self.axis)

    def parts(self, axis: int) -> int:
        """Number of parts that `axis` is split into, empty ones included. ValueError if it is not in [0, ndim)."""
        entry = self.entry(axis)
        return 1 if entry is None else self.grid.shape[entry]

    def cuts(self, axis: int) -> tuple[int, ...]:
        """Global indices where the parts of `axis` begin: ``parts(axis) + 1`` of them, from 0 to its extent.

        Part p is the half-open range ``cuts[p], cuts[p + 1]``. ValueError if `axis` is not in [0, ndim).
        """
        return self._cuts[_checked_axis(axis, self.ndim, "Pencil.cuts")]

    @cached_property
    def _cuts(self) -> tuple[tuple[int, ...], ...]:
        split = self.dist_shape or self.global_shape
        return tuple(_cuts(split[a], n, self.parts(a)) for a, n in enumerate(self.global_shape))

    def box(self, rank: int) -> Box:
        """The interior of `rank`: the global indices it holds, without halo and padding.

        Raises
        ------
        ValueError
            `rank` is not in [0, grid.size).
        """
        coords = self.grid.coords(rank)
        parts = [*coords[: self.axis], 0, *coords[self.axis :]]
        return Box(
            tuple(cuts[part] for cuts, part in zip(self._cuts, parts, strict=True)),
            tuple(cuts[part + 1] for cuts, part in zip(self._cuts, parts, strict=True)),
        )

    def start(self, rank: int) -> tuple[int, ...]:
        """First global index of the interior of `rank`, in axis order."""
        return self.box(rank).start

    def shape(self, rank: int) -> tuple[int, ...]:
        """Extents of the interior of `rank`, in axis order."""
        return self.box(rank).shape

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Slices that cut the interior of `rank` out of the global array, in axis order."""
        box = self.box(rank)
        return tuple(map(slice, box.start, box.stop))

    def memory_shape(self, rank: int) -> tuple[int, ...]:
        """Extents of the array that `rank` allocates, in memory order, with halo and padding.

        A rank with an empty interior still has its halo and padding.
        """
        shape = self.shape(rank)
        return tuple(shape[a] + sum(self.halo[a]) + self.padding[a] for a in self.order)

    def strides(self, rank: int) -> tuple[int, ...]:
        """Strides of the array that `rank` allocates, in items and memory order; the last one is 1."""
        strides = [1]
        for extent in self.memory_shape(rank)[:0:-1]:
            # An extent of 0 counts as 1, so that no stride of an empty array is 0.
            strides.append(strides[-1] * max(extent, 1))
        return tuple(reversed(strides))

    def axis_strides(self, rank: int) -> tuple[int, ...]:
        """Strides of the array that `rank` allocates, in items and axis order."""
        strides = self.strides(rank)
        return tuple(strides[self.order.index(a)] for a in range(self.ndim))

    def size(self, rank: int) -> int:
        """Items that `rank` allocates, halo and padding included."""
        return math.prod(self.memory_shape(rank))

    def offset(self, rank: int, index: Sequence[int]) -> int:
        """Where a global index lies in the memory of `rank`, in items from the start of its array.

        Parameters
        ----------
        rank : int
            Whose memory.
        index : sequence of int
            A global index, in axis order. It may lie in the halo, and is then not wrapped: the cell below index 0 is
            -1, the one above the last is ``global_shape[a]``. Whether the rank holds it is not checked.

        Raises
        ------
        ValueError
            `index` has the wrong length, or `rank` is not in [0, grid.size).
        """
        index = as_ints(index, "Pencil.offset: index")
        if len(index) != self.ndim:
            raise ValueError(f"Pencil.offset: got index {index}, expected {self.ndim} entries")
        lows = (low for low, _ in self.halo)
        places = zip(index, self.start(rank), lows, self.axis_strides(rank), strict=True)
        return sum((i - start + low) * stride for i, start, low, stride in places)

    def interior(self, array: Any, rank: int) -> Any:
        """View of the interior of `rank` in `array`, in axis order: no halo, no padding, never a copy.

        Parameters
        ----------
        array : array
            NumPy, CuPy or PyTorch, or anything that reshapes, transposes and slices alike. Its shape is
            ``memory_shape(rank)``, with any number of leading axes (fields), or it is flat: (n,) or (k, n) with n at
            least ``size(rank)``. A shape that fits both ways is taken as the former.
        rank : int
            Whose memory this is.

        Returns
        -------
        array
            Of shape ``shape(rank)`` after the leading axes.

        Raises
        ------
        TypeError
            `array` has no shape.
        ValueError
            The shape fits neither way, or `rank` is not in [0, grid.size).
        """
        array, leading = self._in_memory_shape(array, rank)
        axes = (*range(leading), *(leading + self.order.index(a) for a in range(self.ndim)))
        # PyTorch spells it differently: its transpose swaps two axes.
        array = array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)
        interior = (slice(low, low + n) for (low, _), n in zip(self.halo, self.shape(rank), strict=True))
        return array[(..., *interior)]

    def _in_memory_shape(self, array: Any, rank: int) -> tuple[Any, int]:
        """`array` as a view of shape (..., *memory_shape), and the number of its leading axes."""
        try:
            shape = tuple(array.shape)
        except (AttributeError, TypeError):
            raise TypeError(f"Pencil.interior: expected an array, got {type(array).__name__}") from None
        memory_shape, size = self.memory_shape(rank), self.size(rank)
        if shape[-self.ndim :] == memory_shape:
            return array, len(shape) - self.ndim
        if len(shape) in (1, 2) and shape[-1] >= size:
            return array[..., :size].reshape(shape[:-1] + memory_shape), len(shape) - 1
        raise ValueError(
            f"Pencil.interior: got an array of shape {shape}, expected {memory_shape} in memory order "
            f"or flat with at least {size} items, for rank {rank} of {self!r}"
        )

    def pencil(self, axis: int, **changes: Any) -> Pencil:
        """The pencil along another axis of the same array.

        It has the same `global_shape`, `grid` and `dist_shape`. A pencil built with order ``"contiguous"`` gives one
        that is contiguous along the new axis; otherwise the order is the identity. It has no halo and no padding.

        Parameters
        ----------
        axis : int
            The axis that is not split in the new pencil.
        **changes
            `grid`, `order`, `halo`, `padding` or `dist_shape`, to replace what is said above.

        Raises
        ------
        TypeError
            Another keyword is given.
        ValueError
            As for the constructor.
        """
        unknown = [name for name in changes if name not in _CHANGES]
        if unknown:
            raise TypeError(f"Pencil.pencil: got {', '.join(unknown)}, expected changes to {', '.join(_CHANGES)}")
        order = "contiguous" if self.contiguous else None
        kept: dict[str, Any] = {"grid": self.grid, "order": order, "dist_shape": self.dist_shape}
        return Pencil(self.global_shape, axis=axis, **(kept | changes))


def _cuts(n: int, extent: int, parts: int) -> tuple[int, ...]:
    """Where the parts of an axis begin if `n` items are split evenly; the last that is not empty runs to `extent`."""
    each, more = divmod(n, parts)
    cuts = [p * each + min(p, more) for p in range(parts + 1)]
    last = bisect_left(cuts, n)
    return (*cuts[:last], *([extent] * (parts + 1 - last)))


def _checked_axis(axis: int, ndim: int, caller: str) -> int:
    axis = as_int(axis, f"{caller}: axis")
    if not 0 <= axis < ndim:
        raise ValueError(f"{caller}: got axis {axis}, expected 0 <= axis < {ndim}")
    return axis


def _checked_extents(global_shape: Sequence[int]) -> tuple[int, ...]:
    extents = as_ints(global_shape, "Pencil: global_shape")
    if len(extents) < 2 or min(extents) < 1:
        raise ValueError(f"Pencil: got global_shape {extents}, expected two or more extents, each at least 1")
    return extents


def _checked_dist_shape(dist_shape: Sequence[int], extents: tuple[int, ...]) -> tuple[int, ...]:
    dist = as_ints(dist_shape, "Pencil: dist_shape")
    if len(dist) != len(extents) or any(not 1 <= d <= n for d, n in zip(dist, extents, strict=True)):
        raise ValueError(
            f"Pencil: got dist_shape {dist}, expected one entry per axis, from 1 to that of global_shape {extents}"
        )
    return dist


def _normalized_order(order: Sequence[int] | str | None, axis: int, ndim: int) -> tuple[int, ...]:
    if order is None:
        return tuple(range(ndim))
    if isinstance(order, str):
        if order != "contiguous":
            raise ValueError(f"Pencil: got order {order!r}, expected None, 'contiguous' or a permutation of the axes")
        return tuple((axis + 1 + i) % ndim for i in range(ndim))
    axes = as_ints(order, "Pencil: order")
    if sorted(axes) != list(range(ndim)):
        raise ValueError(f"Pencil: got order {axes}, expected a permutation of {tuple(range(ndim))}")
    return axes


def _normalized_halo(halo: int | Sequence[int | Sequence[int]] | None, ndim: int) -> tuple[tuple[int, int], ...]:
    if halo is None:
        halo = 0
    entries = list(halo) if isinstance(halo, Iterable) else [halo] * ndim
    if len(entries) != ndim:
        raise ValueError(f"Pencil: got halo {halo!r}, expected one entry per axis, {ndim} in all")
    pairs = []
    for axis, entry in enumerate(entries):
        widths = as_ints(entry if isinstance(entry, Iterable) else (entry, entry), f"Pencil: halo of axis {axis}")
        if len(widths) != 2 or min(widths) < 0:
            raise ValueError(f"Pencil: got halo {entry!r} for axis {axis}, expected (low, high), neither negative")
        pairs.append((widths[0], widths[1]))
    return tuple(pairs)


def _normalized_padding(padding: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    if padding is None:
        padding = 0
    pads = as_ints(padding if isinstance(padding, Iterable) else [padding] * ndim, "Pencil: padding")
    if len(pads) != ndim or min(pads) < 0:
        raise ValueError(f"Pencil: got padding {padding!r}, expected one entry per axis, {ndim} in all, none negative")
    return pads
