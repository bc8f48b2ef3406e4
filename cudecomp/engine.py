# SPDX-License-Identifier: Apache-2.0
"""Owns the execution of a schedule on the host device: programs, workspace, transport, and their order in a run.

It takes tables of addresses; it knows nothing of array objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from .boxes import compile_copies
from .comm import attempt, ranks_text
from .errors import PoisonedError
from .exchange import Exchange
from .pack import AddressTable, PackProgram
from .schedule import Schedule, aligned, exchange_circle
from .spec import Spec
from .workspace import Workspace

# Polls before a waiting rank gives its core away: ranks may share cores.
SPINS = 200

# Memory and requests of operations that were pending when their plan was closed: MPI may still write there, and
# waiting for peers is not allowed, so they stay until the process ends.
_stranded: list[Any] = []


class Stats:
    """Counters of one plan."""

    __slots__ = ("captures", "messages", "replays", "runs")

    def __init__(self) -> None:
        self.runs = self.captures = self.replays = self.messages = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


# Address ranges of operations between start and wait, over all plans of this process: (start, stop, engine).
_in_flight: list[tuple[int, int, Any]] = []


class Bound:
    """One operation of an engine with addresses filled in: what a Call and a single run are made of.

    Attributes
    ----------
    engine : HostEngine
        Whose operation.
    captured : bool
        Whether `replay` is allowed.
    """

    __slots__ = ("_owners", "_spans", "_table", "captured", "engine")

    def __init__(self, engine: HostEngine, table: AddressTable, spans: list[tuple[int, int]], owners: Any):
        self.engine = engine
        self.captured = False
        self._table = table
        self._spans = spans
        self._owners = owners

    def run(self) -> None:
        """Start and wait."""
        self._refuse_in_flight()
        self.engine.start(self._table)
        self.engine.wait()

    def replay(self) -> None:
        """Run what was captured."""
        if not self.captured:
            raise RuntimeError(f"{self.engine}: this call was not captured; use capture(src, dst)")
        self.run()
        self.engine.stats.replays += 1

    def start(self) -> None:
        """Begin the operation and claim the arrays until it is complete."""
        self._refuse_in_flight()
        self.engine.start(self._table)
        self.engine.current = self
        _in_flight.extend((start, stop, self.engine) for start, stop in self._spans)

    def test(self) -> bool:
        """Make progress; tell whether the operation is complete."""
        if self.engine.current is not self:
            return True
        if not self.engine.test():
            return False
        self._leave()
        return True

    def wait(self) -> None:
        """Block until the operation is complete."""
        if self.engine.current is self:
            self.engine.wait()
            self._leave()

    def _leave(self) -> None:
        self.engine.current = None
        _in_flight[:] = [entry for entry in _in_flight if entry[2] is not self.engine]

    def _refuse_in_flight(self) -> None:
        for start, stop, engine in _in_flight:
            if any(a < stop and start < b for a, b in self._spans):
                raise RuntimeError(f"{self.engine}: an array is in use by a pending operation of {engine}; wait for it")


class HostEngine:
    """One rank's part of an operation on the host device.

    Building one is collective over the communicator and fails on all ranks alike.
    """

    def __init__(self, spec: Spec, group: Any, exchange_of: Callable[[int, Any], Exchange]):
        self.spec = spec
        self.group = group
        self.stats = Stats()
        self.workspace: Workspace | None = None
        self._mover: Any = None
        self.current: Bound | None = None  # the call between start and wait
        self.latest: Any = None  # the call captured last
        self._poison: str | None = None
        self._closed = False
        self._missing: set[int] = set()  # receives that have not arrived, by number
        self._running = False
        _, error = attempt(lambda: self._prepare(exchange_of))
        try:
            group.agree(spec.operation, error)
            self._connect()
        except BaseException:
            self.close()
            raise

    # --- building -----------------------------------------------------------------------------------------------

    def _prepare(self, exchange_of: Callable[[int, Any], Exchange]) -> None:
        """Do what needs no other rank; memory may run out here."""
        spec = self.spec
        self.schedule = Schedule(
            exchange_of(self.group.rank, self.group.nodes if self.group.size > 1 else None),
            spec.dtype.itemsize,
            fields=spec.fields,
            inplace=spec.inplace,
            uniform=spec.choice.name == "mpi_a2a",
        )
        self.pack = self._program(self.schedule.pack)
        self.unpack = self._program(self.schedule.unpack)
        self.workspace = spec.workspace or Workspace(None)
        self.workspace.reserve(self.schedule.workspace_bytes, self)
        # What arrives in a segment of its own, by message number.
        self._unpack_of = [part.segment for part in self.schedule.recvs]

    def _program(self, segments: Any) -> PackProgram:
        itemsize, bases = self.spec.dtype.itemsize, self.schedule.bases
        return PackProgram("host", compile_copies(segments, itemsize), len(segments), bases.count)

    def _connect(self) -> None:
        """Make the transport; collective."""
        name, group, schedule = self.spec.choice.name, self.group, self.schedule
        if name == "local":
            return
        from .transports.mpi import AllToAll, PointToPoint, Wire

        bases = schedule.bases
        wire = Wire(schedule.sends, schedule.recvs, self.spec.dtype.itemsize, bases.send, bases.recv)
        if name == "mpi_a2a":
            circle = exchange_circle(schedule.exchange)
            grid = schedule.exchange.src.grid
            key = (circle.entries, grid.shape, grid.rank_order) if circle.size < group.size else "all"
            self._mover = AllToAll(*group.group(key, circle.color), wire)
        else:
            self._mover = PointToPoint(group.mpi, wire, group.tag(), name == "mpi_p2p_pl")
        self.rebind()

    def rebind(self) -> None:
        """Tell the transport where the workspace lies."""
        if self._mover is not None:
            self._mover.rebind(*self._workspace_parts())

    def _workspace_parts(self) -> tuple[int, int]:
        address = self.workspace.address
        return address, address + aligned(self.schedule.send_items * self.spec.dtype.itemsize)

    # --- running ------------------------------------------------------------------------------------------------

    def table(self) -> AddressTable:
        """Return a new table of addresses, for the arrays of a run."""
        return AddressTable(self.schedule.bases.count)

    def bind(self, sources: Sequence[int], destinations: Sequence[int], spans: Any, owners: Any) -> Bound:
        """Return the operation on fields at these addresses."""
        bases = self.schedule.bases
        table = self.table()
        for field in range(bases.fields):
            table[bases.src(field)] = sources[field]
            table[bases.dst(field)] = destinations[field]
        return Bound(self, table, spans, owners)

    def capture(self, bound: Bound) -> None:
        """Record an operation for replay: on the host device, note that its arrays were checked."""
        self.usable()
        bound.captured = True
        self.stats.captures += 1

    def run_addresses(self, src: int, dst: int, stream: int) -> None:
        """Run on unchecked addresses; the fields of an array follow each other."""
        spec, rank = self.spec, self.group.rank
        if stream:
            raise ValueError(f"{self}: got a stream, expected none on the host device")
        first = max(spec.src.size(rank), spec.dst.size(rank)) if spec.inplace else spec.src.size(rank)
        sources = [src + field * first * spec.dtype.itemsize for field in range(spec.fields)]
        second = spec.dst.size(rank) * spec.dtype.itemsize
        targets = sources if spec.inplace else [dst + field * second for field in range(spec.fields)]
        self.bind(sources, targets, [], None).run()

    def start(self, table: AddressTable) -> None:
        """Pack and send; arrays and workspace are in use until `wait`."""
        self.usable()
        self.workspace.enter(self)
        bases = self.schedule.bases
        table[bases.send], table[bases.recv] = self._workspace_parts()
        self._table, self._running = table, True
        self._missing = set(range(len(self._unpack_of)))
        self.stats.runs += 1
        try:
            if self._mover is not None:
                self._mover.post(table)
                self._send(table)
            self.pack.run(table, self.schedule.message_segments)
            if self.spec.inplace:
                self._unpack_own(table)
        except BaseException:
            self._fail("an error within an operation left messages under way")
            raise

    def _send(self, table: AddressTable) -> None:
        """Pack and start the messages: one after the other where the transport is pipelined, else all at once."""
        mover, sends = self._mover, self.schedule.sends
        self.stats.messages += len(sends)
        if not mover.pipelined:
            self.pack.run(table, 0, self.schedule.message_segments)
            mover.send(0, len(sends), table)
            return
        for i, part in enumerate(sends):
            if part.segment >= 0:
                self.pack.run(table, part.segment, part.segment + 1)
            mover.send(i, i + 1, table)
            if not self.spec.inplace:  # in place, an unpack would overwrite what is still to be packed
                self._collect()

    def _unpack_own(self, table: AddressTable) -> None:
        """Move what stays on this rank, and lay in the workspace meanwhile, to its place."""
        own = sum(segment >= 0 for segment in self._unpack_of)
        self.unpack.run(table, own)

    def _collect(self) -> None:
        """Unpack what has arrived."""
        found = self._mover.arrived()
        for i in found:
            segment = self._unpack_of[i]
            if segment >= 0:
                self.unpack.run(self._table, segment, segment + 1)
        self._missing.difference_update(found)

    def test(self) -> bool:
        """Make progress; tell whether the operation is complete. Does not block."""
        if not self._running:
            return True
        try:
            if self._mover is not None:
                if self._missing:
                    self._collect()
                if self._missing or not self._mover.sent():
                    return False
        except BaseException:
            self._fail("an error within an operation left messages under way")
            raise
        self._running = False
        self.workspace.leave(self)
        return True

    def wait(self) -> None:
        """Block until the operation is complete, or the timeout has passed."""
        spins, last, missing = 0, time.monotonic(), len(self._missing)
        while not self.test():
            spins += 1
            if len(self._missing) != missing:
                spins, last, missing = 0, time.monotonic(), len(self._missing)
            elif spins > SPINS:
                os.sched_yield()
                if self.spec.timeout is not None and time.monotonic() - last > self.spec.timeout:
                    self._time_out()

    def _time_out(self) -> None:
        peers = sorted(self.schedule.recvs[i].peer for i in self._missing)
        waits = f"messages from {ranks_text(peers)}" if peers else "its own messages to be taken"
        text = f"{self}: nothing happened for {self.spec.timeout} s while it waited for {waits}"
        self._fail(text)
        raise TimeoutError(text)

    # --- ending -------------------------------------------------------------------------------------------------

    def usable(self) -> None:
        """Raise unless an operation may start."""
        if self._poison is not None:
            raise PoisonedError(f"{self}: {self._poison}; close it and build another")
        if self._closed:
            raise RuntimeError(f"{self}: it is closed")
        if self._running:
            raise RuntimeError(f"{self}: an operation of this plan is pending; wait for it first")

    @property
    def pending(self) -> bool:
        """Whether an operation was started and is not complete."""
        return self._running

    @property
    def closed(self) -> bool:
        """Whether the plan was closed."""
        return self._closed

    def _fail(self, why: str) -> None:
        self._poison = why

    def poison(self, why: str) -> None:
        """Make every later operation raise, saying why."""
        self._poison = self._poison or why

    def close(self) -> None:
        """Give everything back; idempotent, never waits for peers."""
        if self._closed:
            return
        self._closed = True
        if self._running:
            _stranded.append((self._mover, self.workspace, self._table))
            return
        if self._mover is not None:
            self._mover.close()
        if self.workspace is not None:
            self.workspace.release(self)

    def __str__(self) -> str:
        return f"{self.spec.operation}({self.spec.choice.name}, rank {self.group.rank} of {self.group.size})"


def build(spec: Spec, group: Any, exchange_of: Callable[[int, Any], Exchange]) -> HostEngine:
    """Build the engine of a plan; collective."""
    return HostEngine(spec, group, exchange_of)

