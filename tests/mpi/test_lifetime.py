# SPDX-License-Identifier: Apache-2.0
"""Plans side by side and one after the other: shared workspaces, communicators, closing, collection, memory."""

import gc
import tracemalloc
import warnings
import weakref

import numpy as np
import pytest
from exercise import Trial
from mpi4py import MPI

from cudecomp import Pencil, PoisonedError, ProcessGrid, TransposePlan, Workspace

SIZE = MPI.COMM_WORLD.Get_size()
MOVERS = ("mpi_p2p", "mpi_p2p_pl", "mpi_a2a", "direct")
GRID = ProcessGrid((SIZE, 1))


def pencils(shape=(6, 7, 8), **options):
    return Pencil(shape, GRID, 0, **options), Pencil(shape, GRID, 1, **options)


def turned(shape=(6, 7, 8)):
    """Two pencils that need a workspace in place, on one rank as well."""
    return Pencil(shape, GRID, 0), Pencil(shape, GRID, 1, order=(2, 1, 0))


def resident():
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("backend", MOVERS)
def test_a_workspace_that_grows(comm, verdict, backend):
    """Each plan needs more than the one before; the older ones follow the memory to its new place."""
    workspace = Workspace(comm)
    options = {"backend": backend, "workspace": workspace}
    plans, found, sizes = [], [], []
    for n in (3, 6, 12, 5):
        plan = TransposePlan(*pencils((n, n + 1, n + 2)), "f8", comm, inplace=n == 12, **options)
        assert plan.workspace is workspace
        plans.append(plan)
        sizes.append(workspace.nbytes)
        found += [text for stamp, one in enumerate(plans) for text in Trial(one, stamp).run()]
    assert sizes == sorted(sizes)
    assert workspace.nbytes == max(plan.workspace_bytes for plan in plans)
    for plan in plans:
        plan.close()
    verdict(found)


@pytest.mark.parametrize("backend", MOVERS)
def test_two_plans_take_turns_in_a_workspace(comm, verdict, backend):
    workspace, found = Workspace(comm), []
    options = {"backend": backend, "workspace": workspace}
    with (
        TransposePlan(*pencils((6, 7, 8)), "c16", comm, **options) as large,
        TransposePlan(*pencils((3, 2, 4)), "i2", comm, fields=2, **options) as small,
    ):
        for stamp in range(6):
            found += Trial((large, small)[stamp % 2], stamp).run()
        back = small.reverse()
        assert back.workspace is workspace
        found += Trial(back).run()
        back.close()
        verdict(found)


@pytest.mark.parametrize("backend", MOVERS)
def test_a_workspace_in_use_is_refused(comm, verdict, backend):
    """Locally and before anything is sent; the pending operation is not disturbed."""
    options = {"backend": backend, "workspace": Workspace(comm), "inplace": True}
    with (
        TransposePlan(*turned(), "f8", comm, **options) as one,
        TransposePlan(*turned(), "f8", comm, **options) as other,
    ):
        trials = Trial(one, 1), Trial(other, 2)
        call = one.bind(trials[0].src)
        call.start()
        with pytest.raises(RuntimeError, match="in use by a pending operation"):
            other.run(trials[1].src)
        with pytest.raises(RuntimeError, match="in use by a pending operation"):
            other.bind(trials[1].src).start()
        with pytest.raises(RuntimeError, match="cannot grow while an operation is pending"):
            TransposePlan(*turned((40, 41, 42)), "f8", comm, **options)
        call.wait()
        verdict(trials[0].problems() + trials[1].run())


@pytest.mark.parametrize("backend", MOVERS)
def test_closing_one_plan_does_not_free_the_workspace_of_another(comm, verdict, backend):
    options = {"backend": backend, "workspace": Workspace(comm)}
    one = TransposePlan(*pencils(), "f8", comm, **options)
    with TransposePlan(*pencils(), "f8", comm, **options) as other:
        one.close()
        gc.collect()
        verdict(Trial(other).run())


