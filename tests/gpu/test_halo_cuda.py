# SPDX-License-Identifier: Apache-2.0
"""Halo plans of one process on the GPU: results of all launches and captures, streams, the caller's own captures."""

import gc

import numpy as np
import pytest
import updates

from cudecomp import HaloPlan, Pencil, ProcessGrid

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

ALONE = ProcessGrid((1, 1))
LAUNCHES = ["fused", "per_peer", "per_peer_events"]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("graphs", [False, True])
def test_updates_equal_the_reference(launch, graphs):
    for pencil, options, dtype in updates.cases([(1, 1)]):
        options |= {"device": "cuda", "launch": launch, "graphs": graphs}
        assert not updates.problems(pencil, dtype, None, options)


@pytest.mark.parametrize("width", [1, 2, 3, (2, 0)])
@pytest.mark.parametrize("order", updates.ORDERS)
def test_all_orders_and_widths(order, width):
    for axes in (0, 1, 2, None):
        pencil = Pencil((6, 70, 9), ALONE, 0, halo=[width] * 3, order=order)
        options = {"periods": (True, False, True), "axes": (axes,) if axes is not None else None, "device": "cuda"}
        assert not updates.problems(pencil, "f8", None, options, ["run", "replay"])


@pytest.mark.parametrize("dtype", ["i1", "i2", "f4", "c16", "V12", "V24"])
def test_large_faces(dtype):
    """Faces of many tiles, one cell thick along each axis in turn, whose rows begin anywhere."""
    for axis in range(3):
        pencil = Pencil((130, 67, 129), ALONE, axis, halo=1, order="contiguous", padding=(0, 1, 3))
        options = {"periods": (True,) * 3, "axes": (axis,), "device": "cuda"}
        assert not updates.problems(pencil, dtype, None, options, ["run"])


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("captured", [False, True])
def test_values_that_change_between_runs(launch, captured):
    pencil = Pencil((9, 8, 7), ALONE, 1, halo=(1, (0, 2), 2), order="contiguous")
    options = {"periods": (True, True, False), "fields": 2, "device": "cuda", "launch": launch}
    assert not updates.repeated(pencil, None, 3, captured, **options)


def test_automatic_captures_are_in_effect():
    pencil = Pencil((9, 8, 7), ALONE, 0, halo=2)
    (before,), (after,) = updates.outcome(pencil, (True,) * 3, None, "f8")
    with HaloPlan(pencil, "f8", periods=True, device="cuda", graphs=True) as plan:
        arrays = [cupy.asarray(before) for _ in range(2)]
        for stamp in range(3):
            for array in arrays:
                array[...] = cupy.asarray(before) + stamp
                plan.run(array)
                np.testing.assert_array_equal(cupy.asnumpy(array), after + stamp)
        assert (plan.stats["captures"], plan.stats["replays"]) == (2, 6)
        assert plan.capturable


def test_fields_of_separate_arrays():
    pencil = Pencil((5, 6, 7), ALONE, 2, halo=2)
    (before,), (after,) = updates.outcome(pencil, (True,) * 3, None, "f4")
    with HaloPlan(pencil, "f4", periods=True, fields=2, device="cuda") as plan:
        arrays = [cupy.asarray(before), cupy.asarray(before + 1)]
        plan.run(arrays)
        np.testing.assert_array_equal(cupy.asnumpy(arrays[0]), after)
        np.testing.assert_array_equal(cupy.asnumpy(arrays[1]), after + 1)


@pytest.mark.parametrize("replayed", [False, True])
def test_an_update_becomes_part_of_the_callers_capture(replayed):
    """The caller's graph holds work of the caller's before and after the update, and outlives the plan."""
    pencil = Pencil((16, 15, 14), ALONE, 0, halo=1, order=(2, 1, 0))
    (before,), (after,) = updates.outcome(pencil, (True,) * 3, None, "f8")
    stream = cupy.cuda.Stream(non_blocking=True)
    plan = HaloPlan(pencil, "f8", periods=True, device="cuda")
    array, twice = cupy.asarray(before), cupy.zeros(before.shape)
    call = plan.capture(array) if replayed else plan.bind(array)
    cupy.multiply(array, 2, out=twice)  # kernels are loaded before the capture
    array += 0
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        array += 1
        (call.replay if replayed else call.run)(stream=stream)
        cupy.multiply(array, 2, out=twice)
        graph = stream.end_capture()
    np.testing.assert_array_equal(cupy.asnumpy(array), before, "captured work must not have run")
    plan.close()
    del plan, call
    gc.collect()
    for stamp in (1, 2, 3):
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(array), after + stamp)
        np.testing.assert_array_equal(cupy.asnumpy(twice), 2 * (after + stamp))


def test_the_update_waits_for_the_producer_and_the_consumer_for_the_update():
    spin = cupy.RawKernel(
        'extern "C" __global__ void s(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "s"
    )
    pencil = Pencil((32, 31, 30), ALONE, 1, halo=2)
    (before,), (after,) = updates.outcome(pencil, (True,) * 3, None, "f8")
    stream = cupy.cuda.Stream(non_blocking=True)
    with HaloPlan(pencil, "f8", periods=True, device="cuda") as plan:
        good = cupy.asarray(before)
        array = cupy.full_like(good, -5)
        cupy.cuda.Device().synchronize()
        with stream:
            spin((1,), (1,), (np.int64(50 * 1_900_000),))
            array[...] = good
            plan.run(array, stream=stream)
            assert not stream.done, "the run has blocked, or the producer was too quick for this test"
            kept = array.copy()
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(kept), after)


def test_one_array_is_expected():
    pencil = Pencil((5, 6, 7), ALONE, 2, halo=1)
    with HaloPlan(pencil, "f4", periods=True, device="cuda") as plan:
        one, other = plan.empty_src(), plan.empty_src()
        with pytest.raises(ValueError, match="one array"):
            plan.run(one, other)
        with pytest.raises(TypeError, match="device memory"):
            plan.run(np.zeros(pencil.memory_shape(0), "f4"))
        assert plan.stats["runs"] == 0
