# SPDX-License-Identifier: Apache-2.0
"""Wrong or differing arguments on one rank: all ranks raise the same, or one does and the plan stays usable."""

import importlib.util

import numpy as np
import pytest
from exercise import Trial, complaints
from mpi4py import MPI

from cudecomp import Pencil, ProcessGrid, TransposePlan, Workspace, _build
from cudecomp import testing as reference

SIZE = MPI.COMM_WORLD.Get_size()
LAST = SIZE - 1
SHAPE = (6, 7, 8)
GRID = ProcessGrid((SIZE, 1))
X, Y = Pencil(SHAPE, GRID, 0), Pencil(SHAPE, GRID, 1)

several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")

# What the last rank passes instead, and a word of the exception.
DIFFERENCES = {
    "dtype": ({"dtype": "f4"}, "dtype"),
    "byte order": ({"dtype": ">f8"}, "dtype"),
    "axis": ({"dst": Pencil(SHAPE, GRID, 2)}, "dst"),
    "order": ({"dst": Pencil(SHAPE, GRID, 1, order="contiguous")}, "dst"),
    "halo": ({"src": Pencil(SHAPE, GRID, 0, halo=1)}, "src"),
    "rank order": ({"src": Pencil(SHAPE, ProcessGrid((1, SIZE), rank_order="column"), 0)}, "src"),
    "backend": ({"backend": "mpi_a2a"}, "mpi_a2a"),
    "launch": ({"launch": "per_peer"}, "launch"),
    "fields": ({"fields": 2}, "fields"),
    "inplace": ({"inplace": True}, "inplace"),
    "timeout": ({"timeout": 3}, "timeout"),
    "check": ({"check": True}, "check"),
}
BAD = {
    "no pencil": ({"src": "x"}, TypeError, "src"),
    "object items": ({"dtype": object}, TypeError, "object"),
    "unknown dtype": ({"dtype": "no such dtype"}, TypeError, "no such dtype"),
    "no dtype": ({"dtype": None}, TypeError, "dtype"),
    "items of no bytes": ({"dtype": "S0"}, TypeError, "dtype"),
    "unknown backend": ({"backend": "pigeon"}, ValueError, "pigeon"),
    "unknown device": ({"device": "abacus"}, ValueError, "abacus"),
    "unknown launch": ({"launch": "later"}, ValueError, "later"),
    "no fields": ({"fields": 0}, ValueError, "fields"),
    "half a field": ({"fields": 0.5}, TypeError, "fields"),
    "timeout": ({"timeout": -1}, ValueError, "timeout"),
    "inplace": ({"inplace": "yes"}, TypeError, "inplace"),
    "workspace": ({"workspace": "large"}, TypeError, "workspace"),
    "workspace of another group": ({"workspace": Workspace(None)}, ValueError, "workspace"),
    "global shape": ({"dst": Pencil((6, 7, 9), GRID, 1)}, ValueError, "(6, 7, 9)"),
    "ranks": ({"src": Pencil(SHAPE, ProcessGrid((SIZE, 2)), 0)}, ValueError, str(2 * SIZE)),
}


def build(comm, change):
    arguments = {"src": X, "dst": Y, "dtype": "f8", "backend": "mpi_p2p", **change}
    src, dst, dtype = (arguments.pop(name) for name in ("src", "dst", "dtype"))
    return TransposePlan(src, dst, dtype, comm, **arguments)


@several
@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_argument_differs(comm, alike, name):
    change, word = DIFFERENCES[name]
    mine = change if comm.rank == LAST else {}
    alike(ValueError, [word, "differs over the ranks", f"rank {LAST}"], lambda: build(comm, mine))
    with build(comm, {}) as plan:
        assert not Trial(plan).run()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_on_one_rank(comm, alike, name):
    change, kind, word = BAD[name]
    mine = change if comm.rank == LAST else {}
    texts = [word] + ([f"(on rank {LAST} of {SIZE})"] if SIZE > 1 else [])
    alike(kind, texts, lambda: build(comm, mine))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_on_all_ranks(comm, alike, name):
    change, kind, word = BAD[name]
    alike(kind, [word], lambda: build(comm, change))


