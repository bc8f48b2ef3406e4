# SPDX-License-Identifier: Apache-2.0
"""Owns the steps of an operation on a GPU: packing as one unit of device work, and sending what it has completed.

The pack program runs on the plan's own stream and raises a flag in host memory per message; the host watches the flags
and starts the messages while the device goes on packing.
"""

from __future__ import annotations

from typing import Any

from ..array import ArrayView
from ..engine import Bound, Engine
from .arrays import LEGACY_STREAM, device_view, stream_address
from .graph import Graph, GraphCache, launch_singles
from .memory import PinnedMemory, free_abandoned
from .runtime import Event, Flags, Stream, current_device, is_capturing

# Thread blocks that saturate the link to the host; more would only take the device from other work.
STAGED_BLOCKS = 16

# Automatic captures kept per plan.
CACHED_GRAPHS = 64

# Events asked for at one poll.
EVENTS_AT_ONCE = 8

# Polls between two looks at whether the device has failed.
POLLS = 1000

# Programs that were run within a capture of the caller's: that graph may outlive the plan, so they are kept.
_in_callers_graphs: list[Any] = []


class CudaEngine(Engine):
    """One rank's part of an operation on arrays in device memory."""

    def _device_setup(self) -> None:
        free_abandoned()
        schedule, launch = self.schedule, self.spec.launch
        self.device = current_device()
        self._in_array = any(part.segment < 0 for part in (*schedule.sends, *schedule.recvs))
        self._messages = schedule.message_segments
        self._singles = 0 if launch == "fused" else self._messages
        self._events = [Event() for _ in range(self._messages)] if launch == "per_peer_events" else []
        self._stream, self._ready, self._complete = Stream(), Event(), Event()
        self._kept = False
        self._graphs = GraphCache(CACHED_GRAPHS)
        self._done = self._polls = 0
        self._make_programs()

    def _make_programs(self) -> None:
        schedule, messages = self.schedule, self._messages
        staged = self.spec.staged and not self.alone
        blocks = STAGED_BLOCKS if staged else 0
        self._flags = Flags(PinnedMemory(8 * messages), messages)
        # What stays on this rank does not cross the link: staged, it gets a program, and the whole device, of its own.
        packed = schedule.pack[:messages] if staged else schedule.pack
        flags = None
        if not self._events:
            flags = [(schedule.bases.flags, 8 * i) for i in range(messages)] + [(-1, 0)] * (len(packed) - messages)
        self.pack = self._program(packed, flags, blocks)
        self.local = self._program(schedule.pack[messages:]) if staged else None
        self.unpack = self._program(schedule.unpack, max_blocks=blocks)

    def view(self, array: Any, what: str) -> ArrayView:
        """Describe an array in the memory of the plan's device."""
        return device_view(array, what, self.device)

    @property
    def capturable(self) -> bool:
        """Whether a capture holds the whole operation: MPI is driven by the host."""
        return self.alone

    # --- graphs -------------------------------------------------------------------------------------------------

    def _record(self, bound: Bound) -> Graph:
        return Graph(self.pack, bound.table, self._singles, self._events)

    def _cached(self, bound: Bound) -> Graph:
        """Return the graph of an automatic capture."""

        def record() -> Graph:
            self.stats.captures += 1
            return self._record(bound)

        graph = self._graphs.get(bound.key, record)
        self.stats.evictions = self._graphs.evictions
        return graph

    def forget(self) -> None:
        """Destroy the automatic captures."""
        self._graphs.clear()

    def rebind(self) -> None:
        """Take note that the workspace has moved: graphs hold its old address."""
        super().rebind()
        self.forget()

    def _fill(self, table: Any) -> None:
        super()._fill(table)
        table[self.schedule.bases.flags] = self._flags.memory.address

    # --- a run --------------------------------------------------------------------------------------------------

    def _check_stream(self, bound: Bound, stream: Any) -> None:
        """Find the stream of a run, and refuse what would break a capture before any other CUDA call."""
        address = bound.stream if stream is None else stream_address(stream)
        self._caller = LEGACY_STREAM if address is None else address
        self._captured = is_capturing(self._caller)
        if current_device() != self.device:
            raise RuntimeError(f"{self}: device {current_device()} is current, expected {self.device}, the plan's")
        if self._captured and not self.alone:
            raise RuntimeError(
                f"{self}: the stream is being captured, but messages by MPI are driven by the host and cannot be part "
                "of a graph; capture the work before and after, or use Plan.capture, which records what can be"
            )

    def _begin(self, bound: Bound, stream: Any, record: Any) -> None:
        if self.alone:
            self._begin_alone(bound, record)
            return
        own = self._stream.address
        self._ready.record(self._caller)
        self._ready.order(own)
        self._join(bound, own)
        self._wait_for_workspace()
        if self._in_array:
            self._ready.synchronize()  # MPI knows no streams: what it reads and writes must be ready now
        self._mover.post(bound.table)
        self._flags.begin()
        self._done = 0
        self._launch(bound, record, own)
        if self.local is not None:
            self.local.run(bound.table, stream=own)
        if self.spec.inplace:
            self.unpack.run(bound.table, sum(segment >= 0 for segment in self._unpack_of), stream=own)

    def _begin_alone(self, bound: Bound, record: Any) -> None:
        """No other rank takes part: everything goes onto the caller's stream, and nothing is waited for."""
        if self._captured:
            record = None
            self._keep_for_callers_graph()
        else:
            self._join(bound, self._caller)
            for event in {self._complete, self.workspace.last_use}:
                if event is not None:
                    event.order(self._caller)  # program and workspace serve one run at a time, whatever the streams
        self._launch(bound, record, self._caller)
        if self.spec.inplace:
            self.unpack.run(bound.table, stream=self._caller)

    def _wait_for_workspace(self) -> None:
        """Block until the last unpack from the workspace is done: what it reads is where messages will arrive."""
        if self.workspace.last_use is not None:
            self.workspace.last_use.synchronize()

    def _keep_for_callers_graph(self) -> None:
        if not self._kept:
            _in_callers_graphs.append((self.pack, self.unpack, self._flags, self.workspace.memory(self.spec.memory)))
            self._kept = True

    def _join(self, bound: Bound, stream: int) -> None:
        """Order a stream after the streams that the arrays say they are in use on."""
        for other in bound.streams:
            if other != self._caller:
                self._ready.record(other)
                self._ready.order(stream)

    def _launch(self, bound: Bound, record: Any, stream: int) -> None:
        """Launch the pack program: from a record, from the cache, or plainly."""
        if record is None and self.spec.graphs and not self._captured:
            record = self._cached(bound)
            self.stats.replays += 1
        if record is not None:
            record.launch(stream)
        elif self._singles:
            launch_singles(self.pack, bound.table, self._singles, self._events, stream)
        else:
            self.pack.run(bound.table, stream=stream)

    def _advance(self) -> None:
        """Send the messages that are packed by now; all together where the transport wants them so."""
        sends, packed, last = self.schedule.sends, self._packed(), self._sent
        while last < len(sends) and sends[last].segment < packed:
            last += 1
        if last == len(sends) or (last > self._sent and self._mover.pipelined):
            self._send(last)
            return
        self._polls += 1
        if self._polls % POLLS == 0:
            self._stream.failed()

    def _packed(self) -> int:
        """Return how many leading segments are complete."""
        if self._events:
            # A few at a time: asking takes longer than a short pack, and the first messages should leave meanwhile.
            last = min(self._done + EVENTS_AT_ONCE, self._messages)
            while self._done < last and self._events[self._done].done():
                self._done += 1
        else:
            self._done = self._flags.ready(self._done)
        return self._done

    def _unpack(self, segments: list[int]) -> None:
        self.unpack.run_list(self._bound.table, segments, self._stream.address)

    def _finish(self) -> None:
        if self._captured:
            return
        if self.alone:
            self._complete.record(self._caller)
        else:
            self._complete.record(self._stream.address)
            self._complete.order(self._caller)
        self.workspace.last_use = self._complete

    def _release(self) -> None:
        self.forget()
        super()._release()
        self.pack = self.local = self.unpack = None
        free_abandoned()
