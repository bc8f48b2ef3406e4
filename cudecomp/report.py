# SPDX-License-Identifier: Apache-2.0
"""Owns the description of schedules in words; knows nothing of how they are carried out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from .pencil import Pencil
from .schedule import Schedule
from .spec import LAUNCHES, Spec
from .text import size_text

MOST = 16  # messages of each direction that are listed


def pencil_text(pencil: Pencil, rank: int) -> str:
    """Return one line on a rank's part of a pencil."""
    parts = [f"axis {pencil.axis}", f"shape {pencil.shape(rank)} at {pencil.start(rank)}", f"order {pencil.order}"]
    if any(low or high for low, high in pencil.halo):
        parts.append(f"halo {pencil.halo}")
    if any(pencil.padding):
        parts.append(f"padding {pencil.padding}")
    return ", ".join(parts)


def summary(spec: Spec, schedule: Schedule, rank: int, stats: dict[str, int], closed: bool) -> str:
    """Return the repr of a plan."""
    sent = sum(items for _, items in schedule.out) * spec.dtype.itemsize
    lines = [
        f"<{spec.operation}{' (closed)' if closed else ''}: {spec.dtype} on {spec.device}, rank {rank} of "
        f"{spec.src.grid.size} in {spec.src.grid.shape}",
        f"  src: {pencil_text(spec.src, rank)}",
        f"  dst: {pencil_text(spec.dst, rank)}",
        f"  {spec.choice.name}: {len(schedule.sends)} messages, {len(schedule.puts)} writes out ({size_text(sent)}), "
        f"{len(schedule.recvs)} and {len(schedule.sources)} in; "
        f"workspace {size_text(schedule.workspace_bytes)}",
    ]
    lines += [f"  {line}" for line in schedule.rewrites]
    return "\n".join(lines) + f"\n  {', '.join(f'{n} {name}' for name, n in stats.items())}>"


def explain(spec: Spec, schedule: Schedule, rank: int, most: int = MOST) -> str:
    """Return the schedule of a rank in words; at most `most` messages of each direction are listed."""
    itemsize = spec.dtype.itemsize
    lines = [
        f"{spec.operation} of {spec.src.global_shape} {spec.dtype}, rank {rank} of {spec.src.grid.size}",
        f"from {pencil_text(spec.src, rank)}",
        f"to   {pencil_text(spec.dst, rank)}",
        f"transport {spec.choice.name}: {spec.choice.why}",
        *launch_lines(spec),
        *schedule_lines(schedule, itemsize, most),
    ]
    return "\n".join(lines)


def launch_lines(spec: Spec) -> list[str]:
    """Return a line on how a GPU packs; none on the host device."""
    if spec.device == "host":
        return []
    graphs = "captured once per set of arrays and replayed as a CUDA graph" if spec.graphs else "launched directly"
    return [f"launch {spec.launch}: {LAUNCHES[spec.launch]}; {graphs}"]


def schedule_lines(schedule: Schedule, itemsize: int, most: int = MOST, more: str = "and {} more") -> list[str]:
    """Return lines on the messages, the workspace and the rewrites; `more` says how many messages are not listed."""
    lines: list[str] = []

    def listed(texts: Iterable[str], total: int) -> None:
        lines.extend(f"  {text}" for text in islice(texts, most))
        if total > most:
            lines.append(f"  {more.format(total - most)}")

    for verb, parts in (("send to", schedule.sends), ("receive from", schedule.recvs)):
        total = size_text(sum(part.items for part in parts) * itemsize)
        lines.append(f"{len(parts)} message{'' if len(parts) == 1 else 's'} to {verb.split()[0]}, {total}")
        listed((_part_text(part, verb, itemsize) for part in parts), len(parts))
    if schedule.puts:
        total = size_text(sum(put.items for put in schedule.puts) * itemsize)
        lines.append(f"{len(schedule.puts)} mapped peer{'' if len(schedule.puts) == 1 else 's'} to write to, {total}")
        puts = (f"rank {put.peer}: {size_text(put.items * itemsize)}, straight into its array" for put in schedule.puts)
        listed(puts, len(schedule.puts))
    lines.append(f"workspace {size_text(schedule.workspace_bytes)} ({schedule.workspace_bytes} bytes)")
    lines.append("rewrites: " + ("; ".join(schedule.rewrites) or "none: every message is packed and unpacked"))
    return lines


def _part_text(part: Any, verb: str, itemsize: int) -> str:
    sending = verb.startswith("send")
    if part.segment < 0:
        place = "straight from the source array" if sending else "straight into the destination array"
    else:
        place = f"after pack segment {part.segment}" if sending else f"then unpack segment {part.segment}"
    return f"{verb} rank {part.peer}: {size_text(part.items * itemsize)}, {place}"