@several
def test_cuda_bindings_that_one_rank_lacks(comm, alike, monkeypatch):
    """One rank raises before any CUDA is loaded, and so do all: with what to do, and not a ModuleNotFoundError."""
    monkeypatch.setattr(_build, "CUDA", True)
    monkeypatch.setattr(_build, "CUDA_VERSION", "12.9")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if comm.rank == LAST else name)
    texts = ["device 'cuda': the package cuda-bindings is not installed", ".[cu12]", f"on rank {LAST} of {SIZE}"]
    alike(RuntimeError, texts, lambda: build(comm, {"device": "cuda", "backend": "auto"}))


@several
def test_different_mistakes_on_two_ranks(comm, alike):
    mine = {0: {"dtype": object}, LAST: {"backend": "pigeon"}}.get(comm.rank, {})
    alike(TypeError, ["object"], lambda: build(comm, mine))


@several
def test_memory_runs_out_on_one_rank(comm, alike):
    """A workspace that one rank cannot have: a MemoryError everywhere."""
    huge = Pencil((1 << 30, 1 << 14, 2), ProcessGrid((1, SIZE)), 0)
    alike(MemoryError, [], lambda: TransposePlan(huge, huge.pencil(2), "c16", comm, inplace=True))
    with build(comm, {}) as plan:
        assert not Trial(plan).run()


def overlapping(plan):
    room = np.zeros(plan.src.size(plan.rank) + plan.dst.size(plan.rank), plan.dtype)
    return room[: plan.src.size(plan.rank)], room[plan.src.size(plan.rank) - 1 :][: plan.dst.size(plan.rank)]


def readonly(array):
    array.flags.writeable = False
    return array


def memory_shape(pencil, rank, dtype="f8"):
    return np.zeros(pencil.memory_shape(rank), dtype)


# Arrays of a run that are wrong, from the plan; the kind of the exception and a word of it.
WRONG = {
    "one item short": (lambda p: (np.zeros(X.size(p.rank) - 1), memory_shape(Y, p.rank)), ValueError, "src"),
    "dst one item short": (lambda p: (memory_shape(X, p.rank), np.zeros(Y.size(p.rank) - 1)), ValueError, "dst"),
    "other dtype": (lambda p: (memory_shape(X, p.rank), memory_shape(Y, p.rank, "f4")), TypeError, "float32"),
    "dtype of equal size": (lambda p: (memory_shape(X, p.rank, "i8"), memory_shape(Y, p.rank)), TypeError, "int64"),
    "byte order": (lambda p: (memory_shape(X, p.rank, ">f8"), memory_shape(Y, p.rank)), TypeError, ">f8"),
    "other shape": (lambda p: (np.zeros((1, *X.memory_shape(p.rank))), memory_shape(Y, p.rank)), ValueError, "shape"),
    "read-only": (lambda p: (memory_shape(X, p.rank), readonly(memory_shape(Y, p.rank))), ValueError, "read-only"),
    "not contiguous": (
        lambda p: (memory_shape(X, p.rank), memory_shape(Y, p.rank).repeat(2, 2)[..., ::2]),
        ValueError,
        "strides",
    ),
    "Fortran order": (
        lambda p: (np.asfortranarray(memory_shape(X, p.rank)), memory_shape(Y, p.rank)),
        ValueError,
        "strides",
    ),
    "overlapping": (overlapping, ValueError, "overlap"),
    "one array twice": (lambda p: (np.zeros(600),) * 2, ValueError, "inplace"),
    "no array": (lambda p: ("text", memory_shape(Y, p.rank)), TypeError, "str"),
    "None": (lambda p: (None, memory_shape(Y, p.rank)), TypeError, "NoneType"),
    "dst is missing": (lambda p: (memory_shape(X, p.rank), None), ValueError, "dst"),
    "too many fields": (lambda p: ([memory_shape(X, p.rank)] * 2, memory_shape(Y, p.rank)), ValueError, "2 arrays"),
    "on a device": (lambda p: (OnDevice(), memory_shape(Y, p.rank)), TypeError, "device"),
}


class OnDevice:
    """What an array of a GPU library looks like from outside."""

    def __init__(self):
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (0, False), "version": 3}


def refused(plan, arrays, kind, word):
    with pytest.raises(kind, match=word):
        plan.run(*arrays)


