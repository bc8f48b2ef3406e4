# SPDX-License-Identifier: Apache-2.0
"""Times the ways of launching the packs of one rank, from the call to the last message started; one process, one GPU.

    python bench/launch.py --ranks 4 64 1024 --json launch.json --plot launch.png

The rank is number 0 of P in a grid (1, P) and sends to the P - 1 others. P = 4 is the transpose from axis 1 to axis 2
of the array that a geometry is named after. With more ranks the rank's own array keeps its size: axis 2 grows with P,
axis 1 is at least 8 P, and axis 0 shrinks by as much as axis 1 has grown. "fixed" keeps the global array instead and
takes a square grid. Nothing is skipped where a message could leave from the array itself.

Real persistent requests of 1 KiB to this process itself stand for the messages, so that only starting them counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudecomp import Exchange, Pencil, ProcessGrid
from cudecomp.boxes import compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Copy, Schedule

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure

clock = time.perf_counter_ns

MESSAGE_BYTES = 1024
LEAST_PART = 8  # extent along axis 1 of a message
POLLS = 1 << 16  # between two looks at whether the device has failed
FEWEST, MOST = 9, 500  # rounds
SAMPLE = 1 << 14  # items of a message that are compared
PERIOD = 1_000_003  # items after which the source repeats: prime, so that no stride is a multiple of it


class Case(NamedTuple):
    """An item and the memory orders of the two pencils; None is the identity."""

    dtype: str
    src_order: Any
    dst_order: Any


# A message of "whole" is one contiguous piece of the source, one of "runs" many; "permuted" changes the fastest axis.
CASES = {
    "f8 whole": Case("f8", (1, 0, 2), (1, 0, 2)),
    "f8 runs": Case("f8", None, None),
    "c16 permuted": Case("c16", "contiguous", "contiguous"),
}

GEOMETRIES = {"512^3": (512, 512, 512), "2048 x 512 x 512": (2048, 512, 512), "fixed 512^3": (512, 512, 512)}


def pencils(geometry: str, ranks: int, case: Case, shrink: int = 1) -> tuple[Pencil, Pencil]:
    """Return the source and destination pencils of a geometry for this many ranks, its extents divided by `shrink`."""
    n0, n1, n2 = (n // shrink for n in GEOMETRIES[geometry])
    grid = (1, ranks)
    if geometry.startswith("fixed"):
        grid = (isqrt(ranks), ranks // isqrt(ranks))
    else:
        wide = max(n1, LEAST_PART * ranks)
        n0, n1, n2 = max(1, n0 * n1 // wide), wide, max(1, n2 // 4) * ranks
    src = Pencil((n0, n1, n2), ProcessGrid(grid), 1, order=case.src_order)
    return src, src.pencil(2, order=case.dst_order)


# --- devices ---------------------------------------------------------------------------------------------------------


class HostFlags:
    """Completion counters of host programs."""

    def __init__(self, count: int):
        self.values, self.epoch = np.zeros(count, np.uint64), 0
        self.address = self.values.ctypes.data

    def begin(self) -> None:
        """Note that every segment is launched once more."""
        self.epoch += 1

    def ready(self, first: int) -> int:
        """Return the first segment from `first` on that is not complete."""
        late = np.flatnonzero(self.values[first:] < self.epoch)
        return first + int(late[0]) if late.size else len(self.values)


class Host(measure.Host):
    """The host device: runs the same code without a GPU, to try it; its launches are the copies themselves."""

    stream = 0

    def memory(self, nbytes: int) -> Any:
        """Return an owner of memory, and its address."""
        owner = self.empty(nbytes)
        return owner, owner.ctypes.data

    def flags(self, count: int) -> Any:
        """Return completion flags, and their address."""
        flags = HostFlags(count)
        return flags, flags.address

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes."""
        np.copyto(at(target, nbytes), at(source, nbytes))

    def synchronize(self) -> None:
        """Nothing is pending."""

    def check(self) -> None:
        """Nothing can have failed."""

    def ways(self, pack: Packing) -> dict[str, Way]:
        """Return the ways of launching."""
        run, flags = pack.flagged.run, by_flags(pack.flags)

        def single() -> None:
            for i in range(pack.flagged.segments):
                run(pack.table, i, i + 1)

        return {
            "fused": Way(partial(run, pack.table), flags),
            "per_peer, flags": Way(single, flags),
            "fused, no flags": Way(partial(pack.plain.run, pack.table)),
        }

    def launch_loop(self, program: PackProgram, table: AddressTable) -> Callable[[], None] | None:
        """Return a loop of compiled code over the launches of all segments, where there is one."""
        return None


