# SPDX-License-Identifier: Apache-2.0
"""Owns the match of users' arrays against the pencils of a plan; everything a wrong array raises is raised here.

All checks are local and come before anything is packed or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .array import ArrayView
from .pencil import Pencil
from .spec import Spec


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

    def __init__(self, spec: Spec, rank: int, src: Any, dst: Any, view: Callable[[Any, str], ArrayView]):
        what = spec.operation
        if spec.inplace:
            src = self._one_array(what, src, dst, view)
            sources = _views(spec, rank, src, "src", view, writable=True)
            targets: list[ArrayView] = []
        else:
            if dst is None:
                raise ValueError(f"{what}: dst is missing; only a plan built with inplace=True takes one array")
            sources = _views(spec, rank, src, "src", view, writable=False)
            targets = _views(spec, rank, dst, "dst", view, writable=True)
        _check_overlap(what, sources, targets, spec.inplace)
        used = sources + targets
        self.sources = _addresses(sources, spec.fields)
        self.destinations = _addresses(targets, spec.fields) if targets else self.sources
        self.spans = [(one.address, one.address + one.nbytes) for one in used]
        self.owners = [one.owner for one in used]
        self.streams = tuple({one.stream for one in used if one.stream is not None})
        self.stream = used[-1].stream

    @staticmethod
    def _one_array(what: str, src: Any, dst: Any, view: Callable[[Any, str], ArrayView]) -> Any:
        """Return the buffer of an in-place run; `dst` may be left out or be the same memory."""
        if dst is not None and dst is not src:
            same = not isinstance(src, list | tuple) and not isinstance(dst, list | tuple)
            if not same or view(src, "src").address != view(dst, "dst").address:
                raise ValueError(f"{what}: this plan works in place and takes one array, got two different ones")
            return src if view(src, "src").nbytes >= view(dst, "dst").nbytes else dst
        return src


def _views(
    spec: Spec, rank: int, array: Any, name: str, view: Callable[[Any, str], ArrayView], writable: bool
) -> list[ArrayView]:
    """Return the checked views of an argument: one, or one per field of a sequence."""
    label = f"{spec.operation}: {name}"
    pencils = (spec.src, spec.dst) if spec.inplace else (spec.src,) if name == "src" else (spec.dst,)
    if isinstance(array, list | tuple):
        if len(array) != spec.fields:
            raise ValueError(f"{label} has {len(array)} arrays, expected {spec.fields}, one per field")
        return [_checked(spec, rank, view(one, label), label, pencils, 1, writable) for one in array]
    return [_checked(spec, rank, view(array, label), label, pencils, spec.fields, writable)]


def _checked(
    spec: Spec, rank: int, view: ArrayView, label: str, pencils: Sequence[Pencil], fields: int, writable: bool
) -> ArrayView:
    if view.dtype != spec.dtype:
        raise TypeError(f"{label} has dtype {view.dtype}, expected {spec.dtype}")
    needed = max(pencil.size(rank) for pencil in pencils)
    shapes = [pencil.memory_shape(rank) for pencil in pencils if pencil.size(rank) == needed]
    if not any(_fits(view.shape, shape, needed, fields) for shape in shapes):
        lead = f"{fields} fields of " if fields > 1 else ""
        raise ValueError(
            f"{label} has shape {view.shape}, expected {lead}the memory shape {shapes[0]} of rank {rank}, "
            f"or flat with at least {needed} items"
        )
    if not view.contiguous:
        raise ValueError(f"{label} has strides {view.strides} bytes, expected C order without gaps (memory order)")
    if writable and view.readonly:
        raise ValueError(f"{label} is read-only, expected a writable array")
    return view


def _fits(shape: tuple[int, ...], memory: tuple[int, ...], needed: int, fields: int) -> bool:
    """Tell whether an array is of the memory shape, or flat and large enough; several fields add a leading axis."""
    if fields > 1:
        if not shape or shape[0] != fields:
            return False
        shape = shape[1:]
    return shape == memory or (len(shape) == 1 and shape[0] >= needed)


def _check_overlap(what: str, sources: list[ArrayView], targets: list[ArrayView], inplace: bool) -> None:
    written = sources if inplace else targets
    for i, one in enumerate(written):
        for other in written[:i] if inplace else sources + written[:i]:
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
