# SPDX-License-Identifier: Apache-2.0
"""Owns the exchange of a halo update: which ghost cells of a rank come from where; knows nothing of MPI.

Along an axis, what a rank allocates falls into runs of cells. Ghost runs are those that an update fills: each has an
owner, the part whose interior it repeats, possibly across a periodic edge. All other cells, the interior, the halo of
axes that are not updated and what lies beyond a wall, are runs that the rank itself owns. Runs of the axes multiply to
boxes; a box is filled if one of its runs is a ghost run. Its source then lies at the owners of all its runs, at the
same place along axes where the run is no ghost: edges and corners need no second step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from .exchange import BoxCopy, Exchange, Nodes
from .pencil import Pencil


class Run(NamedTuple):
    """Consecutive cells along an axis, [start, stop) in the global indices of the part that allocates them.

    `owner` is the part that has them as interior, at indices that are smaller by `shift`; `ghost` tells whether an
    update fills them.
    """

    start: int
    stop: int
    owner: int
    shift: int
    ghost: bool


def halo_exchange(
    pencil: Pencil, rank: int, periods: Sequence[bool], axes: Sequence[int], nodes: Nodes | None = None
) -> Exchange:
    """Return what a rank sends and receives when the halos of `axes` are updated in one step. Local.

    Parameters
    ----------
    pencil : Pencil
        The layout, with halos.
    rank : int
        Whose messages.
    periods : sequence of bool
        Per axis, whether it is periodic. Beyond the ends of other axes nothing is filled.
    axes : sequence of int
        The axes whose halos are filled. Cells in the halo of other axes take part: they are filled where they also lie
        in the halo of an updated axis.
    nodes : None, sequence or callable
        As for Exchange.

    Notes
    -----
    Sources are never filled themselves: they are interior along the updated axes, or beyond a wall.
    """
    wanted = set(axes)
    coords = [_part(pencil, axis, rank) for axis in range(pencil.ndim)]
    mine = [_runs(pencil, axis, coords[axis], periods[axis], axis in wanted) for axis in range(pencil.ndim)]
    recvs: dict[int, list[BoxCopy]] = {}
    for box in product(*mine):
        if any(run.ghost for run in box):
            recvs.setdefault(_rank(pencil, [run.owner for run in box]), []).append(_copy(box))
    sends: dict[int, list[BoxCopy]] = {}
    theirs = [list(_owned(pencil, axis, coords[axis], periods[axis], axis in wanted)) for axis in range(pencil.ndim)]
    for pieces in product(*theirs):
        if any(run.ghost for _, run in pieces):
            peer = _rank(pencil, [part for part, _ in pieces])
            sends.setdefault(peer, []).append(_copy([run for _, run in pieces]))
    return Exchange.from_copies(pencil, pencil, rank, _sorted(sends, pencil), _sorted(recvs, pencil), nodes)


def _sorted(messages: dict[int, list[BoxCopy]], pencil: Pencil) -> dict[int, list[BoxCopy]]:
    """Put the boxes of each message in the order of their places in the receiver's memory, which both ends know.

    So the two faces along the fastest axis, which share cache lines, follow each other.
    """
    return {
        peer: sorted(copies, key=lambda copy: [copy.dst_start[axis] for axis in pencil.order])
        for peer, copies in messages.items()
    }


def _copy(box: Sequence[Run]) -> BoxCopy:
    return BoxCopy(
        tuple(run.stop - run.start for run in box),
        tuple(run.start - run.shift for run in box),
        tuple(run.start for run in box),
    )


def _part(pencil: Pencil, axis: int, rank: int) -> int:
    """Return the part of an axis that a rank has."""
    entry = pencil.entry(axis)
    return 0 if entry is None else pencil.grid.coords(rank)[entry]


def _rank(pencil: Pencil, parts: Sequence[int]) -> int:
    """Return the rank that has the given part of each axis."""
    coords = [0] * (pencil.ndim - 1)
    for axis, part in enumerate(parts):
        entry = pencil.entry(axis)
        if entry is not None:
            coords[entry] = part
    return pencil.grid.rank(coords)


def _owned(pencil: Pencil, axis: int, owner: int, periodic: bool, updated: bool) -> Iterator[tuple[int, Run]]:
    """Yield (part, run) for every run along an axis, of any part, that `owner` owns."""
    for part in range(pencil.parts(axis)) if updated else (owner,):
        for run in _runs(pencil, axis, part, periodic, updated):
            if run.owner == owner:
                yield part, run


def _runs(pencil: Pencil, axis: int, part: int, periodic: bool, updated: bool) -> list[Run]:
    """Return the runs of cells of a part along an axis, by rising index; none if its interior is empty."""
    cuts, (low, high) = pencil.cuts(axis), pencil.halo[axis]
    start, stop = cuts[part], cuts[part + 1]
    if start == stop:
        return []
    if not updated:
        return [Run(start - low, stop + high, part, 0, False)]
    if periodic:
        below, above = _ghosts(cuts, start - low, start), _ghosts(cuts, stop, stop + high)
        return [*below, Run(start, stop, part, 0, False), *above]
    n, first, last = cuts[-1], start - low, stop + high
    # What lies beyond a wall belongs to the part itself, next to its interior or, under a deep halo, further away.
    own_start, own_stop = first if start == 0 else start, last if stop == n else stop
    beyond = [Run(a, b, part, 0, False) for a, b in ((first, min(own_start, 0)), (max(own_stop, n), last)) if a < b]
    ghosts = [*_ghosts(cuts, max(first, 0), start), *_ghosts(cuts, stop, min(last, n))]
    return sorted([*ghosts, *beyond, Run(own_start, own_stop, part, 0, False)])


def _ghosts(cuts: Sequence[int], start: int, stop: int) -> list[Run]:
    """Return the ghost runs that cover [start, stop): cut where the owner changes or the axis begins anew."""
    n, runs = cuts[-1], []
    while start < stop:
        shift = start // n * n
        owner = bisect_right(cuts, start - shift) - 1
        end = min(stop, cuts[owner + 1] + shift)
        runs.append(Run(start, end, owner, shift, True))
        start = end
    return runs
