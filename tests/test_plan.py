# SPDX-License-Identifier: Apache-2.0
"""Plans of one process, without MPI: results, arguments, arrays, calls and their life."""

import gc
import importlib.util
import itertools
import tracemalloc
import warnings
import weakref

import numpy as np
import pytest
from covering import pairwise
from exercise import DTYPES, WAYS, Trial
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from strategies import pencils

import cudecomp
from cudecomp import Call, Pencil, Plan, PoisonedError, ProcessGrid, TransposePlan, Workspace, _build
from cudecomp import testing as reference

SHAPE = (5, 6, 7)
ONE = ProcessGrid((1, 1))
X, Y = Pencil(SHAPE, ONE, 0), Pencil(SHAPE, ONE, 1)
ORDERS = list(itertools.permutations(range(3)))


@pytest.fixture
def plan():
    with TransposePlan(X, Y, "f8") as plan:
        yield plan


@settings(deadline=None, max_examples=100)
@given(
    st.data(),
    st.sampled_from(list(DTYPES)),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["array", "sequence", "flat"]),
    st.sampled_from(list(WAYS)),
)
def test_any_pair_of_pencils(data, dtype, inplace, fields, form, way):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    grid = ProcessGrid((1,) * (len(shape) - 1))
    src, dst = (data.draw(pencils(global_shape=shape, grid=grid)) for _ in range(2))
    with TransposePlan(src, dst, DTYPES[dtype], fields=fields, inplace=inplace) as plan, plan.reverse() as back:
        assert not Trial(plan, 1, form).run(way)
        assert not Trial(back, 2, form).run(way)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_all_pairs_of_orders(dtype):
    for a, b in itertools.product(ORDERS, ORDERS):
        with TransposePlan(Pencil(SHAPE, ONE, 0, order=a), Pencil(SHAPE, ONE, 2, order=b), DTYPES[dtype]) as plan:
            assert not Trial(plan).run()


def test_a_larger_array_is_numpys_transpose():
    src, dst = Pencil((70, 33, 65), ONE, 0), Pencil((70, 33, 65), ONE, 1, order=(2, 0, 1))
    values = np.random.default_rng(1).random((70, 33, 65))
    with TransposePlan(src, dst, "f8") as plan:
        out = plan.empty_dst()
        plan.run(values, out)
    assert out.tobytes() == np.ascontiguousarray(values.transpose(2, 0, 1)).tobytes()


def test_properties(plan):
    assert (plan.src, plan.dst, plan.dtype) == (X, Y, np.dtype("f8"))
    assert (plan.comm, plan.rank, plan.device, plan.backend) == (None, 0, "host", "local")
    assert (plan.launch, plan.fields, plan.inplace, plan.capturable, plan.closed) == ("fused", 1, False, False, False)
    assert plan.workspace_bytes == 0
    assert isinstance(plan.workspace, Workspace)
    assert set(plan.stats.values()) == {0}


def test_counters(plan):
    src, dst = plan.empty_src(), plan.empty_dst()
    plan.run(src, dst)
    call = plan.capture(src, dst)
    call.replay()
    call.run()
    plan.replay()
    assert {name: plan.stats[name] for name in ("runs", "captures", "replays", "messages")} == {
        "runs": 4,
        "captures": 1,
        "replays": 2,
        "messages": 0,
    }


def test_what_is_printed(plan):
    assert "TransposePlan" in repr(plan)
    assert "float64" in repr(plan)
    assert "no other rank takes part: one local copy" in plan.explain()
    assert "captured" in repr(plan.capture(plan.empty_src(), plan.empty_dst()))
    plan.close()
    assert "(closed)" in repr(plan)


@pytest.mark.parametrize("fields", [1, 3])
def test_empty_arrays(fields):
    src, dst = Pencil(SHAPE, ONE, 0, halo=1), Pencil(SHAPE, ONE, 1, order="contiguous", padding=2)
    lead = (fields,) if fields > 1 else ()
    with TransposePlan(src, dst, "c16", fields=fields) as plan:
        assert plan.empty_src().shape == (*lead, 7, 8, 9)
        assert plan.empty_dst().shape == (*lead, *dst.memory_shape(0))
        assert plan.empty_src().ctypes.data % 64 == 0
    with TransposePlan(src, dst, "c16", fields=fields, inplace=True) as plan:
        assert plan.empty_src().shape == plan.empty_dst().shape == (*lead, max(src.size(0), dst.size(0)))
        plan.run(plan.empty_src())


