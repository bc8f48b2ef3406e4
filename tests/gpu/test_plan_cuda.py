# SPDX-License-Identifier: Apache-2.0
"""Plans of one process on the GPU: results, arrays of other libraries, streams, graphs, errors."""

import gc
import itertools
import warnings

import numpy as np
import pytest
from exporting import DLPack

import cudecomp
from cudecomp import Pencil, ProcessGrid, TransposePlan
from cudecomp import testing as reference

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

ALONE = ProcessGrid((1, 1))
SPIN = cupy.RawKernel(
    'extern "C" __global__ void spin(long long ticks) { long long t = clock64(); while (clock64() - t < ticks) {} }',
    "spin",
)


def busy(stream, milliseconds=50):
    """Keep a stream busy."""
    with stream:
        SPIN((1,), (1,), (np.int64(milliseconds * 1_900_000),))


def arrays(plan, x, y):
    """Filled source and poisoned destination of a plan, as CuPy arrays."""
    return cupy.asarray(reference.fill(x, 0, plan.dtype)), cupy.asarray(reference.poisoned(y, 0, plan.dtype))


ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("dtype", ["i1", "i2", "f4", "f8", "c16", "S3", "V12", "V24"])
def test_all_orders_give_the_reference(dtype):
    for a, b in itertools.product(ORDERS, repeat=2):
        x = Pencil((5, 6, 7), ALONE, 0, order=a, halo=(1, 0, (2, 1)))
        y = Pencil((5, 6, 7), ALONE, 1, order=b, padding=(0, 3, 1))
        with TransposePlan(x, y, dtype, device="cuda") as plan:
            if plan.dtype.kind in "SV":
                src, dst = plan.empty_src(), plan.empty_dst()
                src.set(reference.fill(x, 0, dtype))
                dst.set(reference.poisoned(y, 0, dtype))
            else:
                src, dst = arrays(plan, x, y)
            plan.run(src, dst)
            cupy.cuda.get_current_stream().synchronize()
            got = np.asarray(dst) if plan.dtype.kind in "SV" else cupy.asnumpy(dst)
            reference.check(y, 0, got)


@pytest.mark.parametrize("shape", [(64, 1, 33), (1, 1, 1), (129, 65, 66), (200, 3, 100)])
def test_in_place_and_fields(shape):
    x, y = Pencil(shape, ALONE, 0), Pencil(shape, ALONE, 2, order="contiguous", halo=1)
    with TransposePlan(x, y, "f8", device="cuda", inplace=True, fields=2) as plan:
        buffer = cupy.asarray(plan.empty_src())
        buffer[...] = -99
        for field in range(2):
            buffer[field, : x.size(0)] = cupy.asarray(reference.fill(x, 0, "f8").ravel() + field)
        plan.run(buffer)
        back = plan.reverse()
        for field in range(2):
            got = cupy.asnumpy(y.interior(buffer, 0))[field]
            np.testing.assert_array_equal(got, np.arange(np.prod(shape)).reshape(shape) + field)
        back.run(buffer)
        for field in range(2):
            np.testing.assert_array_equal(
                cupy.asnumpy(buffer[field, : x.size(0)]), reference.fill(x, 0, "f8").ravel() + field
            )
        back.close()


