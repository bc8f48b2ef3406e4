# SPDX-License-Identifier: Apache-2.0
"""Owns plain text: tables, lists of ranks, shapes, sizes, durations; knows nothing of what is said in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; the columns in `right` are aligned to the right, the others to the left."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        places = enumerate(zip(row, widths, strict=True))
        return "  ".join(text.rjust(width) if i in right else text.ljust(width) for i, (text, width) in places).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])]


def indented(lines: Iterable[str], by: int = 2) -> list[str]:
    """Return the lines moved to the right."""
    return [" " * by + line if line else line for line in lines]


def shape_text(shape: Sequence[int]) -> str:
    """Return extents as "64 x 64 x 32"."""
    return " x ".join(map(str, shape))


def span_text(low: str, high: str) -> str:
    """Return "low to high", or one of them where they are the same."""
    return low if low == high else f"{low} to {high}"


def ranges_text(numbers: Iterable[int], most: int = 8) -> str:
    """Return rising numbers as "0-3, 7, 12-15", shortened beyond `most` ranges."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 0, 1, 2", shortened beyond `most`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:most]))
    return f"ranks {shown}" + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def size_text(nbytes: float) -> str:
    """Return a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def time_text(seconds: float) -> str:
    """Return a duration in s, ms or us, with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