class Cuda:
    """The current GPU, and one stream on it."""

    name = "cuda"

    def __init__(self) -> None:
        try:
            from cudecomp.cuda import graph, memory, runtime
        except ImportError as error:
            raise SystemExit(f"bench/launch.py: this cudecomp was built without CUDA ({error}); see --device") from None
        try:
            count = runtime.device_count()
        except RuntimeError as error:
            raise SystemExit(f"bench/launch.py: no GPU to measure ({error}); see --device") from None
        if count == 0:
            raise SystemExit("bench/launch.py: no GPU to measure; see --device")
        self._graph, self._memory, self._runtime = graph, memory, runtime
        self._stream = runtime.Stream()
        self.stream = self._stream.address

    def description(self) -> str:
        """Return the hardware in words."""
        return self._runtime.device_name(self._runtime.current_device())

    def memory(self, nbytes: int) -> Any:
        """Return an owner of device memory, and its address."""
        owner = self._memory.DeviceMemory(nbytes)
        return owner, owner.address

    def flags(self, count: int) -> Any:
        """Return completion flags in pinned memory, and their address."""
        memory = self._memory.PinnedMemory(8 * count)
        return self._runtime.Flags(memory, count), memory.address

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes, ordered on the stream."""
        self._runtime.copy(target, source, nbytes, self.stream)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._runtime.synchronize(self.stream)

    def check(self) -> None:
        """Raise if work has failed."""
        self._stream.failed()

    def ways(self, pack: Packing) -> dict[str, Way]:
        """Return the ways of launching; the programs, flags and events are those that plans use."""
        count, table, stream = pack.messages, pack.table, self.stream
        singles, record = self._graph.launch_singles, self._graph.Graph
        flags = by_flags(pack.flags)
        events, others = ([self._runtime.Event() for _ in range(count)] for _ in range(2))
        graph, event_graph = record(pack.flagged, table, count), record(pack.plain, table, count, others)
        return {
            "fused": Way(partial(pack.flagged.run, table, 0, -1, stream), flags),
            "per_peer, flags": Way(partial(singles, pack.flagged, table, count, (), stream), flags),
            "per_peer, events": Way(partial(singles, pack.plain, table, count, events, stream), by_events(events)),
            "per_peer graph, events": Way(partial(event_graph.launch, stream), by_events(others)),
            "per_peer graph, flags": Way(partial(graph.launch, stream), flags),
            "fused graph": Way(partial(record(pack.flagged, table, 0).launch, stream), flags),
            "fused, no flags": Way(partial(pack.plain.run, table, 0, -1, stream)),
        }

    def launch_loop(self, program: PackProgram, table: AddressTable) -> Callable[[], None] | None:
        """Return a loop of compiled code over the launches of all segments."""
        return partial(self._graph.launch_singles, program, table, program.segments, (), self.stream)


DEVICES = {device.name: device for device in (Host, Cuda)}


def nothing() -> None:
    """Events need no preparation."""


def done_events(events: Sequence[Any], first: int) -> int:
    """Return the first event from `first` on that is not complete."""
    while first < len(events) and events[first].done():
        first += 1
    return first


def at(address: int, nbytes: int) -> np.ndarray:
    """Return the bytes at an address of the host."""
    from mpi4py import MPI

    return np.frombuffer(MPI.memory.fromaddress(address, nbytes), np.uint8)


# --- what is launched ------------------------------------------------------------------------------------------------


class Signal(NamedTuple):
    """How the host learns that segments are complete."""

    begin: Callable[[], None]  # before a launch
    ready: Callable[[int], int]  # the first segment from the given one on that is not complete
    any: Callable[[], bool]  # whether the first one is: a scan over thousands of events takes its time


class Way(NamedTuple):
    """A way of launching; without a signal nobody is told before the end."""

    launch: Callable[[], None]
    signal: Signal | None = None

    def begin(self) -> None:
        """Prepare for a launch."""
        if self.signal:
            self.signal.begin()


def by_flags(flags: Any) -> Signal:
    """Return the signal that flags make."""
    return Signal(flags.begin, flags.ready, lambda: flags.ready(0) > 0)


def by_events(events: Sequence[Any]) -> Signal:
    """Return the signal that events make."""
    return Signal(nothing, partial(done_events, events), events[0].done)


class Packing:
    """The pack program of a rank, with flags and without, and its memory."""

    def __init__(self, device: Any, src: Pencil, dst: Pencil, dtype: str):
        self.itemsize = np.dtype(dtype).itemsize
        self.schedule = schedule = Schedule(Exchange(src, dst, 0), self.itemsize, zero_copy=False)
        self.messages = messages = schedule.message_segments
        self.nbytes = src.size(0) * self.itemsize
        self.flags, flags = device.flags(messages)
        bases, segments = schedule.bases, schedule.pack
        marks = [(bases.flags, 8 * i) for i in range(messages)] + [(-1, 0)] * (len(segments) - messages)
        boxes = compile_copies(segments, self.itemsize)
        self.table = AddressTable(bases.length)
        self.flagged = PackProgram(device.name, boxes, len(segments), bases.length, marks)
        self.plain = PackProgram(device.name, boxes, len(segments), bases.length)
        sizes = (self.nbytes, dst.size(0) * self.itemsize, schedule.send_items * self.itemsize)
        # The plain copy goes from source to destination: the same bytes, as warm as the others.
        self._owners = [device.memory(max(size, self.nbytes)) for size in sizes]
        self.src, self.dst, self.send = (address for _, address in self._owners)
        self.table[bases.src(0)], self.table[bases.dst(0)] = self.src, self.dst
        self.table[bases.send], self.table[bases.flags] = self.send, flags

    def close(self) -> None:
        """Free the programs."""
        self.flagged.close()
        self.plain.close()


@cache
def random_items(itemsize: int) -> np.ndarray:
    """Return PERIOD items as rows of bytes, none of them 0."""
    return np.random.default_rng(1).integers(1, 256, (PERIOD, itemsize), np.uint8)


def fill(device: Any, pack: Packing) -> np.ndarray:
    """Fill the source with items that repeat every PERIOD; return one period."""
    pattern = random_items(pack.itemsize)
    filled = min(pattern.nbytes, pack.nbytes)
    device.move(pack.src, pattern.ctypes.data, filled)
    while filled < pack.nbytes:
        more = min(filled, pack.nbytes - filled)
        device.move(pack.src + filled, pack.src, more)
        filled += more
    device.synchronize()
    return pattern


def source_items(copy: Copy, count: int) -> np.ndarray:
    """Return which item of the source array each of the first items of a packed copy is."""
    number, found = np.arange(count), np.full(count, copy.src_offset)
    for extent, stride, step in zip(copy.shape, copy.src_strides, copy.dst_strides, strict=True):
        found += number // step % extent * stride
    return found


def verify(device: Any, pack: Packing, way: Way, pattern: np.ndarray) -> bool:
    """Run a way over poison, and tell whether the start of the first and last message are right."""
    samples = []
    for number in (0, pack.messages - 1):
        copy = pack.schedule.pack[number][0]
        got = np.zeros((min(prod(copy.shape), SAMPLE), pack.itemsize), np.uint8)
        address = pack.send + copy.dst_offset * pack.itemsize
        device.move(address, got.ctypes.data, got.nbytes)
        samples.append((copy, got, address))
    way.begin()
    way.launch()
    for _, got, address in samples:
        device.move(got.ctypes.data, address, got.nbytes)
    device.synchronize()
    return all(np.array_equal(got, pattern[source_items(copy, len(got)) % PERIOD]) for copy, got, _ in samples)


class Messages:
    """Persistent requests from this process to itself."""

    def __init__(self, count: int):
        from mpi4py import MPI

        self._mpi, comm = MPI, MPI.COMM_SELF
        self._buffers = np.zeros((2, count, MESSAGE_BYTES), np.uint8)
        self.sends = [comm.Send_init(buffer, 0) for buffer in self._buffers[0]]
        self.recvs = [comm.Recv_init(buffer, 0) for buffer in self._buffers[1]]
        self.start = MPI.Prequest.Startall

    def wait(self) -> None:
        """Wait for all of them."""
        self._mpi.Request.Waitall(self.sends + self.recvs)

    def close(self) -> None:
        """Free them."""
        for request in self.sends + self.recvs:
            request.Free()


# --- times -----------------------------------------------------------------------------------------------------------
# All in nanoseconds from before the call, by name.


def time_end(device: Any, way: Way) -> dict[str, int]:
    """Launch and wait for the stream: `host`, until the call returns, and `done`."""
    way.begin()
    device.synchronize()
    start = clock()
    way.launch()
    returned = clock()
    device.synchronize()
    return {"host": returned - start, "done": clock() - start}


def time_watched(device: Any, way: Way, count: int) -> dict[str, int]:
    """Launch and watch: `first` and `last`, when the host has seen the first segments complete, and all of them."""
    way.begin()
    device.synchronize()
    start = clock()
    way.launch()
    watch(device, way.signal.any)
    first = clock()
    done = 0
    while done < count:
        done = way.signal.ready(done)
    last = clock()
    device.synchronize()
    return {"first": first - start, "last": last - start}


def time_messages(device: Any, way: Way, messages: Messages) -> dict[str, int]:
    """Launch and start each message once it is packed: `started`, when the last one is."""
    messages.start(messages.recvs)
    way.begin()
    device.synchronize()
    sent, count, sends = 0, len(messages.sends), messages.sends
    start = clock()
    way.launch()
    while sent < count:
        done = way.signal.ready(sent)
        if done > sent:
            messages.start(sends[sent:done])
            sent = done
    started = clock()
    messages.wait()
    device.synchronize()
    return {"started": started - start}


def watch(device: Any, complete: Callable[[], bool]) -> None:
    """Wait until something is complete; raise if it never will be."""
    polls = 0
    while not complete():
        polls += 1
        if polls % POLLS == 0:
            device.check()


def rounds(
    device: Any, ways: dict[str, Way], pack: Packing, messages: Messages | None, seconds: float
) -> dict[str, dict[str, list[int]]]:
    """Take all times in turn, round after round, after one round that does not count.

    The first launch of a way in a round comes after a lot of other work, with cold caches of the CPU: `cold` is how
    long it keeps the host busy. All other times are those of launches that follow another one of the same way.
    """
    move = Way(partial(device.move, pack.dst, pack.src, pack.nbytes))
    taken: dict[str, dict[str, list[int]]] = {name: {} for name in ("copy", *ways)}
    deadline = 0.0
    for number in range(MOST + 1):
        for name, way in {"copy": move, **ways}.items():
            cold = time_end(device, way)["host"]
            found = {"cold": cold, **time_end(device, way)}
            if way.signal:
                found |= time_watched(device, way, pack.messages)
            if way.signal and messages:
                found |= time_messages(device, way, messages)
            for what, value in found.items():
                taken[name].setdefault(what, []).append(value)
        deadline = deadline or time.monotonic() + seconds
        if number >= FEWEST and time.monotonic() > deadline:
            break
    return {name: {what: values[1:] for what, values in found.items()} for name, found in taken.items()}


@contextmanager
def prepared(device: Any, src: Pencil, dst: Pencil, case: Case, mpi: bool) -> Iterator[Any]:
    """Give the packing, the ways and the messages of a case; free them afterwards."""
    with ExitStack() as stack:
        pack = Packing(device, src, dst, case.dtype)
        stack.callback(pack.close)
        messages = Messages(pack.messages) if mpi else None
        if messages:
            stack.callback(messages.close)
        yield pack, device.ways(pack), messages


def measured(device: Any, geometry: str, ranks: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time all ways of one case."""
    case = CASES[name]
    src, dst = pencils(geometry, ranks, case, options.shrink)
    with prepared(device, src, dst, case, not options.without_mpi) as (pack, ways, messages):
        pattern = fill(device, pack)
        wrong = [label for label, way in ways.items() if not verify(device, pack, way, pattern)]
        if wrong:
            raise SystemExit(f"bench/launch.py: {geometry}, {ranks} ranks, {name}: wrong bytes by {', '.join(wrong)}")
        times = rounds(device, ways, pack, messages, options.seconds)
        return {
            "geometry": geometry,
            "ranks": ranks,
            "case": name,
            "local_shape": src.shape(0),
            "message_shape": pack.schedule.pack[0][0].shape,
            "messages": pack.messages,
            "bytes": pack.nbytes,
            "rounds": len(times["copy"]["done"]),
            "microseconds": {
                way: {what: statistics.median(values) / 1e3 for what, values in found.items()}
                for way, found in times.items()
            },
        }