def test_the_run_waits_for_the_producer_on_the_stream_given():
    x, y = Pencil((32, 32, 32), ALONE, 0), Pencil((32, 32, 32), ALONE, 1, order=(2, 1, 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    with TransposePlan(x, y, "f8", device="cuda") as plan:
        good, dst = arrays(plan, x, y)
        src = cupy.full_like(good, -5)
        cupy.cuda.Device().synchronize()
        busy(stream)
        with stream:
            src[...] = good
        plan.run(src, dst, stream=stream)
        assert not stream.done, "the run has blocked, or the producer was too quick for this test"
        stream.synchronize()
        reference.check(y, 0, cupy.asnumpy(dst))


class Exporting:
    """A device array that says which stream it is in use on."""

    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}


def test_the_run_waits_for_the_streams_that_arrays_export():
    x, y = Pencil((32, 32, 32), ALONE, 0), Pencil((32, 32, 32), ALONE, 1, order=(2, 1, 0))
    producer, own = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with TransposePlan(x, y, "f8", device="cuda") as plan:
        good, dst = arrays(plan, x, y)
        src = cupy.full_like(good, -5)
        cupy.cuda.Device().synchronize()
        busy(producer)
        with producer:
            src[...] = good
        plan.run(Exporting(src, producer), dst, stream=own)
        own.synchronize()
        reference.check(y, 0, cupy.asnumpy(dst))


def test_a_capture_replays_with_new_values():
    x, y = Pencil((9, 8, 7), ALONE, 0), Pencil((9, 8, 7), ALONE, 2, order="contiguous")
    for launch in ("fused", "per_peer", "per_peer_events"):
        with TransposePlan(x, y, "f4", device="cuda", launch=launch) as plan:
            src, dst = arrays(plan, x, y)
            call = plan.capture(src, dst)
            for step in range(3):
                src += step
                expected = reference.fill(y, 0, "f4") + sum(range(step + 1))
                dst[...] = -1
                (call if step else plan).replay()
                np.testing.assert_array_equal(cupy.asnumpy(dst), expected)
            assert plan.stats["captures"] == 1
            assert plan.stats["replays"] == 3


def test_automatic_captures_are_bounded_and_keyed_on_addresses(monkeypatch):
    from cudecomp.cuda import engine

    monkeypatch.setattr(engine, "CACHED_GRAPHS", 4)
    monkeypatch.setenv("CUDECOMP_ENABLE_CUDA_GRAPHS", "1")
    x, y = Pencil((4, 5, 6), ALONE, 0), Pencil((4, 5, 6), ALONE, 1, order=(2, 0, 1))
    with TransposePlan(x, y, "f8", device="cuda") as plan:
        pairs = [arrays(plan, x, y) for _ in range(6)]
        for src, dst in pairs * 2:
            dst[...] = -1
            plan.run(src, dst)
            reference.check(y, 0, cupy.asnumpy(dst))
        assert plan.stats["captures"] == 12
        assert plan.stats["evictions"] == 8
        for _ in range(5):
            plan.run(*pairs[-1])
        assert plan.stats["captures"] == 12
    with TransposePlan(x, y, "f8", device="cuda", graphs=False) as plan:
        plan.run(*pairs[0])
        assert plan.stats["captures"] == 0


def test_a_run_becomes_part_of_the_callers_capture():
    x, y = Pencil((16, 16, 16), ALONE, 0), Pencil((16, 16, 16), ALONE, 1, order=(2, 1, 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    plan = TransposePlan(x, y, "f8", device="cuda", graphs=True)
    src, dst = arrays(plan, x, y)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.run(src, dst, stream=stream)
        graph = stream.end_capture()
    assert cupy.asnumpy(dst)[0, 0, 0] != 0, "captured work must not have run"
    plan.close()
    gc.collect()
    graph.launch(stream)
    stream.synchronize()
    reference.check(y, 0, cupy.asnumpy(dst))


def test_arrays_of_pytorch_and_dlpack():
    torch = pytest.importorskip("torch")
    x, y = Pencil((6, 7, 8), ALONE, 0), Pencil((6, 7, 8), ALONE, 2, order=(1, 2, 0))
    with TransposePlan(x, y, "f4", device="cuda") as plan:
        src = torch.as_tensor(reference.fill(x, 0, "f4"), device="cuda")
        dst = torch.full(y.memory_shape(0), -1.0, dtype=torch.float32, device="cuda")
        plan.run(src, dst, stream=torch.cuda.current_stream())
        reference.check(y, 0, dst.cpu().numpy())
        own = plan.empty_dst()
        plan.run(src, own)
        for taken in (torch.as_tensor(own, device="cuda"), torch.from_dlpack(own)):
            assert taken.data_ptr() == own.memory.address
            reference.check(y, 0, taken.cpu().numpy())
        reference.check(y, 0, np.asarray(own))
        reference.check(y, 0, cupy.asnumpy(cupy.from_dlpack(own)))


def test_arrays_that_export_dlpack_alone():
    pytest.importorskip("cuda.core")
    x, y = Pencil((6, 7, 8), ALONE, 0), Pencil((6, 7, 8), ALONE, 2, order=(1, 2, 0))
    with TransposePlan(x, y, "f4", device="cuda") as plan:
        src, dst = arrays(plan, x, y)
        plan.run(DLPack(src), DLPack(dst))
        reference.check(y, 0, cupy.asnumpy(dst))


def test_memory_outlives_the_plan():
    torch = pytest.importorskip("torch")
    x, y = Pencil((6, 7, 8), ALONE, 0), Pencil((6, 7, 8), ALONE, 1)
    plan = TransposePlan(x, y, "f4", device="cuda")
    tensor = torch.from_dlpack(plan.empty_src())
    tensor[...] = 3
    plan.close()
    del plan
    gc.collect()
    TransposePlan(x, y, "f4", device="cuda").close()  # frees what was given up meanwhile
    assert (tensor.cpu().numpy() == 3).all()


def test_wrong_arrays_are_refused_before_any_launch():
    x, y = Pencil((6, 7, 8), ALONE, 0), Pencil((6, 7, 8), ALONE, 1)
    with TransposePlan(x, y, "f4", device="cuda") as plan:
        src, dst = arrays(plan, x, y)
        with pytest.raises(TypeError, match="device memory"):
            plan.run(np.zeros((6, 7, 8), "f4"), dst)
        with pytest.raises(TypeError, match="float64"):
            plan.run(src.astype("f8"), dst)
        with pytest.raises(ValueError, match="shape"):
            plan.run(src.ravel()[:-1], dst)
        with pytest.raises(ValueError, match="overlap"):
            plan.run(src, src)
        with pytest.raises(ValueError, match="strides"):
            plan.run(src, cupy.asfortranarray(dst))
        with pytest.raises(TypeError, match="stream"):
            plan.run(src, dst, stream="default")
        assert plan.stats["runs"] == 0
        plan.run(src, dst)
        reference.check(y, 0, cupy.asnumpy(dst))
    with TransposePlan(x, y, "f4") as plan, pytest.raises(TypeError, match="device memory"):
        plan.run(src, dst)


def test_a_plan_given_up_open_warns_and_frees_later():
    x, y = Pencil((64, 64, 64), ALONE, 0), Pencil((64, 64, 64), ALONE, 1, order=(2, 1, 0))
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    plan = TransposePlan(x, y, "c16", device="cuda", inplace=True)
    plan.close()
    before = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(100):
        plan = TransposePlan(x, y, "c16", device="cuda", inplace=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del plan
            gc.collect()
        assert [w.category for w in caught] == [ResourceWarning]
    cudecomp.TransposePlan(x, y, "c16", device="cuda").close()
    assert before - cupy.cuda.runtime.memGetInfo()[0] < 32 << 20


@pytest.mark.slow
def test_more_items_than_32_bits_count():
    """float32, 1030**3 items, permuted; checked on the device."""
    n = 1030
    x, y = Pencil((n, n, n), ALONE, 0), Pencil((n, n, n), ALONE, 1, order=(2, 0, 1))
    with TransposePlan(x, y, "f4", device="cuda") as plan:
        src, dst = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
        for i in range(n):
            src[i] = (cupy.arange(n * n, dtype="i8").reshape(n, n) + i * n * n) % 16777213
        dst[...] = -1
        plan.run(src, dst)
        for k in (0, 1, 517, n - 1):
            assert (dst[k] == src[:, :, k]).all()
        assert int((dst < 0).sum()) == 0


def test_captures_are_dropped_on_request():
    x, y = Pencil((4, 5, 6), ALONE, 0), Pencil((4, 5, 6), ALONE, 1, order=(2, 0, 1))
    with TransposePlan(x, y, "f8", device="cuda", graphs=True) as plan:
        src, dst = arrays(plan, x, y)
        plan.run(src, dst)
        plan.run(src, dst)
        assert plan.stats["captures"] == 1
        plan.forget()
        plan.run(src, dst)
        assert plan.stats["captures"] == 2
        reference.check(y, 0, cupy.asnumpy(dst))


def test_two_pencils_with_the_same_addresses_do_not_share_captures():
    """The same pointers, with another dtype or with other halos, belong to other plans and other captures."""
    memory = cupy.empty((2, 20000), "f8")
    for dtype, halo in itertools.product(["f8", "f4", "i2"], [0, 1, 2]):
        x = Pencil((9, 8, 7), ALONE, 0, halo=halo)
        y = Pencil((9, 8, 7), ALONE, 1, order=(2, 0, 1), halo=(halo, 0, 0))
        with TransposePlan(x, y, dtype, device="cuda", graphs=True) as plan:
            src, dst = (row.view(dtype)[: p.size(0)] for row, p in zip(memory, (x, y), strict=True))
            src[...] = cupy.asarray(reference.fill(x, 0, dtype).ravel())
            for _ in range(2):
                dst[...] = cupy.asarray(reference.poisoned(y, 0, dtype).ravel())
                plan.run(src, dst)
            reference.check(y, 0, cupy.asnumpy(dst))


def test_threads_with_their_own_plans_and_streams():
    from concurrent.futures import ThreadPoolExecutor

    def work(number):
        x, y = Pencil((20, 30, 40), ALONE, 0), Pencil((20, 30, 40), ALONE, 1, order=(2, 1, 0))
        stream = cupy.cuda.Stream(non_blocking=True)
        with TransposePlan(x, y, "f8", device="cuda", graphs=bool(number % 2)) as plan, stream:
            src, dst = arrays(plan, x, y)
            for step in range(50):
                src += 1
                plan.run(src, dst, stream=stream)
                if step % 10 == 0:
                    plan.capture(src, dst)
            return bool((dst == cupy.asarray(reference.fill(y, 0, "f8")) + 50).all())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8


def test_one_plan_on_alternating_streams():
    x, y = Pencil((64, 64, 64), ALONE, 0), Pencil((64, 64, 64), ALONE, 1, order=(2, 1, 0))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with TransposePlan(x, y, "f8", device="cuda") as plan:
        pairs = [arrays(plan, x, y) for _ in streams]
        cupy.cuda.Device().synchronize()
        for _ in range(200):
            for (src, dst), stream in zip(pairs, streams, strict=True):
                plan.run(src, dst, stream=stream)
        for (_, dst), stream in zip(pairs, streams, strict=True):
            stream.synchronize()
            reference.check(y, 0, cupy.asnumpy(dst))
