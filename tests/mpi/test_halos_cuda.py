# SPDX-License-Identifier: Apache-2.0
"""Halo updates of GPU arrays over MPI: all launches and transports, staged and not, fields, captures, stamped runs."""

import numpy as np
import pytest
import updates

from cudecomp import HaloPlan, Pencil, ProcessGrid, aware
from cudecomp import testing as reference

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

LAUNCHES = ["fused", "per_peer", "per_peer_events"]
BACKENDS = ["mpi_p2p", "mpi_p2p_pl", "mpi_a2a"]
GRIDS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1)], 8: [(2, 4)]}


def grids(comm):
    return GRIDS.get(comm.size, [(1, comm.size)])


@pytest.fixture(params=["as found out", "staged"])
def ranks(request, comm, monkeypatch):
    """All ranks: as they are, and as if MPI took no device addresses; a new communicator asks anew."""
    if request.param == "staged":
        monkeypatch.setenv(aware.VARIABLE, "0")
    fresh = comm.Dup()
    yield fresh
    fresh.Free()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_updates_equal_the_reference(ranks, verdict, backend, launch):
    found = []
    for number, (pencil, options, dtype) in enumerate(updates.cases(grids(ranks))):
        options |= {"device": "cuda", "backend": backend, "launch": launch, "graphs": number % 2 == 1}
        found += updates.problems(pencil, dtype, ranks, options)
    verdict(found)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_faces_with_and_without_gaps(ranks, verdict, backend, captured):
    """Each axis in turn is the one that is cut: faces leave from the array, or are packed; fields go apart, or not."""
    found = []
    for entry, axis in ((0, 2), (1, 2), (1, 0)):
        grid = ProcessGrid((ranks.size, 1) if entry == 0 else (1, ranks.size))
        pencil = Pencil((65, 82, 96), grid, axis, halo=(2, 1, (1, 2)))
        for fields in (1, 3):
            options = {"periods": (True, True, False), "fields": fields, "device": "cuda", "backend": backend}
            for axes in (None, (0,), (1,), (2,)):
                found += updates.repeated(pencil, ranks, 2, captured, axes=axes, **options)
    verdict(found)


def test_arrays_of_other_libraries_and_fields_apart(ranks, verdict):
    found = []
    pencil = Pencil((12, 11, 10), ProcessGrid(grids(ranks)[0]), 2, halo=1, order="contiguous")
    before, after = (arrays[ranks.rank] for arrays in updates.outcome(pencil, (True,) * 3, None, "f8"))
    with HaloPlan(pencil, "f8", ranks, periods=True, device="cuda", fields=2) as plan:
        arrays = [cupy.asarray(before), cupy.asarray(before + 1)]
        call = plan.bind(arrays)
        call.start()
        while not call.test():
            pass
        for field, array in enumerate(arrays):
            if not np.array_equal(cupy.asnumpy(array), after + field):
                found.append(f"field {field}")
    verdict(found)


def test_a_busy_producer_and_a_later_consumer_on_one_stream(ranks, verdict):
    spin = cupy.RawKernel(
        'extern "C" __global__ void s(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "s"
    )
    pencil = Pencil((32, 32, 32), ProcessGrid(grids(ranks)[0]), 0, halo=2)
    before, after = (arrays[ranks.rank] for arrays in updates.outcome(pencil, (True,) * 3, None, "f8"))
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    for launch in LAUNCHES:
        with HaloPlan(pencil, "f8", ranks, periods=True, device="cuda", launch=launch) as plan:
            good = cupy.asarray(before)
            array = cupy.full_like(good, -5)
            cupy.cuda.Device().synchronize()
            with stream:
                spin((1,), (1,), (np.int64(50 * 1_900_000),))
                array[...] = good
                plan.run(array, stream=stream)
                kept = array.copy()
                array[...] = -7  # allowed as soon as run has returned
            stream.synchronize()
            wrong = reference.mismatch(pencil, ranks.rank, cupy.asnumpy(kept), after)
            found += [f"{launch}: {wrong}"] if wrong else []
    verdict(found)


def test_the_callers_capture_is_refused_and_stays_valid(comm, verdict):
    pencil = Pencil((8, 8, 8), ProcessGrid((1, comm.size)), 0, halo=1)
    before, after = (arrays[comm.rank] for arrays in updates.outcome(pencil, (True,) * 3, None, "f8"))
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    with HaloPlan(pencil, "f8", comm, periods=True, device="cuda", backend="mpi_p2p") as plan:
        array, other = cupy.asarray(before), cupy.zeros(10)
        other += 0  # the kernel is loaded before the capture
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                plan.run(array, stream=stream)
                if comm.size > 1:
                    found.append("nothing was raised")
            except RuntimeError as error:
                if "captured" not in str(error):
                    found.append(str(error))
            other += 1
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        if int(other.sum()) != 10:
            found.append("the capture was damaged")
        plan.run(array)
        if not np.array_equal(cupy.asnumpy(array), after):
            found.append("the update after the capture is wrong")
    verdict(found)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("graphs", [False, True])
def test_stamped_runs(comm, verdict, launch, graphs):
    """Every run carries its own number, and the device compares all of them: a send must never overtake its pack."""
    runs = 2000
    pencil = Pencil((16, 32, 64), ProcessGrid((1, comm.size)), 0, halo=(1, 0, 2))
    rng = np.random.default_rng(comm.rank)
    options = {"device": "cuda", "launch": launch, "backend": "mpi_p2p_pl", "graphs": graphs}
    with HaloPlan(pencil, "f8", comm, periods=True, **options) as plan:
        array = cupy.asarray(plan.empty_src())
        wrong = cupy.zeros((), "i8")
        delays = rng.integers(0, 200, runs)
        for stamp in range(runs):
            array[...] = -1
            pencil.interior(array, comm.rank)[...] = stamp
            if delays[stamp] == 0:
                cupy.cuda.get_current_stream().synchronize()
            plan.run(array)
            wrong += (array != stamp).sum()
        verdict([f"{int(wrong)} items carry a wrong stamp"] if int(wrong) else [])
