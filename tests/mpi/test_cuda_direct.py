# SPDX-License-Identifier: Apache-2.0
"""Transposes between GPU arrays whose ranks map each other's memory: results, graphs, order, stamped runs, failures."""

import itertools

import numpy as np
import pytest
from device import cupy, grids, inplace_problems_of, problems_of, spin

import cudecomp
from cudecomp import Pencil, ProcessGrid, TransposePlan
from cudecomp import testing as reference

pytestmark = pytest.mark.gpu

LAUNCHES = ["fused", "per_peer"]


def direct(x, y, comm, dtype="f8", **options):
    return TransposePlan(x, y, dtype, comm, device="cuda", backend="direct", **options)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_transposes_equal_the_reference(comm, verdict, launch):
    found = []
    cases = itertools.cycle(itertools.product(["f4", "c16", "i2", "i1"], [(0, 1), (1, 2), (0, 2), (2, 1), (1, 0)]))
    for grid, shape in itertools.product(grids(comm), [(3, 5, 2), (25, 26, 27), (64, 32, 33)]):
        for graphs, mapped, orders in itertools.product(
            [False, True], [False, True], [(None, None), ("contiguous", "contiguous"), (None, (2, 0, 1))]
        ):
            dtype, (a, b) = next(cases)
            x = Pencil(shape, grid, a, order=orders[0], halo=((1, 0), 0, 2))
            y = Pencil(shape, grid, b, order=orders[1], padding=(0, 1, 3))
            with direct(x, y, comm, dtype, launch=launch) as plan:
                found += problems_of(plan, graphs=graphs, empty=plan.empty_dst if mapped else None)
    verdict(found)


def test_all_orders(comm, verdict):
    found = []
    grid = grids(comm)[0]
    for a, b in itertools.product(itertools.permutations(range(3)), repeat=2):
        with direct(Pencil((5, 6, 7), grid, 0, order=a), Pencil((5, 6, 7), grid, 1, order=b), comm) as plan:
            found += problems_of(plan, rounds=1)
    verdict(found)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_in_place_and_fields(comm, verdict, launch):
    found = []
    for grid, fields, graphs in itertools.product(grids(comm), [1, 3], [False, True]):
        x, y = Pencil((16, 15, 14), grid, 0), Pencil((16, 15, 14), grid, 1, order="contiguous", halo=1)
        with direct(x, y, comm, launch=launch, inplace=True, fields=fields) as plan:
            found += inplace_problems_of(plan, graphs)
    verdict(found)


def turning(comm, shape=(16, 32, 64), **options):
    """Two plans, there and back, between two pencils that all ranks exchange."""
    grid = ProcessGrid((1, comm.size))
    x, y = Pencil(shape, grid, 1), Pencil(shape, grid, 2, order="contiguous")
    return direct(x, y, comm, **options), direct(y, x, comm, **options)


def forward(comm, **options):
    """The first of the two alone."""
    there, back = turning(comm, **options)
    back.close()
    return there


# --- memory -----------------------------------------------------------------------------------------------------------


def test_peers_write_to_registered_arrays_and_to_the_landing_otherwise(comm, verdict):
    there = forward(comm)
    with there as plan:
        found = problems_of(plan, rounds=2)
        if plan.stats["landings"] != (2 if comm.size > 1 else 0):
            found.append(f"an array that peers do not know: {plan.stats}")
        before = plan.stats["landings"]
        found += problems_of(plan, empty=plan.empty_dst)
        src = cupy.asarray(reference.fill(plan.src, plan.rank, "f8"))
        dst = cupy.empty(plan.dst.memory_shape(plan.rank))
        plan.run(src, plan.register(dst))
        wrong = reference.mismatch(plan.dst, plan.rank, cupy.asnumpy(dst), reference.fill(plan.dst, plan.rank, "f8"))
        found += [wrong] if wrong else []
        if plan.stats["landings"] != before:
            found.append(f"arrays that peers do know: {plan.stats}")
    verdict(found)


def test_memory_that_cannot_be_shared(comm, alike, verdict):
    """Memory of cudaMallocAsync works through the landing, and cannot be registered."""
    there = forward(comm)
    pool = cupy.cuda.MemoryAsyncPool()
    with there as plan, cupy.cuda.using_allocator(pool.malloc):
        verdict(problems_of(plan))
        dst = cupy.empty(plan.dst.memory_shape(plan.rank))
        alike(OSError, ["cannot be shared", "cudaMalloc"], lambda: plan.register(dst))


