# SPDX-License-Identifier: Apache-2.0
"""Owns one rank's part of trying a plan out: arrays with canaries, each way to run, what is wrong afterwards.

It takes plans as they are and knows nothing of schedules or transports. Problems are returned as texts, so that ranks
can put them together before anything is asserted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudecomp import testing as reference

STAMP = 1 << 20  # between the values of one field or run and the next; small enough for int64 arithmetic

PACKED_12 = np.dtype([("a", "<i4"), ("b", "<f8")])
DTYPES = {
    "int8": np.dtype("i1"),
    "int16": np.dtype("i2"),
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
    "complex128": np.dtype("c16"),
    "3-byte": np.dtype("V3"),
    "12-byte": PACKED_12,
    "24-byte": np.dtype([("position", "<f8", 3)]),
}


def filled(pencil: Any, rank: int, dtype: Any, stamp: int = 0) -> np.ndarray:
    """As `reference.fill`, with interior values that are larger by a multiple of STAMP, folded for narrow types."""
    values = reference.fill(pencil, rank, np.int64)
    return reference.items(np.where(values < 0, values, values + stamp * (STAMP + 1)), dtype)


def interior(pencil: Any, rank: int) -> np.ndarray:
    """Which cells of the memory of `rank` are interior (bool, memory order)."""
    return reference.fill(pencil, rank, np.int64) >= 0


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


class Trial:
    """The arrays of a plan for one run, filled and poisoned, and what they should hold afterwards.

    Parameters
    ----------
    plan : TransposePlan
        Whose arrays.
    stamp : int
        Tells runs apart.
    form : {"array", "sequence", "flat"}
        Several fields as one array with a leading axis, or as a sequence of arrays; flat arrays are longer than needed.
    """

    def __init__(self, plan: Any, stamp: int = 0, form: str = "array"):
        self.plan = plan
        self.form = form
        stamps = [stamp * 16 + field for field in range(plan.fields)]
        rank, dtype = plan.rank, plan.dtype
        self.sources = [filled(plan.src, rank, dtype, one) for one in stamps]
        wanted = [filled(plan.dst, rank, dtype, one) for one in stamps]
        if plan.inplace:
            self.buffers = [_over(max(plan.src.size(rank), plan.dst.size(rank)), one) for one in self.sources]
            self.expected = [self._inplace(buffer, one) for buffer, one in zip(self.buffers, wanted, strict=True)]
        else:
            self.buffers = [reference.poisoned(plan.dst, rank, dtype) for _ in stamps]
            self.expected = wanted
        self.src = self._formed(self.buffers if plan.inplace else self.sources)
        self.dst = None if plan.inplace else self._formed(self.buffers)

    def _inplace(self, buffer: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The buffer with the interior of the destination in place and all else as before."""
        expected, inside = buffer.copy(), interior(self.plan.dst, self.plan.rank)
        expected[: wanted.size][inside.reshape(-1)] = wanted[inside]
        return expected

    def _formed(self, arrays: list[np.ndarray]) -> Any:
        if self.form == "flat":
            arrays = [_over(array.size + 5, array) for array in arrays]
        if self.form == "sequence":
            return [array.copy() for array in arrays]
        return arrays[0].copy() if len(arrays) == 1 else np.stack(arrays)

    def problems(self) -> list[str]:
        """What is wrong with the arrays after a run: texts, none if all is well."""
        plan, got = self.plan, self._fields(self.src if self.plan.inplace else self.dst)
        found = []
        for field, (array, expected) in enumerate(zip(got, self.expected, strict=True)):
            if not plan.inplace:
                wrong = reference.mismatch(plan.dst, plan.rank, array, expected)
            else:
                wrong = None if same_bytes(array[: expected.size], expected) else f"{array!r}, expected {expected!r}"
            found += [f"field {field}: {wrong}"] if wrong else []
        if not plan.inplace:
            for field, (array, before) in enumerate(zip(self._fields(self.src), self.sources, strict=True)):
                if not same_bytes(array.reshape(-1)[: before.size], before):
                    found.append(f"field {field}: rank {plan.rank}: the source was changed")
        for array in self._fields(self.src) + ([] if plan.inplace else self._fields(self.dst)):
            if self.form == "flat" and (array[-5:].view(np.uint8) != FRAME).any():
                found.append(f"rank {plan.rank}: cells beyond the end were changed")
        return found

    def _fields(self, formed: Any) -> list[np.ndarray]:
        return [formed] if self.plan.fields == 1 and not isinstance(formed, list) else list(formed)

    def run(self, how: str = "run") -> list[str]:
        """Carry the plan out in one of the ways of WAYS and return the problems."""
        WAYS[how](self.plan, self.src, self.dst)
        return self.problems()


FRAME = 0xA5


def _over(items: int, array: np.ndarray) -> np.ndarray:
    """A flat array of `items` items that begins with those of `array`, and ends with bytes FRAME."""
    frame = np.full(items * array.dtype.itemsize, FRAME, np.uint8).view(array.dtype)
    frame[: array.size] = array.reshape(-1)
    return frame


def _split(plan: Any, src: Any, dst: Any) -> None:
    call = plan.bind(src, dst)
    call.start()
    call.test()
    call.wait()


def _poll(plan: Any, src: Any, dst: Any) -> None:
    call = plan.bind(src, dst)
    call.start()
    while not call.test():
        pass


WAYS = {
    "run": lambda plan, src, dst: plan.run(src, dst),
    "call": lambda plan, src, dst: plan.bind(src, dst).run(),
    "replay": lambda plan, src, dst: plan.capture(src, dst).replay(),
    "latest": lambda plan, src, dst: (plan.capture(src, dst), plan.replay()),
    "split": _split,
    "poll": _poll,
}


def complaints(check: Callable[[], list[str] | None]) -> list[str]:
    """What is wrong by `check`, exceptions included: for steps of one rank, after which it meets the others again."""
    try:
        return check() or []
    except (Exception, pytest.fail.Exception):
        return [traceback.format_exc()]
