# SPDX-License-Identifier: Apache-2.0
"""What is particular to the direct transport: memory that several processes hold, and who learns what of whom."""

import errno
import gc
import os
import threading

import pytest
from exercise import Trial, complaints
from mpi4py import MPI

from cudecomp import Pencil, PoisonedError, ProcessGrid, TransposePlan, Workspace
from cudecomp import testing as reference

SIZE = MPI.COMM_WORLD.Get_size()
GRID = ProcessGrid((SIZE, 1))
several = pytest.mark.skipif(SIZE == 1, reason="needs a peer")


def build(comm, shape=(6, 7, 8), **options):
    return TransposePlan(Pencil(shape, GRID, 0), Pencil(shape, GRID, 1), "f8", comm, backend="direct", **options)


def in_use(word):
    """How many mappings of this process, or names in /dev/shm, belong to segments."""
    if word == "names":
        return sum(name.startswith(f"cudecomp-{os.getpid()}-") for name in os.listdir("/dev/shm"))
    with open("/proc/self/maps") as file:
        return sum("/dev/shm/cudecomp-" in line for line in file)


@several
def test_a_workspace_does_not_grow_under_a_pending_operation(comm, alike, verdict):
    """Peers, and the copy out of the landing, have its address. One rank is enough to refuse it on all."""
    workspace = Workspace(comm)
    with build(comm, workspace=workspace) as plan:
        trial = Trial(plan)
        call = plan.bind(trial.src, trial.dst)
        if comm.rank == 0:
            call.start()
        alike(RuntimeError, ["cannot grow"], lambda: build(comm, (60, 70, 80), workspace=workspace))
        if comm.rank:
            call.start()
        call.wait()
        verdict(trial.problems())


@several
def test_a_plan_that_a_peer_has_given_up(comm, verdict):
    """Its peers' memory stays mapped here, whatever they register since: an exception, not a KeyError or a crash."""
    plan = build(comm, timeout=0.3)
    found = Trial(plan).run()
    if comm.rank == 0:
        plan.close()
        del plan
        gc.collect()
    with build(comm) as other:
        if comm.rank:
            trial = Trial(plan)

            def run_and_leave():
                with pytest.raises((TimeoutError, PoisonedError), match="rank"):
                    plan.run(trial.src, trial.dst)
                with pytest.raises(ZeroDivisionError), plan:
                    raise ZeroDivisionError

            found += complaints(run_and_leave)
        verdict(found)
        verdict(Trial(other).run())


@several
@pytest.mark.parametrize("backend", ["direct", "mpi_p2p"])
def test_threads_between_start_and_wait(comm, verdict, backend):
    """A thread that waits helps the others' operations; their own thread may be in the middle of them."""
    if backend != "direct" and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI without threads")
    groups, found = [comm.Dup() for _ in range(2)], []

    def work(number):
        shape = (64, 64 + number, 64)
        src, dst = Pencil(shape, GRID, 0), Pencil(shape, GRID, 1)
        with TransposePlan(src, dst, "f8", groups[number], backend=backend, timeout=20) as plan:
            trial = Trial(plan)
            call = plan.bind(trial.src, trial.dst)
            for _ in range(60):
                call.start()
                call.wait()
            return trial.problems()

    threads = [threading.Thread(target=lambda n=n: found.extend(complaints(lambda: work(n)))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verdict(found)
    for group in groups:
        group.Free()


def test_file_descriptors(comm, verdict):
    """Mappings keep none open: ranks map all memory of all others, and many systems allow 1024."""
    before = len(os.listdir("/proc/self/fd"))
    plans = [build(comm) for _ in range(20)]
    more = len(os.listdir("/proc/self/fd")) - before
    for plan in plans:
        plan.close()
    verdict([f"{more} descriptors for 20 plans"] if more > 5 else [])


@several
def test_too_little_shared_memory_on_one_rank(comm, alike, verdict, monkeypatch):
    build(comm).close()
    gc.collect()
    build(comm).close()
    mappings = in_use("mappings")
    real = os.posix_fallocate

    def full(file, offset, nbytes):
        if nbytes > 1 << 20 and comm.rank == SIZE - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    alike(OSError, ["shared memory of"], lambda: build(comm, (128, 128, 64)))
    monkeypatch.undo()
    gc.collect()
    found = [f"{in_use('names')} names are left"] if in_use("names") else []
    if in_use("mappings") > mappings:
        found.append(f"{in_use('mappings')} mappings, {mappings} before")
    with build(comm) as plan:
        verdict(found + Trial(plan).run())


@several
def test_more_shared_memory_than_numbers(comm, alike, verdict):
    """Nothing is left in /dev/shm, whatever the error."""
    huge = Pencil((1 << 40, SIZE << 19, 2), ProcessGrid((1, SIZE)), 0)
    alike(MemoryError, [], lambda: TransposePlan(huge, huge.pencil(2), "c16", comm, backend="direct"))
    verdict([f"{in_use('names')} names are left"] if in_use("names") else [])


@several
def test_a_fork_is_no_part_of_the_plan(comm, verdict):
    with build(comm, timeout=5) as plan:
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    with plan:
                        raise KeyError
                except BaseException:
                    os._exit(0)
            os.waitpid(child, 0)
        comm.Barrier()
        verdict(Trial(plan).run())


def test_arrays_are_found_among_many(comm, verdict):
    plans = [build(comm, (6, 7, 8 + k)) for k in range(8)]
    arrays = [plan.empty_dst() for plan in plans]
    for plan in plans[::3]:
        plan.close()
    del plan, plans[::3], arrays[::3]
    found = []
    for plan, array in zip(plans, arrays, strict=True):
        trial = Trial(plan)
        array[...] = trial.dst
        trial.dst = array
        found += trial.run()
    for plan in plans:
        plan.close()
    verdict(found)


def test_auto_does_without_shared_memory_where_there_is_too_little(comm, verdict, alike, monkeypatch):
    """One rank's is full: a plan asked for by name fails on all ranks, and "auto" takes messages on all."""
    reserve = os.posix_fallocate

    def full(file, start, nbytes):
        if comm.rank == comm.size - 1 and nbytes > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    x = Pencil((32, 16 * comm.size, 32), ProcessGrid((1, comm.size)), 1)
    y = x.pencil(2)
    if comm.size == 1:
        return
    alike(OSError, ["No space left"], lambda: TransposePlan(x, y, "f8", comm, backend="direct"))
    with TransposePlan(x, y, "f8", comm) as plan:
        src, dst = reference.fill(x, comm.rank, "f8"), reference.poisoned(y, comm.rank, "f8")
        plan.run(src, dst)
        wrong = reference.mismatch(y, comm.rank, dst)
        said = plan.backend == "mpi_p2p" and "shared memory" in plan.explain()
        verdict([text for text in (wrong, None if said else plan.explain()) if text])