def test_memory_freed_and_allocated_again_at_the_same_place(comm, verdict):
    found = []
    there = forward(comm)
    with there as plan:
        src = cupy.asarray(reference.fill(plan.src, plan.rank, "f8"))
        nbytes = 8 * plan.dst.size(plan.rank)
        places = set()
        for _ in range(6):
            address = cupy.cuda.runtime.malloc(max(nbytes, 4 << 20))
            places.add(address)
            raw = cupy.cuda.UnownedMemory(address, nbytes, None)
            dst = cupy.ndarray(plan.dst.memory_shape(plan.rank), "f8", cupy.cuda.MemoryPointer(raw, 0))
            with direct(plan.src, plan.dst, comm) as other:
                other.register(dst)
                dst[...] = -1
                other.run(src, dst)
                wrong = reference.mismatch(
                    plan.dst, plan.rank, cupy.asnumpy(dst), reference.fill(plan.dst, plan.rank, "f8")
                )
                found += [wrong] if wrong else []
            del dst, raw
            cupy.cuda.runtime.free(address)
        if len(places) == 6:
            found.append("no place was used twice: this has tested nothing")
    verdict(found)


def test_memory_comes_back(comm, verdict):
    def used():
        cupy.cuda.Device().synchronize()
        comm.Barrier()
        free, total = cupy.cuda.runtime.memGetInfo()
        comm.Barrier()
        return total - free

    def build_and_run():
        there, back = turning(comm, shape=(64, 64, 64))
        with there, back:
            a, b = cupy.asarray(there.empty_src()), cupy.asarray(there.empty_dst())
            call = there.capture(a, b)
            call.replay()
            back.run(b, a)

    for _ in range(3):
        build_and_run()
    before = used()
    for _ in range(100):
        build_and_run()
    more = used() - before
    verdict([f"{more >> 20} MiB more in use after 100 plans"] if more > 32 << 20 else [])


@pytest.mark.parametrize("rising", [True, False])
def test_plans_closed_in_another_order_on_each_rank(comm, verdict, rising):
    plans = [*turning(comm), *turning(comm, shape=(8, 8, 8))]
    found = [text for plan in plans for text in problems_of(plan)]
    for plan in plans if rising == (comm.rank % 2 == 0) else plans[::-1]:
        plan.close()
    with forward(comm) as plan:
        found += problems_of(plan)
    verdict(found)


# --- streams and graphs -----------------------------------------------------------------------------------------------


def test_a_busy_producer_and_a_later_consumer_on_another_stream(comm, verdict):
    there = forward(comm)
    producer, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    found = []
    with there as plan:
        good = cupy.asarray(reference.fill(plan.src, plan.rank, "f8"))
        src, dst = cupy.full_like(good, -5), cupy.asarray(plan.empty_dst())
        for way in (plan.run, lambda src, dst, stream: plan.capture(src, dst).replay(stream)):
            cupy.cuda.Device().synchronize()
            spin(producer, 50_000)
            with producer:
                src[...] = good
                way(src, dst, stream=producer)
                src[...] = -7
                done = producer.record()
            consumer.wait_event(done)
            with consumer:
                kept = dst.copy()
            consumer.synchronize()
            wrong = reference.mismatch(
                plan.dst, plan.rank, cupy.asnumpy(kept), reference.fill(plan.dst, plan.rank, "f8")
            )
            found += [wrong] if wrong else []
    verdict(found)


