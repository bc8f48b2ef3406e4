# SPDX-License-Identifier: Apache-2.0
"""Plans of one process in the long run: memory stays flat over many runs, many plans and many failures."""

import contextlib
import gc
import os

import numpy as np
import pytest
from exercise import Trial

from cudecomp import HaloPlan, Pencil, ProcessGrid, TransposePlan, Workspace

ONE = ProcessGrid((1, 1))
X = Pencil((12, 13, 14), ONE, 0)
Y = X.pencil(1, order=(2, 1, 0))
MOST = 1 << 20  # bytes


def resident():
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(action, warmup, count):
    """The bytes that this process holds more after `count` calls than after the first `warmup`."""
    for _ in range(warmup):
        action()
    gc.collect()
    before = resident()
    for _ in range(count):
        action()
    gc.collect()
    return resident() - before


@pytest.mark.parametrize("inplace", [False, True])
def test_a_hundred_thousand_runs(inplace):
    with TransposePlan(X, Y, "f8", inplace=inplace) as plan:
        trial = Trial(plan)
        call = plan.capture(trial.src, trial.dst)
        assert grown(call.replay, 100, 50_000) < MOST
        assert grown(lambda: plan.run(trial.src, trial.dst), 100, 50_000) < MOST
        assert plan.stats["runs"] == 100_200


def test_plans_come_and_go():
    workspace, wide = Workspace(), Pencil((12, 13, 14), ONE, 0, halo=2)

    def cycle():
        options = {"workspace": workspace, "inplace": True}
        with TransposePlan(X, Y, "c16", **options) as plan, HaloPlan(wide, "c16", periods=True) as halo:
            plan.bind(plan.empty_src()).run()
            halo.run(halo.empty_src())
            plan.reverse().close()

    assert grown(cycle, 50, 500) < MOST


def test_failures_leave_nothing_behind():
    """Plans that cannot be built, runs with wrong arrays, and blocks left by an exception."""
    huge = Pencil((1 << 20, 1 << 20, 1 << 10), ONE, 0)

    def fail():
        with contextlib.suppress(MemoryError):
            TransposePlan(huge, huge.pencil(1, order=(2, 1, 0)), "c16", inplace=True)
        with contextlib.suppress(TypeError):
            TransposePlan(X, Y, object)
        with contextlib.suppress(KeyError), TransposePlan(X, Y, "f8") as plan:
            source = plan.empty_src()
            with contextlib.suppress(ValueError):
                plan.run(source, np.empty(3))
            plan.bind(source, plan.empty_dst()).start()
            raise KeyError("the user's own")

    assert grown(fail, 50, 500) < MOST