# --- the call itself -------------------------------------------------------------------------------------------------


def call_times(device: Any, launches: int = 64, repeats: int = 100) -> dict[str, float]:
    """Split the time of a launch from Python into that of the C call and the rest, in microseconds per call.

    `python` is a loop of Python over `launches` calls of PackProgram.run, each of one small segment; `compiled` is the
    same loop in compiled code, which leaves the C calls and next to nothing else. `empty` is a loop of Python over
    calls with an empty range, for which the C call returns at once: what is left is the cost of coming from Python.
    `loop` is the loop without a call. Medians over `repeats`, with an idle stream before each.
    """
    segments = [[Copy((128,), 0, 128 * i, (1,), 1, 128 * i, (1,))] for i in range(launches)]
    program = PackProgram(device.name, compile_copies(segments, 8), launches, 2)
    owners = [device.memory(1024 * launches) for _ in range(2)]
    table = AddressTable(2)
    table[0], table[1] = (address for _, address in owners)
    run, stream, numbers = program.run, device.stream, range(launches)

    def python() -> None:
        for i in numbers:
            run(table, i, i + 1, stream)

    def empty() -> None:
        for i in numbers:
            run(table, i, i, stream)

    def loop() -> None:
        for _ in numbers:
            pass

    loops = {"python": python, "empty": empty, "loop": loop, "compiled": device.launch_loop(program, table)}
    found = {
        name: statistics.median(time_end(device, Way(action))["host"] for _ in range(repeats)) / 1e3 / launches
        for name, action in loops.items()
        if action
    }
    program.close()
    return found