def test_runs_within_a_capture_of_the_callers(comm, verdict):
    """The caller's graph holds a run, a replay, and its own kernels, and is launched with new values each time."""
    found = []
    there, back = turning(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    with there, back:
        a, b = cupy.asarray(there.empty_src()), cupy.asarray(there.empty_dst())
        a[...] = 1
        call = back.capture(b, a)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            a *= 2
            there.run(a, b, stream=stream)
            b += 1
            call.replay(stream=stream)
            graph = stream.end_capture()
            for _ in range(10):
                graph.launch()
        stream.synchronize()
        if not bool((a == 2**10 + 2**10 - 1).all()):
            found.append(f"got {a.ravel()[:4]}, expected {2**11 - 1}")
        call.replay()
        there.run(a, b)
        found += [] if bool((b == 2**11 - 1).all()) else ["runs after the capture"]
    verdict(found)


def test_a_chain_is_one_graph(comm, verdict):
    found = []
    grid = ProcessGrid((1, comm.size))
    x = Pencil((16, 24, 32), grid, 0)
    y, z = x.pencil(1, order="contiguous"), x.pencil(2, order=(2, 0, 1))
    pairs = [(x, y), (y, z), (z, x)]
    plans = [direct(a, b, comm) for a, b in pairs]
    arrays = [cupy.asarray(plan.empty_src()) for plan in plans]
    calls = [plan.bind(arrays[i], arrays[(i + 1) % 3]) for i, plan in enumerate(plans)]
    chain = cudecomp.capture(*calls, *calls)
    values = cupy.asarray(reference.fill(x, comm.rank, "f8"))
    for step in range(5):
        arrays[0][...] = values + step
        arrays[1][...] = arrays[2][...] = -1
        chain.replay()
        for pencil, array in zip((x, y, z), arrays, strict=True):
            wanted = reference.fill(pencil, comm.rank, "f8") + step
            if not np.array_equal(cupy.asnumpy(array), wanted):
                found.append(f"step {step}, axis {pencil.axis}")
    if any(plan.stats["runs"] != 10 or plan.stats["captures"] != 1 for plan in plans):
        found.append(f"not one graph: {[plan.stats for plan in plans]}")
    for plan in plans:
        plan.close()
    verdict(found)


def test_a_thousand_replays_are_queued_and_the_host_goes_on(comm, verdict):
    there, back = turning(comm)
    found = []
    with there, back:
        a, b = cupy.asarray(there.empty_src()), cupy.asarray(there.empty_dst())
        a[...] = comm.rank
        first, second = there.capture(a, b), back.capture(b, a)
        first.replay()
        second.replay()
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
        comm.Barrier()
        if comm.rank == 0:
            spin(stream, 200_000)
        for _ in range(400):
            first.replay()
            second.replay()
        if stream.done:
            found.append("the host has waited, or the device was too quick for this test")
        stream.synchronize()
        found += [] if bool((a == comm.rank).all()) else ["wrong values"]
    verdict(found)


def test_start_and_wait_beside_other_work(comm, verdict):
    there, back = turning(comm)
    found = []
    with there, back:
        a, b = cupy.asarray(there.empty_src()), cupy.asarray(there.empty_dst())
        other = cupy.zeros(1000)
        for step in range(20):
            a[...] = step
            call = there.bind(a, b)
            call.start()
            try:
                back.run(b, a)
                found.append("a pending array was not refused")
            except RuntimeError:
                pass
            other += 1
            call.wait()
            found += [] if bool((b == step).all()) else [f"step {step}"]
        found += [] if bool((other == 20).all()) else ["other work"]
    verdict(found)


# --- failures ---------------------------------------------------------------------------------------------------------


def failure_of(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_a_peer_that_does_not_come(comm, verdict):
    """The device gives up, the next call says so, and the peers learn of it."""
    if comm.size == 1:
        pytest.skip("needs peers")
    there = forward(comm, timeout=0.5)
    a, b = cupy.asarray(there.empty_src()), cupy.asarray(there.empty_dst())
    there.run(a, b)
    if comm.rank:
        there.run(a, b)
    cupy.cuda.Device().synchronize()
    comm.Barrier()
    first = failure_of(lambda: there.run(a, b))
    cupy.cuda.Device().synchronize()
    second = failure_of(there.check)
    found = []
    if comm.rank and (first is None or first[0] not in ("TimeoutError", "PoisonedError")):
        found.append(f"{first}")
    if comm.rank and first and "rank " not in first[1]:
        found.append(f"no peer is named: {first}")
    if second is None or second[0] != "PoisonedError":
        found.append(f"not poisoned for good: {first}, then {second}")
    failure_of(there.close)
    with forward(comm) as plan:
        found += problems_of(plan)
    verdict(found)


def test_a_block_left_by_an_exception_reaches_the_peers(comm, verdict):
    if comm.size == 1:
        pytest.skip("needs peers")
    found = []
    plan = forward(comm)
    a, b = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
    plan.run(a, b)
    cupy.cuda.Device().synchronize()
    comm.Barrier()
    if comm.rank == comm.size - 1:
        failure_of(lambda: _leave(plan))
    else:
        plan.run(a, b)
        cupy.cuda.Device().synchronize()
        seen = failure_of(plan.check)
        # With more than two ranks, it may be told by one that has learnt of it before.
        if seen is None or seen[0] != "PoisonedError" or "has failed" not in seen[1]:
            found.append(f"{seen}")
    failure_of(plan.close)
    verdict(found)


def _leave(plan):
    with plan:
        raise KeyError("something of the user's")


def test_a_plan_with_work_in_flight_is_closed(comm, verdict):
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    for _ in range(5):
        plan = forward(comm)
        a, b = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
        a[...] = 3
        cupy.cuda.Device().synchronize()
        spin(stream, 2000 * (1 + comm.rank))
        plan.run(a, b, stream=stream)
        plan.close()
        stream.synchronize()
        found += [] if bool((b == 3).all()) else ["wrong values"]
    verdict(found)


# --- peers that cannot be mapped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["pairs", "uneven"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_hosts_that_are_made_up(comm, verdict, nodes, launch):
    """Ranks of other hosts get messages, within the same operation."""
    hosts = [rank // 2 if nodes == "pairs" else min(rank, 1) for rank in range(comm.size)]
    found = []
    for grid in grids(comm):
        for orders, inplace in itertools.product([(None, None), (None, "contiguous")], [False, True]):
            x = Pencil((12, 13, 14), grid, 0, order=orders[0])
            y = Pencil((12, 13, 14), grid, 1, order=orders[1])
            with direct(x, y, comm, nodes=hosts, launch=launch, inplace=inplace, fields=2 if inplace else None) as plan:
                if inplace:
                    found += inplace_problems_of(plan)
                else:
                    found += problems_of(plan) + problems_of(plan, graphs=True, empty=plan.empty_dst)
    verdict(found)


# --- stamped runs -----------------------------------------------------------------------------------------------------


def delayed(monkeypatch, comm, seed):
    """Put copies of random sizes before and after the signals of each call: every rank is late in its own way."""
    from cudecomp.cuda import direct as module
    from cudecomp.cuda.graph import Work

    rng = np.random.default_rng([seed, comm.rank])
    noise = cupy.zeros(1 << 24, "u1")
    copies = [delay_of(noise, 1 << int(log)) for log in range(10, 23)]
    made = module.CudaDirectEngine._make_work

    def make_work(self, bound):
        work = made(self, bound)
        steps = []
        for step in work.steps:
            steps += [copies[i] for i in rng.integers(0, len(copies), rng.integers(0, 3))] + [step]
        return Work([*steps, copies[int(rng.integers(0, len(copies)))]], work.lands, work.kept)

    monkeypatch.setattr(module.CudaDirectEngine, "_make_work", make_work)


def delay_of(noise, nbytes):
    """A step of device work that takes its time."""
    from cudecomp.boxes import compile_copies
    from cudecomp.cuda.graph import PackStep
    from cudecomp.pack import AddressTable, PackProgram
    from cudecomp.schedule import Copy

    copy = Copy((nbytes,), 0, 0, (1,), 1, 0, (1,))
    program = PackProgram("cuda", compile_copies([[copy]], 1), 1, 2, max_blocks=1)
    table = AddressTable(2)
    table[0], table[1] = noise.data.ptr, noise.data.ptr + noise.nbytes // 2
    return PackStep(program, table)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("how", ["replay", "chain", "run"])
def test_stamped_turns(comm, verdict, monkeypatch, mapped, how):
    """A -> B -> A, each time with its own number, checked on the device at both ends; all ranks late at random."""
    delayed(monkeypatch, comm, 7)
    runs = {"replay": 10_000, "chain": 10_000, "run": 3000}[how] // (1 if mapped else 4)
    there, back = turning(comm)
    rng = np.random.default_rng(comm.rank)
    with there, back:
        a = cupy.asarray(there.empty_src()) if mapped else cupy.empty(there.src.memory_shape(comm.rank))
        b = cupy.asarray(there.empty_dst()) if mapped else cupy.empty(there.dst.memory_shape(comm.rank))
        wrong = cupy.zeros((), "i8")
        first, second = there.bind(a, b).capture(), back.bind(b, a).capture()
        chain = cudecomp.capture(first, second)
        delays = rng.integers(0, 50, runs)
        for stamp in range(runs):
            a[...] = stamp
            if delays[stamp] == 0:
                cupy.cuda.get_current_stream().synchronize()
            if how == "chain":
                chain.replay()
            else:
                first.replay() if how == "replay" else first.run()
                wrong += (b != stamp).sum()
                a[...] = -1
                second.replay() if how == "replay" else second.run()
            wrong += (a != stamp).sum()
        verdict([f"{int(wrong)} items carry a wrong stamp"] if int(wrong) else [])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_stamped_turns_of_a_small_plan_and_a_large_one(comm, verdict):
    small, large = turning(comm, shape=(4, 8, 8)), turning(comm, shape=(32, 64, 64))
    plans = [*small, *large]
    a, c = (cupy.asarray(pair[0].empty_src()) for pair in (small, large))
    b, d = (cupy.asarray(pair[0].empty_dst()) for pair in (small, large))
    calls = [small[0].capture(a, b), small[1].capture(b, a), large[0].capture(c, d), large[1].capture(d, c)]
    wrong = cupy.zeros((), "i8")
    for stamp in range(2500):
        a[...] = stamp
        c[...] = -stamp
        for call in calls:
            call.replay()
        wrong += (a != stamp).sum() + (b != stamp).sum() + (c != -stamp).sum() + (d != -stamp).sum()
    found = [f"{int(wrong)} items carry a wrong stamp"] if int(wrong) else []
    for plan in plans:
        plan.close()
    verdict(found)
