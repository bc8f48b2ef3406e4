# SPDX-License-Identifier: Apache-2.0
"""Transposes between GPU arrays over MPI: all launches and transports, graphs, streams, captures, stamped runs."""

import itertools

import numpy as np
import pytest
from device import cupy, grids, inplace_problems_of, problems_of, spin

from cudecomp import Pencil, ProcessGrid, TransposePlan
from cudecomp import testing as reference

pytestmark = pytest.mark.gpu

LAUNCHES = ["fused", "per_peer", "per_peer_events"]
BACKENDS = ["mpi_p2p", "mpi_p2p_pl", "mpi_a2a"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_transposes_equal_the_reference(comm, verdict, backend, launch):
    found = []
    cases = itertools.cycle(itertools.product(["f4", "c16", "i2"], [(0, 1), (1, 2), (0, 2), (2, 1), (1, 0)]))
    for grid, shape in itertools.product(grids(comm), [(3, 5, 2), (25, 26, 27), (64, 32, 33)]):
        for graphs, orders in itertools.product(
            [False, True], [(None, None), ("contiguous", "contiguous"), (None, (2, 0, 1))]
        ):
            dtype, (a, b) = next(cases)
            x = Pencil(shape, grid, a, order=orders[0], halo=((1, 0), 0, 2))
            y = Pencil(shape, grid, b, order=orders[1], padding=(0, 1, 3))
            with TransposePlan(x, y, dtype, comm, device="cuda", backend=backend, launch=launch) as plan:
                found += problems_of(plan, graphs=graphs)
    verdict(found)


def test_all_orders_on_the_device_equal_the_host(comm, verdict):
    found = []
    for a, b in itertools.product(itertools.permutations(range(3)), repeat=2):
        grid = grids(comm)[0]
        x, y = Pencil((5, 6, 7), grid, 0, order=a), Pencil((5, 6, 7), grid, 1, order=b)
        with TransposePlan(x, y, "f8", comm, device="cuda", backend="mpi_p2p_pl") as plan:
            found += problems_of(plan, rounds=1)
    verdict(found)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_in_place_and_fields(comm, verdict, launch):
    found = []
    for grid, fields in itertools.product(grids(comm), [1, 3]):
        x, y = Pencil((16, 15, 14), grid, 0), Pencil((16, 15, 14), grid, 1, order="contiguous", halo=1)
        options = {"launch": launch, "inplace": True, "fields": fields, "backend": "mpi_p2p"}
        with TransposePlan(x, y, "f8", comm, device="cuda", **options) as plan:
            found += inplace_problems_of(plan)
    verdict(found)


def test_a_capture_is_the_first_operation_and_captures_are_reused(comm, verdict):
    x, y = Pencil((16, 8, 8), grids(comm)[0], 0), Pencil((16, 8, 8), grids(comm)[0], 1)
    with TransposePlan(x, y, "f8", comm, device="cuda", backend="mpi_p2p_pl", graphs=True) as plan:
        found = problems_of(plan, graphs=True)
        src = cupy.asarray(reference.fill(x, comm.rank, "f8"))
        dst = cupy.empty_like(cupy.asarray(reference.fill(y, comm.rank, "f8")))
        before = plan.stats
        for _ in range(5):
            plan.run(src, dst)
        after = plan.stats
        if (after["captures"] - before["captures"], after["replays"] - before["replays"]) != (1, 5):
            found.append(f"captures not in effect: {before} {after}")
    verdict(found)


def test_the_callers_capture_is_refused_and_stays_valid(comm, verdict):
    x, y = Pencil((8, 8, 8), ProcessGrid((1, comm.size)), 1), Pencil((8, 8, 8), ProcessGrid((1, comm.size)), 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    with TransposePlan(x, y, "f8", comm, device="cuda", backend="mpi_p2p") as plan:
        src, dst = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
        other = cupy.zeros(10)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            try:
                plan.run(src, dst, stream=stream)
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
        found += problems_of(plan)
    verdict(found)


def test_a_busy_producer_and_a_later_consumer_on_one_stream(comm, verdict):
    grid = grids(comm)[0]
    x, y = Pencil((32, 32, 32), grid, 0), Pencil((32, 32, 32), grid, 1, order="contiguous")
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    for launch in LAUNCHES:
        with TransposePlan(x, y, "f8", comm, device="cuda", backend="mpi_p2p_pl", launch=launch) as plan:
            good = cupy.asarray(reference.fill(x, comm.rank, "f8"))
            src, dst = cupy.full_like(good, -5), cupy.asarray(reference.poisoned(y, comm.rank, "f8"))
            cupy.cuda.Device().synchronize()
            spin(stream, 50_000)
            with stream:
                src[...] = good
                plan.run(src, dst, stream=stream)
                src[...] = -7  # allowed as soon as run has returned
                kept = dst.copy()
            stream.synchronize()
            wrong = reference.mismatch(y, comm.rank, cupy.asnumpy(kept))
            found += [f"{launch}: {wrong}"] if wrong else []
    verdict(found)


def test_what_was_chosen_is_said(comm, verdict):
    x, y = Pencil((8, 8, 8), grids(comm)[0], 0), Pencil((8, 8, 8), grids(comm)[0], 1)
    with TransposePlan(x, y, "f8", comm, device="cuda", backend="mpi_p2p") as plan:
        text = plan.explain()
        known = (
            comm.size == 1 or "staged through pinned host memory" in text or "device buffers are given to MPI" in text
        )
        verdict([] if known else [text])


def test_a_false_claim_of_awareness_is_found_out(comm, verdict, monkeypatch):
    """An MPI is claimed to take device addresses and cannot: a test message finds that out, and messages are staged."""
    from cudecomp import aware

    truth = aware._moves_device_memory()
    monkeypatch.setenv(aware.VARIABLE, "1")
    fresh = comm.Dup()
    grid = grids(comm)[0]
    x, y = Pencil((8, 8, 8), grid, 0), Pencil((8, 8, 8), grid, 1)
    with TransposePlan(x, y, "f8", fresh, device="cuda", backend="mpi_p2p") as plan:
        found = problems_of(plan)
        if not truth and "test message between device buffers failed" not in plan.explain():
            found.append(plan.explain())
        if truth and "given to MPI" not in plan.explain():
            found.append(plan.explain())
    fresh.Free()
    verdict(found)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("graphs", [False, True])
def test_stamped_runs(comm, verdict, launch, graphs):
    """Every run carries its own number, and the device compares all of them: a send must never overtake its pack."""
    runs = 10_000 if launch == "fused" and not graphs else 2000
    grid = ProcessGrid((1, comm.size))
    x, y = Pencil((16, 32, 64), grid, 1), Pencil((16, 32, 64), grid, 2, order="contiguous")
    rng = np.random.default_rng(comm.rank)
    with TransposePlan(x, y, "f8", comm, device="cuda", launch=launch, backend="mpi_p2p_pl", graphs=graphs) as plan:
        src, dst = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
        wrong = cupy.zeros((), "i8")
        delays = rng.integers(0, 200, runs)
        for stamp in range(runs):
            src[...] = stamp
            if delays[stamp] == 0:
                cupy.cuda.get_current_stream().synchronize()
            plan.run(src, dst)
            wrong += (dst != stamp).sum()
        verdict([f"{int(wrong)} items carry a wrong stamp"] if int(wrong) else [])