@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_p2p_pl", "mpi_a2a", "direct"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "local"])
def test_wrong_arrays_on_one_rank(comm, raised, verdict, check, backend):
    """With check=True all ranks raise the same. Otherwise one does, before it sent anything, and can run again.

    All ranks of the others have begun their runs by then, and complete them with the second attempt of the last.
    """
    found = []
    with build(comm, {"backend": backend, "check": check}) as plan:
        for stamp, (name, (make, kind, word)) in enumerate(WRONG.items()):
            trial = Trial(plan, stamp)
            arrays = make(plan) if comm.rank == LAST else (trial.src, trial.dst)
            if check:
                texts = raised(lambda arrays=arrays: plan.run(*arrays))
                if len(set(texts)) != 1 or texts[0] is None:
                    found.append(f"{name}: not alike: {texts}")
                elif texts[0][0] != kind.__name__ or word not in texts[0][1]:
                    found.append(f"{name}: {texts[0]}")
            elif comm.rank == LAST:
                found += complaints(lambda arrays=arrays, kind=kind, word=word: refused(plan, arrays, kind, word))
            found += trial.run()
        verdict(found)
        assert plan.stats["runs"] == len(WRONG)


def test_wrong_arrays_in_bind_and_capture(comm, alike):
    with build(comm, {"check": True}) as plan:
        src, dst = plan.empty_src(), plan.empty_dst()
        wrong = np.zeros(3) if comm.rank == LAST else dst
        alike(ValueError, ["shape (3,)"], lambda: plan.bind(src, wrong))
        alike(ValueError, ["shape (3,)"], lambda: plan.capture(src, wrong))
        assert plan.stats["captures"] == 0


def test_wrong_arrays_leave_the_destination_alone(comm):
    with build(comm, {"check": True}) as plan:
        dst = reference.poisoned(Y, comm.rank, "f8")
        with pytest.raises(ValueError, match="shape"):
            plan.run(np.zeros(X.size(comm.rank) - (comm.rank == LAST)), dst)
        reference.check(Y, comm.rank, dst, reference.poisoned(Y, comm.rank, "f8"))


def test_a_stream_on_the_host(comm, verdict):
    with build(comm, {}) as plan:
        trial = Trial(plan)
        with pytest.raises(ValueError, match="stream"):
            plan.run(trial.src, trial.dst, stream=7)
        verdict(trial.run())


def test_a_program_started_without_mpiexec():
    """A communicator of one rank, and a grid of more: the hint is how to start it."""
    pair = Pencil(SHAPE, ProcessGrid((2, 3)), 0), Pencil(SHAPE, ProcessGrid((2, 3)), 1)
    with pytest.raises(ValueError, match="start the program with mpiexec -n 6"):
        TransposePlan(*pair, "f8", MPI.COMM_SELF)


def test_communicators_that_are_none(comm):
    with pytest.raises(TypeError, match="str"):
        TransposePlan(X, Y, "f8", "world")
    with pytest.raises(ValueError, match="COMM_NULL"):
        TransposePlan(X, Y, "f8", comm.Split(MPI.UNDEFINED))
    with pytest.raises((TypeError, ValueError)):
        TransposePlan(X, Y, "f8", MPI.COMM_NULL)
    if SIZE > 1:
        with pytest.raises(ValueError, match="size of the communicator"):
            TransposePlan(X, Y, "f8")


@several
def test_a_workspace_on_an_unknown_device_on_one_rank(comm, alike):
    half = comm.Dup()
    alike(ValueError, ["abacus"], lambda: Workspace(half, "abacus" if comm.rank == LAST else "host"))
    half.Free()


def test_a_plan_built_after_failures_gets_its_own_messages(comm, verdict):
    """Failed builds on one rank leave ranks with equal tags."""
    for change in ({"dtype": object}, {"backend": "pigeon"}, {"fields": 0}):
        with pytest.raises((TypeError, ValueError)):
            build(comm, change if comm.rank == LAST else {})
    with build(comm, {}) as one, build(comm, {}) as other:
        trials = [Trial(one, 1), Trial(other, 2)]
        calls = [trial.plan.bind(trial.src, trial.dst) for trial in trials]
        for call in calls if comm.rank % 2 else reversed(calls):
            call.start()
        for call in calls:
            call.wait()
        verdict([text for trial in trials for text in trial.problems()])
