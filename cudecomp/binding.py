# SPDX-License-Identifier: Apache-2.0
"""Owns the match of users' arrays against the pencils of a plan; everything a wrong array raises is raised here.

All checks are local and come before anything is packed or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array import ArrayView
from .pencil import Pencil
from .spec import Spec

View = Callable[[Any, str], ArrayView]


class Argument(NamedTuple):
    """What an array of a run must be like, on one rank.

    `shapes` are the memory shapes it may have, `items` what it holds at least when it is flat; `fields` arrays of this
    kind are one argument.
    """

    label: str
    dtype: np.dtype[Any]
    shapes: tuple[tuple[int, ...], ...]
    items: int
    fields: int
    writable: bool

    def views(self, array: Any, view: View) -> list[ArrayView]:
        """Return the checked views of an argument: one, or one per field of a sequence."""
        if not isinstance(array, list | tuple):
            return [self._checked(view(array, self.label), self.fields)]
        if len(array) != self.fields:
            raise ValueError(f"{self.label} has {len(array)} arrays, expected {self.fields}, one per field")
        return [self._checked(view(one, self.label), 1) for one in array]

    def _checked(self, view: ArrayView, fields: int) -> ArrayView:
        if view.dtype != self.dtype:
            raise TypeError(f"{self.label} has dtype {view.dtype}, expected {self.dtype}")
        if not self._fits(view.shape, fields):
            lead = f"{fields} fields of " if fields > 1 else ""
            raise ValueError(
                f"{self.label} has shape {view.shape}, expected {lead}the memory shape {self.shapes[0]} of this rank, "
                f"or flat with at least {self.items} items"
            )
        if not view.contiguous:
            raise ValueError(f"{self.label} has strides {view.strides} bytes, expected C order without gaps")
        if self.writable and view.readonly:
            raise ValueError(f"{self.label} is read-only, expected a writable array")
        return view

    def _fits(self, shape: tuple[int, ...], fields: int) -> bool:
        """Tell whether a shape is a memory shape, or flat and large enough; several fields add a leading axis."""
        if fields > 1:
            if not shape or shape[0] != fields:
                return False
            shape = shape[1:]
        return shape in self.shapes or (len(shape) == 1 and shape[0] >= self.items)


class Arguments(NamedTuple):
    """What the arrays of a plan's runs must be like, worked out once; `dst` is None in place."""

    operation: str
    src: Argument
    dst: Argument | None


def arguments_of(spec: Spec, rank: int) -> Arguments:
    """Return what a rank's arrays must be like."""

    def argument(name: str, pencils: Sequence[Pencil], writable: bool) -> Argument:
        items = max(pencil.size(rank) for pencil in pencils)
        shapes = tuple(pencil.memory_shape(rank) for pencil in pencils if pencil.size(rank) == items)
        return Argument(f"{spec.operation}: {name}", spec.dtype, shapes, items, spec.fields, writable)

    if spec.one_array:
        return Arguments(spec.operation, argument("src", (spec.src, spec.dst), True), None)
    return Arguments(spec.operation, argument("src", (spec.src,), False), argument("dst", (spec.dst,), True))


class Binding:
    """The arrays of one run, checked: the addresses of all fields, and the owners of the memory.

    Attributes
    ----------
    sources, destinations : tuple of int
        The address of each field.
    spans : list of (int, int)
        The address ranges in use, [start, stop).
    owners : list
        Keeps the arrays alive.
    streams : tuple of int
        That the arrays say they are in use on.
    stream : int or None
        That of the destination.
    """

    __slots__ = ("destinations", "owners", "sources", "spans", "stream", "streams")

    def __init__(self, arguments: Arguments, src: Any, dst: Any, view: View):
        what, fields = arguments.operation, arguments.src.fields
        targets: list[ArrayView] = []
        if arguments.dst is None:
            sources = arguments.src.views(_one_array(what, src, dst, view), view)
        elif dst is None:
            raise ValueError(f"{what}: dst is missing; only a plan built with inplace=True takes one array")
        else:
            sources, targets = arguments.src.views(src, view), arguments.dst.views(dst, view)
        _check_overlap(what, sources, targets)
        used = sources + targets
        self.sources = _addresses(sources, fields)
        self.destinations = _addresses(targets, fields) if targets else self.sources
        self.spans = [(one.address, one.address + one.nbytes) for one in used]
        self.owners = [one.owner for one in used]
        self.streams = tuple({one.stream for one in used if one.stream is not None})
        self.stream = used[-1].stream


def _one_array(what: str, src: Any, dst: Any, view: View) -> Any:
    """Return the array of a run that takes one; `dst` may be left out or be the same memory."""
    if dst is None or dst is src:
        return src
    if not isinstance(src, list | tuple) and not isinstance(dst, list | tuple):
        a, b = view(src, "src"), view(dst, "dst")
        if a.address == b.address:
            return src if a.nbytes >= b.nbytes else dst
    raise ValueError(f"{what}: this plan works on one array, got two different ones")


def _check_overlap(what: str, sources: list[ArrayView], targets: list[ArrayView]) -> None:
    """Raise if something that is written overlaps anything else; in place there are no targets."""
    written = targets or sources
    for i, one in enumerate(written):
        for other in (sources if targets else []) + written[:i]:
            if one.nbytes and other.nbytes and _meet(one, other):
                same = one.address == other.address and other in sources
                hint = "; to work in one buffer, build the plan with inplace=True" if same else ""
                raise ValueError(f"{what}: its arrays overlap in memory, expected separate ones{hint}")


def _meet(a: ArrayView, b: ArrayView) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


def _addresses(views: list[ArrayView], fields: int) -> tuple[int, ...]:
    """Return one address per field: of each array, or of each item of the leading axis of one array."""
    if len(views) == fields:
        return tuple(view.address for view in views)
    (view,) = views
    step = view.nbytes // fields
    return tuple(view.address + field * step for field in range(fields))
