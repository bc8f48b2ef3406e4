# SPDX-License-Identifier: Apache-2.0
"""Owns halo updates as tests try them out, on any device: cases, each way to run, what is wrong afterwards.

What an update should give is played for all ranks by the reference. Problems are returned as texts, so that ranks can
put them together before anything is asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from exercise import same_bytes

from cudecomp import HaloPlan, Pencil, ProcessGrid
from cudecomp import testing as reference
from cudecomp.halo import halo_exchange

# Shape, halo, periods, axes, dtype, fields: deeper than a neighbour's part, one-sided, walls, odd items.
CASES = [
    ((8, 6, 5), 1, (True, True, True), None, "f8", 1),
    ((9, 8, 7), ((2, 1), (0, 2), 1), (True, False, True), None, "f4", 1),
    ((7, 9, 4), 2, (False, False, False), (0, 2), "c16", 1),
    ((6, 7, 8), 3, (True, False, False), None, "i2", 3),
    ((3, 2, 5), 1, (True, True, False), None, "V12", 1),
    ((6, 6, 6), 7, (True, True, True), (1, 2), "i1", 1),
]
ORDERS = list(itertools.permutations(range(3)))


def outcome(
    pencil: Pencil, periods: Sequence[bool], axes: Sequence[int] | None, dtype: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The memory of all ranks before and after an update."""
    ranks = range(pencil.grid.size)
    before = [reference.fill(pencil, rank, dtype) for rank in ranks]
    after = [array.copy() for array in before]
    axes = tuple(range(pencil.ndim)) if axes is None else axes
    reference.run([halo_exchange(pencil, rank, periods, axes) for rank in ranks], after, after)
    return before, after


def cases(grids: Sequence[Sequence[int]]) -> Iterator[tuple[Pencil, dict[str, Any], str]]:
    """Yield (pencil, options of HaloPlan, dtype) for CASES on the grids, with changing memory orders, and padding."""
    for (shape, halo, periods, axes, dtype, fields), grid, axis in itertools.product(CASES, grids, range(3)):
        order = ORDERS[(axis + fields) % 6]
        pencil = Pencil(shape, ProcessGrid(tuple(grid)), axis, halo=halo, order=order, padding=(0, 1, 2))
        yield pencil, {"periods": periods, "axes": axes, "fields": fields}, dtype


def put(array: Any, values: np.ndarray) -> None:
    """Write host values, the same for all fields, into an array on any device."""
    values = np.broadcast_to(values, array.shape)
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(np.ascontiguousarray(values))


def split(call: Any) -> None:
    """Start a call, let it advance, wait for it."""
    call.start()
    call.test()
    call.wait()


def polled(call: Any) -> None:
    """Start a call and ask until it is complete."""
    call.start()
    while not call.test():
        pass


# Ways to update an array that was not seen before; a capture comes before anything else has run.
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda plan, array: plan.run(array),
    "call": lambda plan, array: plan.bind(array).run(),
    "split": lambda plan, array: split(plan.bind(array)),
    "polled": lambda plan, array: polled(plan.bind(array)),
    "replay": lambda plan, array: plan.capture(array).replay(),
    "latest": lambda plan, array: (plan.capture(array), plan.replay()),
}


def problems(
    pencil: Pencil, dtype: Any, comm: Any, options: dict[str, Any], ways: Sequence[str] = tuple(WAYS)
) -> list[str]:
    """Build a HaloPlan and update an array in each of the ways; return what was wrong. Collective."""
    before, after = outcome(pencil, options["periods"], options["axes"], dtype)
    found = []
    with HaloPlan(pencil, dtype, comm, **options) as plan:
        array = plan.empty_src()
        for way in ways:
            put(array, before[plan.rank])
            WAYS[way](plan, array)
            if not same_bytes(np.asarray(array), np.broadcast_to(after[plan.rank], array.shape)):
                found.append(f"{way}: {pencil}, {dtype}, {options}")
    return found


def repeated(pencil: Pencil, comm: Any, rounds: int, captured: bool, **options: Any) -> list[str]:
    """Update arrays whose values change from run to run, by one call; return what was wrong. Collective."""
    before, after = outcome(pencil, options["periods"], options.get("axes"), "i8")
    found = []
    with HaloPlan(pencil, "i8", comm, **options) as plan:
        array = plan.empty_src()
        put(array, before[plan.rank])
        call = plan.capture(array) if captured else plan.bind(array)
        for stamp in range(rounds):
            put(array, before[plan.rank] + stamp)
            (call.replay if captured else call.run)()
            if not same_bytes(np.asarray(array), np.broadcast_to(after[plan.rank] + stamp, array.shape)):
                found.append(f"run {stamp}: {pencil}, {options}")
        if captured and (plan.stats["captures"], plan.stats["replays"]) != (1, rounds):
            found.append(f"captures not in effect: {plan.stats}")
    return found