def python_share(calls: dict[str, float]) -> float:
    """Return the microseconds that coming from Python adds to a C call."""
    return calls["empty"] - calls["loop"]


# --- output ----------------------------------------------------------------------------------------------------------

COLUMNS = ("cold", "host", "first", "last", "started", "done")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table for one number of ranks."""
    times, lines = result["microseconds"], []
    for way, found in times.items():
        figures = [f"{found[column]:.1f}" if column in found else "-" for column in COLUMNS]
        each = "-" if way == "copy" else f"{found['host'] / result['messages']:.2f}"
        lines.append([str(result["ranks"]), way, *figures, each, f"{found['done'] / times['copy']['done']:.3f}"])
    return lines


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the results of one geometry and case."""
    one = results[0]
    sizes = sorted({result["bytes"] >> 10 for result in results})
    print(f"\n## {one['geometry']}, {one['case']}: {' to '.join(str(n) for n in {sizes[0], sizes[-1]})} KiB packed\n")
    head = ["P", "way", *COLUMNS, "host / N", "done / copy"]
    print(measure.table(head, [row for result in results for row in rows(result)]), flush=True)


def print_calls(calls: dict[str, float]) -> None:
    """Print what a launch consists of."""
    print("\n## One launch, microseconds per call in a loop\n")
    print(measure.table(list(calls), [[f"{value:.3f}" for value in calls.values()]]))
    more = f", {calls['python'] - calls['compiled']:.2f} (python - compiled)" if "compiled" in calls else ""
    print(f"\nComing from Python adds {python_share(calls):.2f} us to a C call (empty - loop){more}.")


