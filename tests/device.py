# SPDX-License-Identifier: Apache-2.0
"""Arrays in device memory for tests, filled and checked as the reference says; tests are skipped without CuPy."""

import numpy as np
import pytest

from cudecomp import ProcessGrid
from cudecomp import testing as reference

cupy = pytest.importorskip("cupy")

GRIDS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4)], 8: [(2, 4), (8, 1)]}
SPIN = cupy.RawKernel(
    'extern "C" __global__ void spin(long long ticks) { long long t = clock64(); while (clock64() - t < ticks) {} }',
    "spin",
)


def grids(comm):
    """Two process grids of a communicator's size, in both rank orders."""
    shapes = GRIDS.get(comm.size, [(1, comm.size)])
    return [ProcessGrid(shape, rank_order=order) for shape, order in zip(shapes, ("row", "column"), strict=False)]


def spin(stream, microseconds):
    """Keep a stream busy."""
    with stream:
        SPIN((1,), (1,), (np.int64(microseconds * 1_900),))


def filled(plan, empty=None):
    """Source and poisoned destination of a plan, as CuPy arrays; `empty` makes the destination (`plan.empty_dst`)."""
    src = cupy.asarray(reference.fill(plan.src, plan.rank, plan.dtype))
    poison = cupy.asarray(reference.poisoned(plan.dst, plan.rank, plan.dtype))
    if empty is None:
        return src, poison
    dst = cupy.asarray(empty())
    dst[...] = poison
    return src, dst


def problems_of(plan, rounds=2, graphs=False, empty=None):
    """Run there with a destination filled anew, and say what is wrong with the result."""
    src, dst = filled(plan, empty)
    poison = dst.copy()
    call = plan.capture(src, dst) if graphs else None
    for _ in range(rounds):
        dst[...] = poison
        if call:
            call.replay()
        else:
            plan.run(src, dst)
    wrong = reference.mismatch(plan.dst, plan.rank, cupy.asnumpy(dst))
    return [f"{plan.backend}, {plan.launch}, graphs={graphs}: {wrong}"] if wrong else []


def inplace_problems_of(plan, graphs=False):
    """The same for a plan in place, with all its fields."""
    x, y, rank, fields = plan.src, plan.dst, plan.rank, plan.fields
    buffer = cupy.asarray(plan.empty_src()).reshape(fields, -1)
    buffer[...] = -99
    for field in range(fields):
        buffer[field, : x.size(rank)] = cupy.asarray(reference.fill(x, rank, plan.dtype).ravel() + field)
    whole = buffer if fields > 1 else buffer[0]
    if graphs:
        plan.capture(whole).replay()
    else:
        plan.run(whole)
    values = np.arange(np.prod(x.global_shape)).reshape(x.global_shape)[y.slices(rank)]
    got = [cupy.asnumpy(y.interior(buffer[field], rank)) for field in range(fields)]
    return [
        f"field {field} of {fields}, {plan.launch}, graphs={graphs}"
        for field in range(fields)
        if not np.array_equal(got[field], values + field)
    ]
