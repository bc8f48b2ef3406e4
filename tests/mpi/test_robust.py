# SPDX-License-Identifier: Apache-2.0
"""What programs do to plans in the long run: exceptions on one rank, slow ranks, made-up hosts, many plans and runs."""

import contextlib
import itertools
import os
import time

import numpy as np
import pytest
from exercise import Trial, complaints
from mpi4py import MPI

from cudecomp import HaloPlan, Pencil, PoisonedError, ProcessGrid, TransposePlan, Workspace

SIZE = MPI.COMM_WORLD.Get_size()
LAST = SIZE - 1
MOVERS = ("mpi_p2p", "mpi_p2p_pl", "mpi_a2a", "direct")
GRID = ProcessGrid((SIZE, 1))
several = pytest.mark.skipif(SIZE == 1, reason="needs a peer")


def pencils(shape=(6, 7, 8), **options):
    return Pencil(shape, GRID, 0, **options), Pencil(shape, GRID, 1, **options)


def resident():
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- exceptions on one rank -------------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("backend", MOVERS)
def test_one_rank_leaves_the_block_of_a_plan(comm, verdict, backend):
    """An exception of the program's own, between two runs: the others do not hang, and are told what they wait for."""

    def runs(plan):
        found = []
        with plan:
            for stamp in range(6):
                if comm.rank == LAST and stamp == 3:
                    raise KeyError("the user's own")
                found += Trial(plan, stamp).run()
        return [*found, "all runs were completed"]

    def left():
        plan = TransposePlan(*pencils(), "f8", comm, backend=backend, timeout=1)
        kinds = KeyError if comm.rank == LAST else (TimeoutError, PoisonedError)
        with pytest.raises(kinds) as caught:
            runs(plan)
        text = str(caught.value)
        return [] if plan.closed and (comm.rank == LAST or names_a_peer(text, backend)) else [text]

    verdict(complaints(left))
    found = []
    for mover in MOVERS:
        with TransposePlan(*pencils(), "f8", comm, backend=mover) as other:
            found += Trial(other).run()
    verdict(found)


def names_a_peer(text, backend):
    """Whether an error names the plan and who is missing.

    A collective waits for all ranks at once; mapped ranks hear of each other that they have failed.
    """
    if not text.startswith(f"TransposePlan({backend}, rank "):
        return False
    if backend == "direct":
        return text.endswith(" has failed, or has closed the plan")
    return f"waited for rank {LAST}" in text if backend != "mpi_a2a" or SIZE == 2 else "waited for ranks " in text


@several
@pytest.mark.parametrize("backend", MOVERS)
def test_a_mistake_in_the_middle_of_a_sequence(comm, verdict, backend):
    """Two plans take turns in one workspace; one rank's arrays are wrong now and then, and it tries again."""
    options = {"backend": backend, "workspace": Workspace(comm), "timeout": 20}
    found = []
    with (
        TransposePlan(*pencils(), "f8", comm, inplace=True, **options) as one,
        TransposePlan(*pencils((3, 8, 4)), "c16", comm, fields=2, **options) as other,
    ):
        for stamp in range(8):
            plan = (one, other)[stamp % 2]
            trial = Trial(plan, stamp)
            if comm.rank == stamp % SIZE:
                for method, wrong in ((plan.run, np.zeros(1)), (plan.bind, "text")):
                    with contextlib.suppress(TypeError, ValueError):
                        method(wrong)
                        found.append("a mistake was not noticed")
            found += trial.run("split" if stamp % 3 else "run")
    verdict(found)


# --- slow ranks and timeouts ------------------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("backend", MOVERS)
def test_ranks_that_are_slow_by_turns(comm, verdict, backend):
    """Whoever is late, before a run or between start and wait, the data are right and nobody times out."""
    rng = np.random.default_rng([SIZE, MOVERS.index(backend)])
    found = []
    with TransposePlan(*pencils(), "f8", comm, backend=backend, timeout=20) as plan:
        for stamp in range(8):
            slow, delays = rng.integers(SIZE), 0.03 * rng.random(2)
            mine = delays if comm.rank == slow else (0, 0)
            trial = Trial(plan, stamp)
            call = plan.bind(trial.src, trial.dst)
            time.sleep(mine[0])
            call.start()
            time.sleep(mine[1])
            call.wait()
            found += trial.problems()
    verdict(found)


@pytest.mark.skipif(SIZE not in (3, 4), reason="for 3 and 4 ranks: a rank that comes after another one")
@pytest.mark.parametrize("backend", ["mpi_p2p", "direct"])
def test_a_timeout_counts_from_the_last_progress(comm, verdict, backend):
    """Ranks come one after the other, each within the timeout of the one before, the last one long after it."""
    with TransposePlan(*pencils(), "f8", comm, backend=backend, timeout=0.9) as plan:
        trial = Trial(plan)
        comm.Barrier()
        time.sleep(0.5 * comm.rank)
        verdict(complaints(trial.run))


