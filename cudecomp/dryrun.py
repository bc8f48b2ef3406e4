# SPDX-License-Identifier: Apache-2.0
"""Owns the dry run: what every rank of any process grid would hold and send; knows nothing of MPI and moves no data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np

from .exchange import Exchange
from .grid import ProcessGrid
from .pencil import Pencil
from .report import MOST, pencil_text, schedule_lines
from .schedule import Schedule
from .text import indented, ranges_text, shape_text, size_text, span_text, table

# Schedules of so many ranks are looked at, fewer where each has many messages, so that any grid is a matter of seconds.
SAMPLE = 64
SAMPLED_MESSAGES = 1_000

MORE = "and {} more; --all-messages lists them"


@dataclass(frozen=True)
class DryRun:
    """Transposes between pencils of one array, to be told about without carrying them out.

    Parameters
    ----------
    pencils : tuple of Pencil
        The layouts, over process grids of one size.
    pairs : tuple of (int, int)
        The transposes, as indices into `pencils`.
    dtype : numpy.dtype
        Of the items.
    fields : int
        How many arrays travel together.
    inplace : bool
        Whether source and destination are one buffer.
    backend : str
        The transport; it decides how messages may lie in memory.
    rank : int, optional
        A rank to be told about in detail.
    most : int
        How many messages of each direction are listed there.
    """

    pencils: tuple[Pencil, ...]
    pairs: tuple[tuple[int, int], ...]
    dtype: np.dtype[Any]
    fields: int = 1
    inplace: bool = False
    backend: str = "auto"
    rank: int | None = None
    most: int = MOST

    @property
    def grid(self) -> ProcessGrid:
        """The process grid of the first pencil."""
        return self.pencils[0].grid

    @property
    def item_bytes(self) -> int:
        """The bytes of one item in all fields."""
        return self.dtype.itemsize * self.fields

    def exchange(self, pair: tuple[int, int], rank: int) -> Exchange:
        """Return what a rank would send and receive in one of the transposes."""
        return Exchange(self.pencils[pair[0]], self.pencils[pair[1]], rank)

    def schedule(self, pair: tuple[int, int], rank: int) -> Schedule:
        """Return what a rank would do for one of the transposes."""
        options: dict[str, Any] = {"fields": self.fields, "inplace": self.inplace, "uniform": self.backend == "mpi_a2a"}
        if self.backend == "direct":  # as if all ranks were on one host
            options["mapped"] = frozenset(range(self.grid.size))
        return Schedule(self.exchange(pair, rank), self.dtype.itemsize, **options)

    def lines(self) -> list[str]:
        """Return the whole report."""
        total = math.prod(self.pencils[0].global_shape) * self.item_bytes
        what = f"{self.fields} fields of {self.dtype}" if self.fields > 1 else str(self.dtype)
        return [
            f"Array of {shape_text(self.pencils[0].global_shape)} {what}, {size_text(total)}, "
            f"on {self.grid.size} ranks in a {shape_text(self.grid.shape)} grid ({self.grid.rank_order} order)",
            "",
            "Pencils: what a rank holds, in axis order, without halo and padding",
            *indented(self._pencil_table()),
            *self._empty_lines(),
            "",
            *self._transpose_lines(),
            *([] if self.rank is None else self._rank_lines(self.rank)),
        ]

    def _pencil_table(self) -> list[str]:
        rows = []
        for pencil in self.pencils:
            smallest, largest = extents(pencil)
            memory = memory_items(pencil, largest) * self.item_bytes
            split = (f"axis {a} in {pencil.parts(a)}" for a in range(pencil.ndim) if a != pencil.axis)
            cells = (str(pencil.axis), ", ".join(split), shape_text(smallest), shape_text(largest))
            rows.append((*cells, str(pencil.order).replace(" ", ""), size_text(memory)))
        return table(
            ("whole axis", "split", "smallest", "largest", "memory order", "largest in memory"), rows, right=(5,)
        )

    def _empty_lines(self) -> Iterator[str]:
        for pencil in self.pencils:
            ranks = empty_ranks(pencil)
            if len(ranks):
                causes = (
                    f"axis {a} has {pencil.global_shape[a]} items for {pencil.parts(a)} parts"
                    for a in range(pencil.ndim)
                    if 0 in widths(pencil, a)
                )
                yield f"  Empty in the pencil of axis {pencil.axis}: {len(ranks)} of {pencil.grid.size} ranks " + (
                    f"({ranges_text(ranks.tolist())}), since {' and '.join(causes)}"
                )

    def _transpose_lines(self) -> list[str]:
        some = self.rank or 0
        messages = max(len(self.exchange(pair, some).sends) for pair in self.pairs)
        ranks = sample(self.grid, some, messages)
        rows = [self._transpose_row(pair, ranks) for pair in self.pairs]
        header = (
            "transpose",
            "writes" if self.backend == "direct" else "messages",
            "bytes each",
            "bytes sent",
            "workspace",
            "done without",
        )
        all_ranks = len(ranks) == self.grid.size
        whom = "all ranks" if all_ranks else f"a sample of {len(ranks)} of the {self.grid.size} ranks"
        how = "messages" if self.backend == "auto" else self.backend
        hint = "  Ranks of one host would write into each other's memory instead: see --backend direct"
        return [
            f"Transposes by {how}: what a rank sends to others, over {whom}",
            *indented(table(header, rows)),
            *([hint] if self.backend == "auto" else []),
        ]

    def _transpose_row(self, pair: tuple[int, int], ranks: Sequence[int]) -> tuple[str, ...]:
        schedules = [self.schedule(pair, rank) for rank in ranks]
        sizes = [[items * self.dtype.itemsize for _, items in schedule.out] for schedule in schedules]
        each = [size for some in sizes for size in some]
        return (
            f"{self.pencils[pair[0]].axis} -> {self.pencils[pair[1]].axis}",
            span_text(str(min(map(len, sizes))), str(max(map(len, sizes)))),
            span_text(size_text(min(each)), size_text(max(each))) if each else "-",
            span_text(size_text(min(map(sum, sizes))), size_text(max(map(sum, sizes)))),
            size_text(max(schedule.workspace_bytes for schedule in schedules)),
            left_out(schedules),
        )

    def _rank_lines(self, rank: int) -> Iterator[str]:
        yield from ("", f"Rank {rank}, at {self.grid.coords(rank)} in the grid")
        for pencil in self.pencils:
            memory = f"memory shape {pencil.memory_shape(rank)}, strides {pencil.strides(rank)} items"
            yield f"  {pencil_text(pencil, rank)}; {memory}"
        for pair in self.pairs:
            yield f"  {self.pencils[pair[0]].axis} -> {self.pencils[pair[1]].axis}"
            lines = schedule_lines(self.schedule(pair, rank), self.dtype.itemsize, self.most, MORE)
            yield from indented(lines, by=4)


def left_out(schedules: Sequence[Schedule]) -> str:
    """Return in a few words which passes the schedules do without; the report of a rank says more."""
    if not any(schedule.sends or schedule.recvs or schedule.puts for schedule in schedules):
        return "messages: one local copy"
    sides = (("pack", [s.sends for s in schedules]), ("unpack", [s.recvs for s in schedules]))
    found = []
    for name, sets in sides:
        direct = [part.segment < 0 for parts in sets for part in parts]
        if any(direct):
            found.append(name if all(direct) else f"{name} of some messages")
    return ", ".join(found) or "nothing"


def widths(pencil: Pencil, axis: int) -> tuple[int, ...]:
    """Return the extents of all parts of an axis."""
    return tuple(stop - start for start, stop in pairwise(pencil.cuts(axis)))


def extents(pencil: Pencil) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the smallest and the largest interior of any rank, by axis: every combination of parts is a rank's."""
    parts = [widths(pencil, axis) for axis in range(pencil.ndim)]
    return tuple(map(min, parts)), tuple(map(max, parts))


