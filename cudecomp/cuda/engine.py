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
from .graph import Graph, GraphCache, PackStep, Replay, Step, Work
from .memory import PinnedMemory, free_abandoned
from .runtime import Event, Flags, Stream, current_device, is_capturing, keep_for_graph

# Thread blocks that saturate the link to the host; more would only take the device from other work.
STAGED_BLOCKS = 16

# Automatic captures kept per plan.
CACHED_GRAPHS = 64

# Events asked for at one poll.
EVENTS_AT_ONCE = 8

# Polls between two looks at whether the device has failed.
POLLS = 1000


class CudaEngine(Engine):
    """One rank's part of an operation on arrays in device memory."""

    _graphs: Any = None  # until the device is set up

    def _device_setup(self) -> None:
        free_abandoned()
        schedule, launch = self.schedule, self.spec.launch
        self.device = current_device()
        self._in_array = any(part.segment < 0 for part in (*schedule.sends, *schedule.recvs))
        self._messages = schedule.message_segments
        self._singles = 0 if launch == "fused" else self._messages
        self._events = [Event() for _ in range(self._messages)] if launch == "per_peer_events" else []
        self._stream, self._ready, self._complete = Stream(), Event(), Event()
        self.target = 0  # the stream that the operation was put onto
        self.in_capture = False  # whether that is being captured by the caller
        self._status = 0  # the address of a word that the device sets when it has given up
        self._graphs = GraphCache(CACHED_GRAPHS)
        self._done = self._polls = 0
        self._flags = Flags(PinnedMemory(8 * self._messages), self._messages)
        self._make_programs()

    def _make_programs(self) -> None:
        """Compile the schedule: messages cross a link where they are staged, what stays on the rank never does."""
        schedule, messages = self.schedule, self._messages
        blocks = STAGED_BLOCKS if self.spec.staged and self.driven else 0
        flags = None if self._events else [(schedule.bases.flags, 8 * i) for i in range(messages)]
        self.pack = self._program(schedule.pack[:messages], flags, blocks)
        self.unpack = self._program(schedule.unpack, max_blocks=blocks)
        self._make_local()

    def _make_local(self) -> None:
        """Compile what follows the messages; mapped peers have to be known for it."""
        self.local = self._program(self.schedule.pack[self._messages :])

    @property
    def _base_count(self) -> int:
        """The length of the tables of addresses: those of mapped peers are looked up on the device."""
        return self.schedule.bases.fixed

    def view(self, array: Any, what: str) -> ArrayView:
        """Describe an array in the memory of the plan's device."""
        return device_view(array, what, self.device)

    @property
    def capturable(self) -> bool:
        """Whether a capture holds the whole operation: MPI is driven by the host."""
        return not self.driven

    # --- device work --------------------------------------------------------------------------------------------

    def _work(self, bound: Bound) -> Work:
        """Return the device's part of an operation, up to the unpacking of messages; made once per call."""
        if bound.work is None or bound.work_generation != self.generation:
            self._fill(bound.table)
            bound.work, bound.work_generation = self._make_work(bound), self.generation
        return bound.work

    def _make_work(self, bound: Bound) -> Work:
        """Return what the device does, in order."""
        return Work([*self._message_steps(bound), PackStep(self.local, bound.table), *self._own_steps(bound)])

    def _message_steps(self, bound: Bound) -> list[Step]:
        if not self._messages:
            return []
        return [PackStep(self.pack, bound.table, singles=self._singles, events=self._events)]

    def _own_steps(self, bound: Bound) -> list[Step]:
        """In place, the items that stay on this rank go through the workspace."""
        return [PackStep(self.unpack, bound.table, *self.schedule.own_unpack)] if self.spec.inplace else []

    # --- graphs -------------------------------------------------------------------------------------------------

    def _record(self, bound: Bound) -> Graph:
        return Graph(self._work(bound))

    def capture(self, bound: Bound) -> None:
        """Record an operation for replay."""
        super().capture(bound)
        if self.capturable:
            bound.quick = Replay(bound.captured, self._complete, self._ready, bound.streams, self.device, self._status)

    def replay_quickly(self, bound: Bound, stream: Any) -> bool:
        """Launch what was captured as one unit; False, and nothing is done, where the long way has to be taken."""
        workspace = self.workspace
        if (
            bound.generation != self.generation
            or self._running
            or self._closed
            or self._poison is not None
            or workspace.last_use is not self._complete
            or workspace.busy
        ):
            return False
        if type(stream) is not int:
            stream = bound.stream if stream is None else stream_address(stream)
        if not bound.quick.launch(stream or LEGACY_STREAM):
            return False
        self.stats.runs += 1
        self.stats.replays += 1
        self.stats.landings += bound.work.lands
        return True

    def _cached(self, bound: Bound) -> Graph:
        """Return the graph of an automatic capture."""

        def record() -> Graph:
            self.stats.captures += 1
            return self._record(bound)

        graph = self._graphs.get(self._key(bound), record)
        self.stats.evictions = self._graphs.evictions
        return graph

    def _key(self, bound: Bound) -> Any:
        """Return what tells automatic captures apart."""
        return bound.key

    def forget(self) -> None:
        """Destroy the automatic captures."""
        if self._graphs is not None:
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
        self.in_capture = is_capturing(self._caller)
        if current_device() != self.device:
            raise RuntimeError(f"{self}: device {current_device()} is current, expected {self.device}, the plan's")
        if self.in_capture and self.driven:
            raise RuntimeError(
                f"{self}: the stream is being captured, but messages by MPI are driven by the host and cannot be part "
                "of a graph; capture the work before and after, or use Plan.capture, which records what can be"
            )

    def _begin(self, bound: Bound, stream: Any, record: Any) -> None:
        own = self.driven or self._apart  # on the plan's own stream, beside other work of the caller's
        self.target = self._stream.address if own else self._caller
        if own:
            self._ready.record(self._caller)
            self._ready.order(self.target)
        if not self.in_capture:
            self._join(bound)
        if self.driven:
            self._post(bound)
        self._launch(bound, None if self.in_capture else record)

    def _post(self, bound: Bound) -> None:
        """Make receives ready: MPI knows no streams, what it reads and writes must be ready now."""
        if self.workspace.last_use is not None:
            self.workspace.last_use.synchronize()  # what the last unpack reads is where messages will arrive
        if self._in_array:
            self._ready.synchronize()
        self._mover.post(bound.table)
        self._flags.begin()
        self._done = 0

    def _join(self, bound: Bound) -> None:
        """Order an operation after the streams that the arrays export, the plan's last one, and its workspace's."""
        for other in bound.streams:
            if other != self._caller:
                self._ready.record(other)
                self._ready.order(self.target)
        for event in {self._complete, self.workspace.last_use}:
            if event is not None:
                event.order(self.target)

    def _launch(self, bound: Bound, record: Any) -> None:
        """Launch the device's work: a record, one from the cache, or plainly."""
        if record is None and self.spec.graphs and not self.in_capture:
            record = self._cached(bound)
            self.stats.replays += 1
        work = self._work(bound) if record is None else record.work
        self.stats.landings += work.lands
        if record is not None:
            record.launch(self.target)
            return
        if self.in_capture:
            self.launch_in_capture(work)
        else:
            work.launch(self.target)

    def launch_in_capture(self, work: Work) -> None:
        """Make work part of the caller's graph, which may outlive the plan."""
        work.launch(self.target)
        keep_for_graph(self.target, (work, *self._in_use()))

    # --- as a part of a chain -----------------------------------------------------------------------------------

    def enter_chain(self, bound: Bound, last: Bound, stream: Any) -> None:
        """Order a stream, that of the last operation of a chain if none is given, after what this one waits for."""
        self._check_stream(last, stream)
        self.target = self._caller
        if self.workspace.busy:
            raise RuntimeError(f"{self}: its workspace is in use by a pending operation")
        if not self.in_capture:
            self._join(bound)

    def leave_chain(self, work: Work) -> None:
        """Note that the operation was launched."""
        self.stats.runs += 1
        self.stats.replays += 1
        self.stats.landings += work.lands
        self._finish()

    def _in_use(self) -> tuple[Any, ...]:
        """Return what device work needs beside its programs."""
        return self._flags, self.workspace.memory(self.spec.memory)

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
        """Let later work of the caller's stream see the result; nothing is waited for here."""
        complete = Event() if self.in_capture else self._complete
        if not self.in_capture or self.target != self._caller:
            complete.record(self.target)
        if self.target != self._caller:
            complete.order(self._caller)
        if not self.in_capture:
            self.workspace.last_use = complete

    def _release(self) -> None:
        self.forget()
        super()._release()
        self.pack = self.local = self.unpack = None
        free_abandoned()