@pytest.mark.skipif(SIZE < 3, reason="needs a rank that is no neighbour of the last")
@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_p2p_pl", "direct"])
def test_a_halo_update_waits_for_its_neighbours_alone(comm, verdict, backend):
    """The last rank does not take part: its neighbour says so, by plan, operation and rank; all others complete."""
    pencil = Pencil((3 * SIZE, 4, 5), GRID, 1, halo=(1, 0, 0))
    plan = HaloPlan(pencil, "f8", comm, periods=False, backend=backend, timeout=0.5)

    def update():
        array = plan.empty_src()
        array[...] = comm.rank
        comm.Barrier()
        if comm.rank == LAST:
            return []
        if comm.rank == LAST - 1:
            with pytest.raises(TimeoutError) as caught:
                plan.run(array)
            text = f"HaloPlan({backend}, rank {LAST - 1} of {SIZE}): nothing happened for 0.5 s while it waited for "
            return [] if str(caught.value) == f"{text}rank {LAST}" else [str(caught.value)]
        plan.run(array)
        low, high = max(comm.rank - 1, 0), comm.rank + 1
        wrong = (array[1:-1] != comm.rank).any() or (array[0] != low).any() or (array[-1] != high).any()
        return ["the halo is wrong"] if wrong else []

    verdict(complaints(update))
    plan.close()
    with HaloPlan(pencil, "f8", comm, periods=True, backend=backend) as other:
        other.run(other.empty_src())


# --- many plans, many runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_hosts_made_up(comm, verdict, inplace):
    """Built, run, closed, and built again, with all hosts of two and of four ranks, dealt out in turn, and uneven."""
    shape = (6, 9, 8)
    grid = ProcessGrid.choose(SIZE, shape)
    hosts = [[rank // 2 for rank in range(SIZE)], [rank // 4 for rank in range(SIZE)]]
    hosts += [[rank % 2 for rank in range(SIZE)], [min(rank, 1) for rank in range(SIZE)], list(range(SIZE))]
    found = []
    for nodes, _, a, b in itertools.product(hosts, range(2), (0, 1, 2), (0, 1, 2)):
        if a != b:
            options = {"backend": "direct", "nodes": nodes, "inplace": inplace, "timeout": 20}
            with TransposePlan(Pencil(shape, grid, a), Pencil(shape, grid, b), "f8", comm, **options) as plan:
                found += [f"{nodes}: {text}" for text in Trial(plan).run()]
    verdict(found)


@pytest.mark.parametrize("pair", [("direct", "direct"), ("mpi_p2p", "mpi_p2p"), ("mpi_a2a", "mpi_p2p_pl")], ids=str)
def test_replays_of_a_small_and_a_large_plan_by_turns(comm, verdict, pair):
    """New values before each replay, and no message of one plan reaches the other."""
    small = TransposePlan(*pencils((3, 4, 5)), "f8", comm, backend=pair[0], timeout=20)
    large = TransposePlan(*pencils((24, 25, 26)), "f8", comm, backend=pair[1], timeout=20)
    found = []
    with small, large:
        trials = [Trial(small, 1), Trial(large, 2)]
        calls = [trial.plan.capture(trial.src, trial.dst) for trial in trials]
        for step in range(1, 1000 // SIZE):
            for trial, call in zip(trials, calls, strict=True):
                trial.src += 1
                call.replay()
                if not np.array_equal(trial.dst, trial.expected[0] + step):
                    found.append(f"{trial.plan.backend}, replay {step}")
        assert small.stats["replays"] == large.stats["replays"] == step
    verdict(found[:5])


@pytest.mark.parametrize("backend", MOVERS)
def test_plans_come_and_go(comm, verdict, backend):
    """Neither memory, nor mappings, nor file descriptors grow with the plans that were built, run and closed."""
    source, target = pencils((40, 40, 41))

    def cycle():
        with TransposePlan(source, target, "c16", comm, backend=backend, inplace=True) as plan:
            plan.run(plan.empty_src())
        with HaloPlan(wide, "c16", comm, periods=True, backend=backend) as plan:
            plan.run(plan.empty_src())

    def held():
        with open("/proc/self/maps") as file:
            return resident(), sum(1 for _ in file), len(os.listdir("/proc/self/fd"))

    wide, cycles = Pencil((8, 40, 41), GRID, 1, halo=1), 10 + 90 // SIZE
    for _ in range(20):
        cycle()
    before = held()
    for _ in range(cycles):
        cycle()
    grown = [after - early for after, early in zip(held(), before, strict=True)]
    limits = {"bytes resident": 2 << 20, "mappings": 20, "descriptors": 2}
    verdict(
        [
            f"{more} {what} more after {cycles} plans"
            for (what, most), more in zip(limits.items(), grown, strict=True)
            if more > most
        ]
    )