def memory_items(pencil: Pencil, shape: Sequence[int]) -> int:
    """Return the items in memory of an interior of `shape`, halo and padding included."""
    around = (sum(halo) + padding for halo, padding in zip(pencil.halo, pencil.padding, strict=True))
    return math.prod(n + more for n, more in zip(shape, around, strict=True))


def empty_ranks(pencil: Pencil) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ranks whose interior is empty, rising."""
    split = [axis for axis in range(pencil.ndim) if axis != pencil.axis]
    empty = np.zeros(pencil.grid.shape, bool)
    for entry, axis in enumerate(split):
        lacking = np.array(widths(pencil, axis)) == 0
        empty |= lacking.reshape([-1 if i == entry else 1 for i in range(len(split))])
    return np.flatnonzero(empty.ravel(order="C" if pencil.grid.rank_order == "row" else "F"))


def sample(grid: ProcessGrid, rank: int, messages: int) -> list[int]:
    """Return the ranks to look at: all of a small grid, else its corners, `rank`, and a fixed random choice."""
    count = min(SAMPLE, max(4, SAMPLED_MESSAGES // (messages + 1)))
    if grid.size <= count:
        return list(range(grid.size))
    corners = {grid.rank(place) for place in product(*({0, parts - 1} for parts in grid.shape))}
    chosen = corners | {rank}
    more = np.random.default_rng(0).choice(grid.size, count, replace=False)
    return sorted([*chosen, *(int(r) for r in more if int(r) not in chosen)][: max(count, len(chosen))])