def summary(results: list[dict[str, Any]], calls: dict[str, float]) -> list[list[str]]:
    """Return the figures that matter most, a line per result."""
    lines = []
    for result in results:
        times, count = result["microseconds"], result["messages"]
        fused, copy, plain = times["fused"], times["copy"]["done"], times["fused, no flags"]["done"]
        line = [f"{result['geometry']}, {result['case']}", str(result["ranks"])]
        line += [f"{fused['host'] - python_share(calls):.1f}", f"{fused['first']:.1f}", f"{fused['done'] / copy:.3f}"]
        line.append(f"{fused['done'] / plain:.3f}")
        for signal in ("events", "flags"):
            pair = [times.get(f"{way}, {signal}", {}).get("host") for way in ("per_peer", "per_peer graph")]
            line.append("-" if None in pair else f"{pair[0] / count:.2f} / {pair[1] / count:.2f}")
        lines.append(line)
    return lines


def print_summary(results: list[dict[str, Any]], calls: dict[str, float]) -> None:
    """Print a line per result."""
    print("\n## fused, and graphs beside plain launches\n")
    head = ["case", "P", "C call", "first", "done / copy", "with / without flags"]
    print(measure.table([*head, "host / N, events: plain / graph", "flags"], summary(results, calls)))


def plot(path: str, results: list[dict[str, Any]]) -> None:
    """Draw the time to the first chunk and the host's time over the number of ranks, a row per geometry."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    geometries = list(dict.fromkeys(result["geometry"] for result in results))
    titles = {"first": "first chunk seen by the host", "host": "host is busy launching"}
    figure, axes = pyplot.subplots(len(geometries), 2, figsize=(11, 4 * len(geometries)), squeeze=False)
    for geometry, pair in zip(geometries, axes, strict=True):
        found = [result for result in results if result["geometry"] == geometry]
        found = [result for result in found if result["case"] == found[0]["case"]]
        for axis, (column, title) in zip(pair, titles.items(), strict=True):
            for way in found[0]["microseconds"]:
                points = [(result["ranks"], result["microseconds"][way].get(column)) for result in found]
                if "first" in found[0]["microseconds"][way]:
                    axis.loglog(*zip(*points, strict=True), marker="o", label=way)
            axis.set(title=f"{geometry}, {found[0]['case']}: {title}", xlabel="ranks P", ylabel="microseconds")
            ranks = [result["ranks"] for result in found]
            axis.set_xticks(ranks, labels=map(str, ranks))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        pair[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="cuda", help="host only tries the program out")
    add("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096])
    add("--geometries", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES))
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add("--seconds", type=float, default=0.5, help="for each number of ranks and case")
    add("--shrink", type=int, default=1, metavar="N", help="divide the extents of all geometries by N")
    add("--quick", action="store_true", help="P = 4, 64, 1024 of 512^3 alone, for a shorter time")
    add("--without-mpi", action="store_true", help="start no messages")
    add("--json", metavar="FILE", help="write everything to a file")
    add("--plot", metavar="FILE.png", help="draw times over P (needs matplotlib)")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.geometries, options.seconds = [4, 64, 1024], ["512^3"], min(options.seconds, 0.2)
    if min(options.ranks) < 4:
        parser.error(f"--ranks: got {min(options.ranks)}, expected at least 4")
    return options


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    device = DEVICES[options.device]()
    print(f"Launching the packs of one rank of P on {device.description()}: medians, microseconds from the call.")
    print(
        "host: until the call returns (cold: after other work); first, last: completion seen by the host; started: the"
    )
    print("last of N = P - 1 messages (fixed: sqrt(P) - 1) is; done: the stream is synchronised, when nobody watches.")
    calls = call_times(device)
    print_calls(calls)
    results: list[dict[str, Any]] = []
    for geometry in options.geometries:
        for case in options.cases:
            measure.progress(f"{geometry}, {case}")
            found = [measured(device, geometry, ranks, case, options) for ranks in options.ranks]
            measure.progress("")
            print_table(found)
            results += found
    print_summary(results, calls)
    if options.json:
        measure.record(options.json, device, vars(options), [{"calls": calls}, *results])
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