def test_empty_of_a_pencil():
    array = cudecomp.empty(Pencil(SHAPE, ONE, 0, halo=1, order=(2, 0, 1)), "i2", 0)
    assert (array.shape, array.dtype) == ((9, 7, 8), np.dtype("i2"))
    with pytest.raises(ValueError, match="abacus"):
        cudecomp.empty(X, "i2", 0, device="abacus")
    with pytest.raises(TypeError, match="object"):
        cudecomp.empty(X, object, 0)


BAD = {
    "src": ({"src": SHAPE}, TypeError, "src is a tuple"),
    "dst": ({"dst": None}, TypeError, "dst is a NoneType"),
    "shapes": ({"dst": Pencil((5, 6, 8), ONE, 1)}, ValueError, "global shape"),
    "ranks": ({"src": Pencil(SHAPE, ProcessGrid((2, 1)), 0)}, ValueError, "grid of 2 ranks"),
    "object": ({"dtype": object}, TypeError, "dtype"),
    "axis as dtype": ({"dtype": ("f8", 3)}, TypeError, "dtype"),
    "comm": ({"comm": "world"}, TypeError, "comm is a str"),
    "backend": ({"backend": "pigeon"}, ValueError, "pigeon"),
    "backend without MPI": ({"backend": "mpi_p2p"}, ValueError, "comm=None"),
    "device": ({"device": "abacus"}, ValueError, "abacus"),
    "device type": ({"device": 3}, TypeError, "device is 3"),
    "launch": ({"launch": "never"}, ValueError, "never"),
    "graphs": ({"graphs": "some"}, TypeError, "graphs"),
    "fields": ({"fields": -1}, ValueError, "fields is -1"),
    "fields type": ({"fields": True}, TypeError, "fields is True"),
    "inplace": ({"inplace": 1}, TypeError, "inplace is 1"),
    "timeout": ({"timeout": 0}, ValueError, "timeout is 0"),
    "timeout type": ({"timeout": "long"}, TypeError, "timeout"),
    "timeout nan": ({"timeout": float("nan")}, ValueError, "timeout"),
    "workspace": ({"workspace": 3}, TypeError, "workspace is a int"),
    "check": ({"check": None}, TypeError, "check is None"),
    "unknown": ({"speed": "high"}, TypeError, "speed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, kind, text = BAD[name]
    arguments = {"src": X, "dst": Y, "dtype": "f8", **change}
    with pytest.raises(kind, match=text):
        TransposePlan(**arguments)


CUDA_MISSING = {
    "kernels": (False, "", ["no CUDA kernels", "-Dcuda=enabled"]),
    "bindings": (True, "13.0", ["cuda-bindings is not installed", "pip install '.[cu13]'"]),
    "bindings of CUDA 12": (True, "12.9", ["cuda-bindings is not installed", "pip install '.[cu12]'"]),
}


@pytest.mark.parametrize("missing", CUDA_MISSING)
def test_an_installation_without_cuda(monkeypatch, missing):
    """The error says what is missing and what to do, from a plan and from an array."""
    kernels, version, texts = CUDA_MISSING[missing]
    monkeypatch.setattr(_build, "CUDA", kernels)
    monkeypatch.setattr(_build, "CUDA_VERSION", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for action in (lambda: TransposePlan(X, Y, "f8", device="cuda"), lambda: cudecomp.empty(X, "f8", 0, "cuda")):
        with pytest.raises(RuntimeError) as caught:
            action()
        assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_ranks_that_are_not_there():
    with pytest.raises(ValueError, match="comm is None, which means this process alone: pass comm="):
        TransposePlan(Pencil(SHAPE, ProcessGrid((2, 3)), 0), Y, "f8")


def test_the_timeout_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUDECOMP_TIMEOUT", "2.5")
    TransposePlan(X, Y, "f8").close()
    monkeypatch.setenv("CUDECOMP_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="CUDECOMP_TIMEOUT is 'soon'"):
        TransposePlan(X, Y, "f8")


def test_classes_that_are_made_otherwise():
    for made in (Plan, Call):
        with pytest.raises(TypeError):
            made()


def readonly(array):
    array.flags.writeable = False
    return array


room = np.zeros(600)
WRONG = {
    "short": (np.zeros(209), None, ValueError, "src has shape"),
    "short dst": (None, np.zeros(209), ValueError, "dst has shape"),
    "shape": (np.zeros((5, 7, 6)), None, ValueError, "memory shape"),
    "extra axis": (np.zeros((1, *SHAPE)), None, ValueError, "memory shape"),
    "scalar": (np.zeros(()), None, ValueError, "memory shape"),
    "dtype": (np.zeros(SHAPE, "f4"), None, TypeError, "dtype float32, expected float64"),
    "same size": (None, np.zeros(SHAPE, "i8"), TypeError, "dtype int64"),
    "strides": (np.zeros((5, 6, 14))[..., ::2], None, ValueError, "strides"),
    "Fortran": (None, np.zeros(SHAPE, order="F"), ValueError, "strides"),
    "flat strides": (np.zeros(420)[::2], None, ValueError, "strides"),
    "reversed": (np.zeros(SHAPE)[::-1], None, ValueError, "strides"),
    "read-only": (None, readonly(np.zeros(SHAPE)), ValueError, "read-only"),
    "overlap": (room[:210], room[209:419], ValueError, "overlap"),
    "same": (room, room, ValueError, "inplace=True"),
    "list": ([1.0, 2.0], None, ValueError, "2 arrays, expected 1"),
    "list of numbers": ([1.0], None, TypeError, "float"),
    "text": ("text", None, TypeError, "str"),
    "number": (None, 3, TypeError, "int"),
    "bytes": (bytearray(210 * 8), None, TypeError, "bytearray"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays(plan, name):
    """Raised before anything is copied, by every way to name arrays; the plan can be used afterwards."""
    src, dst, kind, text = WRONG[name]
    src = plan.empty_src() if src is None else src
    dst = reference.poisoned(Y, 0, "f8") if dst is None else dst
    for action in (plan.run, plan.bind, plan.capture):
        with pytest.raises(kind, match=text):
            action(src, dst)
    if (
        isinstance(dst, np.ndarray)
        and dst.shape == SHAPE
        and dst.dtype == "f8"
        and dst.flags.c_contiguous
        and name != "read-only"
    ):
        reference.check(Y, 0, dst, reference.poisoned(Y, 0, "f8"))
    assert plan.stats["runs"] == plan.stats["captures"] == 0
    assert not Trial(plan).run()


def test_a_missing_destination(plan):
    with pytest.raises(ValueError, match="dst is missing"):
        plan.run(plan.empty_src())


def test_a_read_only_source_is_fine(plan):
    trial = Trial(plan)
    readonly(trial.src)
    assert not trial.run()


def test_touching_arrays_do_not_overlap(plan):
    both = np.zeros(420)
    trial = Trial(plan)
    both[:210] = trial.src.reshape(-1)
    plan.run(both[:210], both[210:])
    assert both[210:].tobytes() == trial.expected[0].tobytes()


def test_strides_of_single_extents_do_not_matter():
    pencil = Pencil((1, 6, 7), ONE, 0)
    with TransposePlan(pencil, pencil.pencil(1, order=(1, 2, 0)), "f8") as plan:
        source = as_strided(np.zeros((1, 6, 7)), strides=(12345, 56, 8))
        plan.run(source, np.zeros((6, 7, 1)))


@pytest.mark.parametrize("dtype", ["f8", "c16", "12-byte"])
@pytest.mark.parametrize("shift", [1, 4, 8])
def test_arrays_at_any_address(dtype, shift):
    """Copied right, or refused: never a fault."""
    dtype = DTYPES.get(dtype, np.dtype(dtype) if dtype != "12-byte" else None)
    with TransposePlan(X, Pencil(SHAPE, ONE, 1, order=(2, 1, 0)), dtype) as plan:
        trial = Trial(plan)
        placed = []
        for array in (trial.src, trial.dst):
            raw = np.zeros(array.nbytes + 64, np.uint8)
            start = -raw.ctypes.data % 64 + shift
            placed.append(raw[start : start + array.nbytes].view(dtype).reshape(array.shape))
            placed[-1][...] = array
        try:
            plan.run(*placed)
        except ValueError as error:
            assert "align" in str(error)  # noqa: PT017
        else:
            assert placed[1].tobytes() == trial.expected[0].tobytes()


FIELD_ARRAYS = {
    "too few": (lambda: np.zeros((2, *SHAPE)), ValueError, "3 fields"),
    "no leading axis": (lambda: np.zeros(SHAPE), ValueError, "3 fields"),
    "flat and short": (lambda: np.zeros((3, 209)), ValueError, "3 fields"),
    "all in one axis": (lambda: np.zeros(630), ValueError, "3 fields"),
    "two in a sequence": (lambda: [np.zeros(SHAPE)] * 2, ValueError, "2 arrays, expected 3"),
    "wrong one in a sequence": (lambda: [np.zeros(SHAPE), np.zeros(SHAPE), np.zeros(3)], ValueError, "shape"),
    "gap between fields": (lambda: np.zeros((6, *SHAPE))[::2], ValueError, "strides"),
}


@pytest.mark.parametrize("name", FIELD_ARRAYS)
def test_wrong_fields(name):
    make, kind, text = FIELD_ARRAYS[name]
    with TransposePlan(X, Y, "f8", fields=3) as plan, pytest.raises(kind, match=text):
        plan.run(make(), plan.empty_dst())


def test_destinations_of_fields_must_be_apart():
    with TransposePlan(X, Y, "f8", fields=2) as plan:
        one = np.zeros(SHAPE)
        with pytest.raises(ValueError, match="overlap"):
            plan.run(plan.empty_src(), [one, one])
        plan.run([one, one], plan.empty_dst())  # reading twice is fine


def test_in_place_takes_one_buffer():
    src, dst = Pencil(SHAPE, ONE, 0), Pencil(SHAPE, ONE, 1, halo=1)
    with TransposePlan(src, dst, "f8", inplace=True) as plan:
        buffer = plan.empty_src()
        plan.run(buffer)
        plan.run(buffer, buffer)
        plan.run(buffer, buffer[:])
        plan.run(np.zeros(dst.memory_shape(0)))
        for wrong in ((buffer, plan.empty_src()), (buffer, buffer[1:]), (np.zeros(SHAPE),)):
            with pytest.raises(ValueError):  # noqa: PT011
                plan.run(*wrong)
        with pytest.raises(ValueError, match="read-only"):
            plan.run(readonly(plan.empty_src()))


def test_in_place_of_fields_in_a_sequence():
    with TransposePlan(X, Y, "f8", inplace=True, fields=2) as plan:
        arrays = [np.zeros(SHAPE), np.zeros(SHAPE)]
        plan.run(arrays)
        plan.run(arrays, arrays)
        with pytest.raises(ValueError, match="overlap"):
            plan.run([arrays[0], arrays[0]])


def test_a_stream_is_refused(plan):
    src, dst = plan.empty_src(), plan.empty_dst()
    call = plan.capture(src, dst)
    for action in (
        lambda: plan.run(src, dst, stream=1),
        lambda: call.run(1),
        lambda: call.replay(1),
        lambda: call.start(1),
    ):
        with pytest.raises(ValueError, match="expected None on the host device"):
            action()
    call.run()


def test_calls():
    with TransposePlan(X, Y, "f8") as plan:
        trial = Trial(plan)
        call = plan.bind(trial.src, trial.dst)
        assert not call.captured
        with pytest.raises(RuntimeError, match="not captured"):
            call.replay()
        with pytest.raises(RuntimeError, match="nothing was captured"):
            plan.replay()
        assert call.capture() is call
        assert call.captured
        call.replay()
        assert not trial.problems()
        assert call.test()
        call.wait()


def test_split_phase(plan):
    trial, other = Trial(plan, 1), Trial(plan, 2)
    call = plan.bind(trial.src, trial.dst)
    call.start()
    with pytest.raises(RuntimeError, match="pending"):
        plan.run(other.src, other.dst)
    with TransposePlan(X, Y, "f8") as second:
        with pytest.raises(RuntimeError, match="in use by a pending operation"):
            second.run(trial.src, other.dst)
        second.run(other.src, other.dst)
    call.wait()
    assert not trial.problems()
    assert not other.problems()


def test_a_shared_workspace():
    workspace = Workspace()
    options = {"workspace": workspace, "inplace": True}
    turned = X.pencil(1, order=(2, 1, 0))
    with (
        TransposePlan(X, turned, "f8", **options) as small,
        TransposePlan(X, turned, "c16", fields=2, **options) as large,
    ):
        assert small.workspace is large.workspace is workspace
        assert workspace.nbytes == large.workspace_bytes > small.workspace_bytes
        for plan in (small, large, small):
            assert not Trial(plan).run()
        call = small.bind(Trial(small).src)
        call.start()
        with pytest.raises(RuntimeError, match="in use by a pending operation"):
            Trial(large).run()
        call.wait()
        assert not Trial(large).run()


def test_reverse(plan):
    with plan.reverse() as back:
        assert (back.src, back.dst, back.dtype, back.backend) == (Y, X, plan.dtype, plan.backend)
        assert not Trial(back).run()


def test_register(plan):
    array = plan.empty_src()
    assert plan.register(array) is array
    with pytest.raises(TypeError, match="register"):
        plan.register("text")


def test_a_closed_plan_refuses(plan):
    trial = Trial(plan)
    call = plan.capture(trial.src, trial.dst)
    plan.close()
    plan.close()
    assert plan.closed
    actions = [call.run, call.replay, call.start, plan.replay, plan.empty_src, plan.empty_dst, plan.check, plan.reverse]
    for action in [*actions, lambda: plan.run(trial.src, trial.dst), lambda: plan.register(trial.src)]:
        with pytest.raises(RuntimeError, match="closed"):
            action()


def test_a_block_left_by_an_exception():
    plan = TransposePlan(X, Y, "f8")
    call = plan.bind(plan.empty_src(), plan.empty_dst())
    call.start()
    with pytest.raises(KeyError), plan:
        raise KeyError("the user's own")
    assert plan.closed
    with pytest.raises(PoisonedError, match="its block was left by KeyError"):
        call.run()


def test_closed_after_the_work_was_done():
    """A local operation is complete after start: closing without wait leaves nothing in use."""
    trial = Trial(plan := TransposePlan(X, Y, "f8"))
    plan.bind(trial.src, trial.dst).start()
    plan.close()
    with TransposePlan(X, Y, "f8") as other:
        other.run(trial.src, trial.dst)
    assert not trial.problems()


def test_a_forgotten_plan_warns():
    plan = TransposePlan(X, Y, "f8")
    with pytest.warns(ResourceWarning, match="was not closed"):
        del plan
    plan = TransposePlan(X, Y, "f8")
    plan.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del plan
        with pytest.raises(TypeError):
            TransposePlan(X, Y, object)
        gc.collect()


def test_arrays_live_as_long_as_they_are_needed(plan):
    src, dst = plan.empty_src(), plan.empty_dst()
    watched = weakref.ref(dst)
    call = plan.capture(src, dst)
    del src, dst
    gc.collect()
    assert watched() is not None
    del call
    plan.replay()
    plan.capture(plan.empty_src(), plan.empty_dst())
    gc.collect()
    assert watched() is None


def test_a_run_lets_go_of_its_arrays(plan):
    src, dst = plan.empty_src(), plan.empty_dst()
    watched = weakref.ref(dst)
    plan.run(src, dst)
    del src, dst
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("inplace", [False, True])
def test_memory_stays_flat(inplace):
    with TransposePlan(X, Y, "f8", inplace=inplace) as plan:
        trial = Trial(plan)
        call = plan.bind(trial.src, trial.dst)
        for _ in range(100):
            plan.run(trial.src, trial.dst)
            call.run()
        tracemalloc.start()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            plan.run(trial.src, trial.dst)
            call.run()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 10_000


def test_memory_that_cannot_be_had():
    huge = Pencil((1 << 20, 1 << 20, 1 << 10), ONE, 0)
    with pytest.raises(MemoryError):
        TransposePlan(huge, huge.pencil(1, order=(2, 1, 0)), "c16", inplace=True)


def test_large_plans_need_no_memory():
    """A local plan has no workspace: geometry of any size can be looked at."""
    src = Pencil((4096, 4096, 4096), ONE, 0)
    with TransposePlan(src, src.pencil(2), "c16") as plan:
        assert plan.workspace_bytes == 0
        assert plan.src.size(0) == 2**36


def test_pairwise_rows_cover_all_pairs():
    factors = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4)}
    rows = pairwise(factors)
    for one, other in itertools.combinations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(factors[one], factors[other]))
    assert len(rows) <= 26
    assert rows == pairwise(factors)