@pytest.mark.parametrize("inplace", [False, True])
def test_workspaces_do_not_reach_beyond_their_ends(comm, verdict, inplace):
    """Two plans on neighbouring slices of one block of memory: the canaries before, between and behind survive."""
    plans = [
        TransposePlan(*pencils((5, 6, 7)), "c16", comm, inplace=inplace, backend="mpi_p2p"),
        TransposePlan(*pencils((7, 3, 5)), "c16", comm, inplace=inplace, backend="mpi_p2p_pl"),
    ]
    sizes = [plan.workspace_bytes for plan in plans]
    block = np.full(sum(sizes) + 3 * 256 + 256, 0xA5, np.uint8)
    start = 256 + -block.ctypes.data % 256
    frame, found = np.ones(block.size, bool), []
    for plan, size in zip(plans, sizes, strict=True):
        plan.workspace._memory["host"] = block[start : start + size]
        _rebind(plan.workspace)
        frame[start : start + size] = False
        start += size + 256
    for stamp in range(4):
        found += Trial(plans[stamp % 2], stamp).run()
    if (block[frame] != 0xA5).any():
        found.append("canaries around the workspaces were overwritten")
    if any(sizes) and (block[~frame] == 0xA5).all():
        found.append("the workspaces were not used")
    for plan in plans:
        plan.close()
    verdict(found)


def _rebind(workspace):
    """What happens to the plans of a workspace whose memory has moved."""
    for tenant in list(workspace._tenants):
        tenant.rebind()


def test_reverse_and_back(comm, verdict):
    src, dst = pencils(order="contiguous", halo=1)
    with TransposePlan(src, dst, "f8", comm, fields=2, check=True, backend="mpi_p2p_pl", timeout=30) as there:
        back = there.reverse()
        assert (back.src, back.dst, back.dtype, back.fields) == (dst, src, there.dtype, 2)
        assert back.backend == "mpi_p2p_pl"
        with back, back.reverse() as again:
            assert (again.src, again.dst) == (src, dst)
            verdict([text for plan in (there, back, again) for text in Trial(plan).run()])


