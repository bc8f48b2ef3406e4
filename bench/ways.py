# SPDX-License-Identifier: Apache-2.0
"""Owns the ways of launching the packs of one rank on each device, and what is packed; knows nothing of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import measure
import numpy as np

from cudecomp import Exchange, Pencil
from cudecomp.boxes import compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Copy, Schedule

MESSAGE_BYTES = 1024
SAMPLE = 1 << 14  # items of a message that are compared
PERIOD = 1_000_003  # items after which the source repeats: prime, so that no stride is a multiple of it

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
        flags = by_flags(pack.flags)
        events, others = ([self._runtime.Event() for _ in range(count)] for _ in range(2))
        single = self._work(pack.flagged, table, count), self._work(pack.plain, table, count, events)
        graph, event_graph = (
            self._graph.Graph(single[0]),
            self._graph.Graph(self._work(pack.plain, table, count, others)),
        )
        one = self._graph.Graph(self._work(pack.flagged, table, 0))
        return {
            "fused": Way(partial(pack.flagged.run, table, 0, -1, stream), flags),
            "per_peer, flags": Way(partial(single[0].launch, stream), flags),
            "per_peer, events": Way(partial(single[1].launch, stream), by_events(events)),
            "per_peer graph, events": Way(partial(event_graph.launch, stream), by_events(others)),
            "per_peer graph, flags": Way(partial(graph.launch, stream), flags),
            "fused graph": Way(partial(one.launch, stream), flags),
            "fused, no flags": Way(partial(pack.plain.run, table, 0, -1, stream)),
        }

    def launch_loop(self, program: PackProgram, table: AddressTable) -> Callable[[], None] | None:
        """Return a loop of compiled code over the launches of all segments."""
        return partial(self._work(program, table, program.segments).launch, self.stream)

    def _work(self, program: PackProgram, table: AddressTable, singles: int, events: Sequence[Any] = ()) -> Any:
        return self._graph.Work([self._graph.PackStep(program, table, singles=singles, events=events)])


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