@pytest.mark.parametrize("closing", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_plans_closed_in_any_order(comm, verdict, closing):
    """Plans of different transports: those still open run on, and ranks need not agree on the order."""
    plans = [TransposePlan(*pencils(), "f8", comm, backend=backend) for backend in MOVERS]
    found = []
    for number in closing:
        for stamp, plan in enumerate(plans):
            if not plan.closed:
                found += Trial(plan, stamp).run()
        plans[number].close()
        plans[number].close()
        assert plans[number].closed
    plans = [TransposePlan(*pencils(), "f8", comm, backend=backend) for backend in MOVERS]
    for number in closing if comm.rank % 2 else reversed(closing):
        plans[number].close()
    verdict(found)


def test_halves_with_different_grids_at_once(comm, verdict):
    """The two halves do not do the same, nor equally often, and nothing concerns the ranks outside a half."""
    color = comm.rank % 2
    half = comm.Split(color)
    size = half.Get_size()
    grid = ProcessGrid((size, 1) if color else (1, size))
    found = []
    for stamp in range(3 + 2 * color):
        src, dst = Pencil((6, 5 + color, 7), grid, 0), Pencil((6, 5 + color, 7), grid, 1 + color)
        for backend in MOVERS if color else MOVERS[:2]:
            with TransposePlan(src, dst, "f8", half, backend=backend) as plan:
                assert plan.comm == half
                found += Trial(plan, stamp).run()
    half.Free()
    verdict(found)


def test_ranks_of_a_communicator_in_another_order(comm, verdict):
    reverse = comm.Split(0, -comm.rank)
    found = []
    for backend in MOVERS:
        with TransposePlan(*pencils(), "f8", reverse, backend=backend) as plan:
            assert plan.rank == SIZE - 1 - comm.rank
            found += Trial(plan).run()
    reverse.Free()
    verdict(found)


def test_a_communicator_freed_before_its_plan(comm, verdict):
    """The plan cannot run any more, but can be closed."""
    for backend in MOVERS:
        other = comm.Dup()
        plan = TransposePlan(*pencils(), "f8", other, backend=backend)
        verdict(Trial(plan).run())
        other.Free()
        plan.close()


def test_one_duplicate_per_communicator(comm):
    """MPI libraries have few communicators: hundreds of plans must not take one each."""
    src, dst = pencils((2, 3, 4))
    for number in range(300 // SIZE):
        TransposePlan(src, dst, "i1", comm, backend=MOVERS[number % len(MOVERS)]).close()


def test_communicators_come_and_go(comm):
    src, dst = pencils((2, 3, 4))
    for _ in range(60 // SIZE):
        other = comm.Dup()
        TransposePlan(src, dst, "i1", other, backend="mpi_a2a").close()
        other.Free()


@pytest.mark.parametrize("backend", MOVERS)
def test_memory_stays_flat_over_many_runs(comm, verdict, backend):
    runs, found = 1200 // SIZE, []
    with TransposePlan(*pencils(), "f8", comm, backend=backend) as plan, plan.reverse() as back:
        trial = Trial(plan)
        calls = plan.bind(trial.src, trial.dst), back.bind(trial.dst, trial.src)
        for _ in range(50):
            for call in calls:
                call.run()
            plan.run(trial.src, trial.dst)
        tracemalloc.start()
        gc.collect()  # empties the interpreter's lists of free objects as well
        before, pages = tracemalloc.get_traced_memory()[0], resident()
        for _ in range(runs // 4):
            for call in calls:
                call.run()
            plan.run(trial.src, trial.dst)
            back.run(trial.dst, trial.src)
        gc.collect()
        grown, more = tracemalloc.get_traced_memory()[0] - before, resident() - pages
        tracemalloc.stop()
        if grown > 20_000:
            found.append(f"{grown} bytes of Python objects more after {runs} runs")
        if more > 4 << 20:
            found.append(f"{more} bytes resident more after {runs} runs")
        found += trial.run()
    verdict(found)


HUNDRED_THOUSAND = pytest.param(
    100_000,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(SIZE > 2, reason="for 1 and 2 ranks: ranks that share a core wait for each other's slices"),
        pytest.mark.timeout(600, method="thread"),
    ],
)


@pytest.mark.parametrize("runs", [8000 // SIZE, HUNDRED_THOUSAND])
def test_many_runs_of_all_transports_by_turns(comm, verdict, runs):
    """Neither do tags run out, nor does memory grow."""
    src, dst = pencils((4, 5, 6))
    plans = [TransposePlan(src, dst, "f8", comm, backend=backend) for backend in MOVERS]
    trials = [Trial(plan) for plan in plans]
    calls = [trial.plan.bind(trial.src, trial.dst) for trial in trials]
    for call in calls * 100:
        call.run()
    before = resident()
    for _ in range(runs // len(MOVERS)):
        for call in calls:
            call.run()
    grown = resident() - before
    found = [f"{grown} bytes more"] if grown > 8 << 20 else []
    verdict(found + [text for trial in trials for text in trial.problems()])
    for plan in plans:
        plan.close()


def test_arrays_outlive_the_plan(comm):
    with TransposePlan(*pencils(), "f8", comm) as plan:
        a, b = plan.empty_src(), plan.empty_dst()
    a[...] = b[...] = 1
    assert a.sum() + b.sum() == a.size + b.size


def test_a_plan_lets_go_of_the_arrays_of_a_run(comm):
    """Nothing but a bound call keeps them alive."""
    with TransposePlan(*pencils(), "f8", comm) as plan:
        src, dst = plan.empty_src(), plan.empty_dst()
        plan.run(src, dst)
        gone = weakref.ref(dst)
        del src, dst
        gc.collect()
        assert gone() is None


def test_a_call_keeps_its_arrays(comm):
    with TransposePlan(*pencils(), "f8", comm) as plan:
        src, dst = plan.empty_src(), plan.empty_dst()
        kept = weakref.ref(dst)
        call = plan.bind(src, dst)
        del src, dst
        gc.collect()
        assert kept() is not None
        call.run()
        del call
        plan.run(plan.empty_src(), plan.empty_dst())
        gc.collect()
        assert kept() is None


def test_a_forgotten_plan_warns(comm):
    plan = TransposePlan(*pencils(), "f8", comm)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del plan


def test_a_closed_plan_does_not_warn(comm):
    plan = TransposePlan(*pencils(), "f8", comm)
    plan.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del plan
        gc.collect()


def test_a_failed_plan_does_not_warn(comm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError):
            TransposePlan(*pencils(), object, comm)
        gc.collect()


def test_a_block_left_by_an_exception_poisons(comm):
    with pytest.raises(KeyError), TransposePlan(*pencils(), "f8", comm) as plan:
        raise KeyError("the user's own")
    assert plan.closed
    with pytest.raises(RuntimeError):
        plan.run(np.zeros(1), np.zeros(1))


def test_a_closed_plan_refuses(comm):
    plan = TransposePlan(*pencils(), "f8", comm)
    trial = Trial(plan)
    call = plan.capture(trial.src, trial.dst)
    plan.close()
    actions = [call.run, call.replay, call.start, plan.replay, plan.empty_src, plan.check, plan.reverse]
    for action in [*actions, lambda: plan.run(trial.src, trial.dst), lambda: plan.bind(trial.src, trial.dst)]:
        with pytest.raises(RuntimeError, match="closed") as caught:
            action()
        assert not isinstance(caught.value, PoisonedError)
