# SPDX-License-Identifier: Apache-2.0
"""Owns the life of an operation, whatever the device: building, starting, progress, waiting, failing, closing.

The devices (`host.py`, `cuda/engine.py`) say how segments are packed and unpacked. Engines take tables of addresses;
they know nothing of array objects.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .array import ArrayView
from .binding import arguments_of
from .boxes import compile_copies
from .comm import SPINS, attempt
from .errors import PoisonedError
from .exchange import Exchange
from .forever import keep
from .memory import allocate
from .pack import AddressTable, PackProgram
from .registry import Registry
from .schedule import Schedule, aligned, exchange_subgrid
from .spec import Spec, patience
from .text import ranks_text
from .workspace import Workspace

# The engines of plans that were not closed.
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


class Stats:
    """Counters of one plan."""

    __slots__ = ("captures", "evictions", "landings", "messages", "replays", "runs")

    def __init__(self) -> None:
        self.runs = self.messages = self.landings = self.captures = self.replays = self.evictions = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


# Address ranges (start, stop) of operations between start and wait, over all plans of this process, by engine. Threads
# may share it: entries are set and removed whole.
_in_flight: dict[Any, Sequence[tuple[int, int]]] = {}


class Bound:
    """One operation of an engine with addresses filled in: what a Call and a single run are made of.

    Attributes
    ----------
    engine : Engine
        Whose operation.
    table : AddressTable
        Where its arrays and the workspace lie.
    captured : object
        What the engine recorded for `replay`; None if nothing.
    """

    __slots__ = (
        *("_owners", "_spans", "captured", "engine", "generation", "key", "plan", "stream", "streams", "table"),
        *("quick", "work", "work_generation"),
    )

    def __init__(
        self,
        engine: Engine,
        table: AddressTable,
        spans: Sequence[tuple[int, int]] = (),
        owners: Any = None,
        streams: tuple[int, ...] = (),
        stream: int | None = None,
    ):
        self.engine = engine
        self.plan: Any = None  # kept alive by a Call
        self.captured: Any = None
        self.generation = 0  # of the workspace, when it was captured
        self.work: Any = None  # what a device has prepared for it, and for which generation
        self.work_generation = 0
        self.quick: Any = None  # launches the capture where nothing is in its way
        self.table = table
        self.key = tuple(table[i] for i in range(2 * engine.spec.fields))
        self.streams = streams  # that the arrays say they are in use on
        self.stream = stream  # the one that stands for None
        self._spans = spans
        self._owners = owners

    def run(self, stream: Any = None) -> None:
        """Start and wait."""
        self._refuse()
        self.engine.start(self, stream)
        self.engine.wait()

    def replay(self, stream: Any = None) -> None:
        """Run what was captured."""
        if self.quick is not None and not _in_flight and self.engine.replay_quickly(self, stream):
            return
        if self.captured is None:
            raise RuntimeError(f"{self.engine}: this call was not captured; use capture(src, dst)")
        self._refuse()
        self.engine.start(self, stream, self.captured)
        self.engine.wait()

    def start(self, stream: Any = None) -> None:
        """Begin the operation and claim the arrays until it is complete."""
        self._refuse()
        self.engine.start(self, stream, apart=True)
        self.engine.current = self
        _in_flight[self.engine] = self._spans

    def test(self) -> bool:
        """Make progress; tell whether the operation is complete."""
        return self.engine.current is not self or self.engine.test()

    def wait(self) -> None:
        """Block until the operation is complete."""
        if self.engine.current is self:
            self.engine.wait()

    def _refuse(self) -> None:
        """Raise unless the engine and the arrays are free."""
        self.engine.usable()
        for engine, spans in list(_in_flight.items()):
            if any(a < stop and start < b for a, b in self._spans for start, stop in spans):
                raise RuntimeError(f"{self.engine}: an array is in use by a pending operation of {engine}; wait for it")


class Engine:
    """One rank's part of an operation.

    Building one is collective over the communicator and fails on all ranks alike. A device's engine has `_device_setup`
    and the steps of a run: `_begin`, `_advance`, `_unpack`, `_finish`.
    """

    def __init__(self, spec: Spec, group: Any, exchange_of: Callable[[int, Any], Exchange]):
        self.spec = spec
        self.group = group
        self.stats = Stats()
        self.current: Bound | None = None  # the call between start and wait
        self._bound: Any = None  # what the pending operation works on
        self.latest: Bound | None = None  # what was captured last
        self._mover: Any = None
        self._poison: str | None = None
        self._closed = False
        self._lost = 0  # of the group, when its all-to-all was made
        self._missing: set[int] = set()  # receives that have not arrived, by number
        self._sent = 0  # messages handed to the transport
        self._sending = False  # whether there are more to come
        self.generation = 0  # counts the moves of the workspace
        self._running = False
        self._apart = False  # whether the operation was begun by `Bound.start`
        self._process = os.getpid()
        self._turn = threading.Lock()  # held by the thread that advances the operation
        self._registry = self._find_registry()
        _open.add(self)
        _, error = attempt(lambda: self._prepare(exchange_of))
        try:
            group.agree(spec.operation, error, timeout=patience(spec.timeout))
            self._connect()
        except BaseException:
            self.close()
            raise

    # --- building -----------------------------------------------------------------------------------------------

    def _prepare(self, exchange_of: Callable[[int, Any], Exchange]) -> None:
        """Do what needs no other rank; memory may run out here."""
        spec = self.spec
        nodes = spec.nodes or self.group.nodes
        self.schedule = Schedule(
            exchange_of(self.group.rank, nodes),
            spec.dtype.itemsize,
            fields=spec.fields,
            inplace=spec.inplace,
            zero_copy=spec.zero_copy,
            uniform=spec.choice.name == "mpi_a2a",
            mapped=self._mapped_ranks(nodes),
        )
        # No other rank takes part; the transport is left alone then.
        schedule = self.schedule
        self.alone = not (schedule.sends or schedule.recvs or schedule.puts or schedule.sources)
        # Whether messages pass, which the host has to drive.
        self.driven = bool(schedule.sends or schedule.recvs)
        # What arrives in a segment of its own, by message number.
        self._unpack_of = [part.segment for part in self.schedule.recvs]
        self.arguments = arguments_of(spec, self.group.rank)
        self.workspace = spec.workspace or Workspace.own(self.group, spec.device)
        self.workspace.reserve(self.schedule.message_bytes, spec.memory, self)
        self._device_setup()

    def _mapped_ranks(self, nodes: Sequence[int]) -> frozenset[int]:
        """Return the ranks whose memory this process addresses."""
        if self._registry is None:
            return frozenset()
        here = nodes[self.group.rank]
        return frozenset(rank for rank in self._registry.reachable if nodes[rank] == here)

    def _find_registry(self) -> Registry | None:
        """Return who knows the memory of mapped peers, if any may be mapped; collective."""
        return None

    def _device_setup(self) -> None:
        """Make the programs of the schedule."""
        raise NotImplementedError

    def view(self, array: Any, what: str) -> ArrayView:
        """Describe an array of the plan's device; TypeError if it is none."""
        raise NotImplementedError

    def _program(self, segments: Any, flags: Any = None, max_blocks: int = 0, slots: int = 0) -> PackProgram:
        boxes = compile_copies(segments, self.spec.dtype.itemsize)
        return PackProgram(self.spec.device, boxes, len(segments), self._base_count, flags, max_blocks, slots)

    @property
    def _base_count(self) -> int:
        """The length of the tables of addresses."""
        return self.schedule.bases.length

    def _connect(self) -> None:
        """Make the transport; collective."""
        name, group, schedule = self.spec.choice.name, self.group, self.schedule
        if name == "local":
            self.rebind()
            return
        if self._registry is not None:
            self._connect_mapped()
        from .transports.mpi import AllToAll, PointToPoint, Wire

        bases = schedule.bases
        wire = Wire(schedule.sends, schedule.recvs, self.spec.dtype.itemsize, bases.send, bases.recv)
        if name == "mpi_a2a":
            self._lost = group.lost
            subgrid = exchange_subgrid(schedule.exchange)
            grid = schedule.exchange.src.grid
            members = group.group((subgrid.entries, grid.shape, grid.rank_order), subgrid.color, not self.alone)
            self._mover = AllToAll(members[0], members[1], wire) if members else None
        else:
            tag = group.tag()
            if schedule.sends or schedule.recvs:
                self._mover = PointToPoint(group.mpi, wire, tag, name == "mpi_p2p_pl")
        self.rebind()

    def _connect_mapped(self) -> None:
        """Make what the mapped peers need to know of each other; collective."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array of the plan's dtype on its device; collective where transports map memory."""
        return allocate(shape, self.spec.dtype, self.spec.device)

    def rebind(self) -> None:
        """Take note of where the workspace lies, and tell the transport."""
        self.generation += 1
        send = self.workspace.address(self.spec.memory)
        self._parts = send, send + aligned(self.schedule.send_items * self.spec.dtype.itemsize)
        if self._mover is not None:
            self._mover.rebind(*self._parts)

    # --- mapped peers -------------------------------------------------------------------------------------------

    def _places(self, table: AddressTable) -> list[tuple[int, int]] | None:
        """Return (registration, offset) of each field's destination; None where peers have to use the landing."""
        if self.spec.inplace or self._registry is None:  # what peers bring must not overwrite what is still to be read
            return None
        spec, bases = self.spec, self.schedule.bases
        nbytes = spec.dst.size(self.group.rank) * spec.dtype.itemsize
        places = []
        for field in range(spec.fields):
            place = self._registry.find(table[bases.dst(field)], nbytes)
            if place is None:
                return None
            places.append(place)
        return places

    def _landing_places(self) -> list[tuple[int, int]]:
        """Return (registration, offset) of each field in the landing."""
        nbytes = self.spec.dst.size(self.group.rank) * self.spec.dtype.itemsize
        return [(self.workspace.shared[0], field * nbytes) for field in range(self.spec.fields)]

    def register(self, array: Any, what: str) -> None:
        """Make an array known to the transport; most need nothing. Local or collective."""
        self.view(array, what)

    # --- calls --------------------------------------------------------------------------------------------------

    def bind(self, sources: Sequence[int], destinations: Sequence[int], **kept: Any) -> Bound:
        """Return the operation on fields at these addresses; `kept` as for Bound."""
        bases = self.schedule.bases
        table = AddressTable(self._base_count)
        for field in range(bases.fields):
            table[bases.src(field)] = sources[field]
            table[bases.dst(field)] = destinations[field]
        return Bound(self, table, **kept)

    def bind_addresses(self, src: int, dst: int) -> Bound:
        """Return the operation on unchecked addresses; the fields of an array follow each other."""
        spec, rank = self.spec, self.group.rank
        itemsize, source, target = spec.dtype.itemsize, spec.src.size(rank), spec.dst.size(rank)
        if spec.one_array:
            source, dst = max(source, target), src
            target = source
        fields = range(spec.fields)
        return self.bind([src + i * source * itemsize for i in fields], [dst + i * target * itemsize for i in fields])

    def capture(self, bound: Bound) -> None:
        """Record an operation for replay."""
        self.usable()
        self._fill(bound.table)
        bound.captured, bound.generation = self._record(bound), self.generation
        self.stats.captures += 1

    def _record(self, bound: Bound) -> Any:
        """Return what `replay` of a bound operation needs."""
        raise NotImplementedError

    def replay_quickly(self, bound: Bound, stream: Any) -> bool:
        """Launch what was captured as one unit; False, and nothing is done, where the long way has to be taken."""
        return False

    def forget(self) -> None:
        """Destroy automatic captures; only a GPU has any."""

    # --- running ------------------------------------------------------------------------------------------------

    def start(self, bound: Bound, stream: Any = None, record: Any = None, apart: bool = False) -> None:
        """Pack and send, by `record` where there is one; arrays and workspace are in use until the end.

        `apart`: the caller has other work to do meanwhile.
        """
        self._check_stream(bound, stream)
        self._apart = apart
        if record is not None and bound.generation != self.generation:
            self.capture(bound)  # the workspace has moved since
            record = bound.captured
        self.workspace.enter(self)
        with self._turn:
            self._start(bound, stream, record)

    def _start(self, bound: Bound, stream: Any, record: Any) -> None:
        self._fill(bound.table)
        self._bound, self._running, self._sent = bound, True, 0
        self._missing = set(range(len(self._unpack_of)))
        self._sending = self._mover is not None and bool(self.schedule.sends or not self._mover.pipelined)
        self.stats.runs += 1
        self.stats.replays += record is not None
        try:
            self._begin(bound, stream, record)
        except BaseException as error:
            self._fail(error)
            raise

    def _fill(self, table: AddressTable) -> None:
        """Enter the addresses that do not belong to the caller."""
        bases = self.schedule.bases
        table[bases.send], table[bases.recv] = self._parts

    def _check_stream(self, bound: Bound, stream: Any) -> None:
        """Raise if an operation cannot be started on `stream`; before anything else is done."""

    def _begin(self, bound: Bound, stream: Any, record: Any) -> None:
        """Post receives, pack, and send what can be sent by now."""
        raise NotImplementedError

    def _advance(self) -> None:
        """Send what has been packed since."""

    def _write(self) -> bool:
        """Write what mapped peers are ready for; tell whether all is written, and all of theirs is here."""
        return True

    def _unpack(self, segments: list[int]) -> None:
        """Copy arrived messages to the destination."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Hand the arrays back to the caller."""

    def _send(self, last: int) -> None:
        """Start the messages up to `last`."""
        self._mover.send(self._sent, last, self._bound.table)
        self.stats.messages += last - self._sent
        self._sent = last
        self._sending = last < len(self.schedule.sends)

    def _collect(self) -> None:
        """Unpack what has arrived."""
        found = self._mover.arrived()
        if found:
            segments = [self._unpack_of[i] for i in found if self._unpack_of[i] >= 0]
            if segments:
                self._unpack(segments)
            self._missing.difference_update(found)

    def test(self) -> bool:
        """Make progress; tell whether the operation is complete. Does not block."""
        if not self._running:
            return True
        if not self._turn.acquire(blocking=False):
            return False  # another thread, which waits for a plan of its own, is at it
        try:
            return self._test()
        finally:
            self._turn.release()

    def _test(self) -> bool:
        if not self._running:  # another thread has completed it
            return True
        if self._poison is not None:  # what still arrives is no business of the arrays any more
            raise PoisonedError(f"{self}: {self._poison}; close it and build another")
        try:
            written = self._write()
            if self._mover is not None:
                if self._sending:
                    self._advance()
                if self._missing:
                    self._collect()
                if self._missing or self._sending or not self._mover.sent():
                    return False
            if not written:
                return False
            self._finish()
        except PoisonedError as error:  # a peer's, which does not know whose it is
            named = PoisonedError(f"{self}: {error}")
            self._fail(named)
            raise named from None
        except BaseException as error:
            self._fail(error)
            raise
        self._running, self._bound = False, None
        self.workspace.leave(self)
        if self.current is not None:
            self.current = None
            _in_flight.pop(self, None)
        return True

    def wait(self) -> None:
        """Block until the operation is complete, or the timeout has passed."""
        try:
            self._wait()
        except BaseException as error:  # in a signal's handler, too: nobody would wait for the rest of a run
            if self._running and self._poison is None and self.current is None:
                self._fail(error)
            raise

    def _wait(self) -> None:
        spins, last, state = 0, time.monotonic(), self._progress()
        while not self.test():
            spins += 1
            if self._progress() != state:
                spins, last, state = 0, time.monotonic(), self._progress()
            elif spins > SPINS:
                os.sched_yield()
                _help_others(self)
                if self.spec.timeout is not None and time.monotonic() - last > self.spec.timeout:
                    self._time_out()

    def _time_out(self) -> None:
        peers = self._waits_for()
        waits = ranks_text(peers) if peers else "its own messages to be taken"
        error = TimeoutError(f"{self}: nothing happened for {self.spec.timeout} s while it waited for {waits}")
        self._fail(error)
        self.group.lost += self.spec.choice.name == "mpi_a2a"
        raise error

    def _progress(self) -> Any:
        """Return something that changes when an operation advances."""
        return self._sent, len(self._missing)

    def _waits_for(self) -> list[int]:
        """Return the ranks that something is still to come from."""
        return sorted(self.schedule.recvs[i].peer for i in self._missing)

    # --- ending -------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Poison the plan: messages are under way that nobody waits for."""
        self._poison = f"{type(error).__name__} in the middle of an operation: {error}"

    def usable(self) -> None:
        """Raise unless an operation may start."""
        if self._poison is not None:
            raise PoisonedError(f"{self}: {self._poison}; close it and build another")
        if self._closed:
            raise RuntimeError(f"{self}: it is closed")
        if self.spec.choice.name == "mpi_a2a" and self._lost != self.group.lost:
            raise PoisonedError(f"{self}: another all-to-all on its ranks was given up; close it and build another")
        if self._running:
            raise RuntimeError(f"{self}: an operation of this plan is pending; wait for it first")

    @property
    def capturable(self) -> bool:
        """Whether a capture holds the whole operation."""
        return False

    @property
    def pending(self) -> bool:
        """Whether an operation was started and is not complete."""
        return self._running

    @property
    def closed(self) -> bool:
        """Whether the plan was closed."""
        return self._closed

    def poison(self, why: str) -> None:
        """Make every later operation raise, saying why."""
        self._poison = self._poison or why

    def close(self) -> None:
        """Give everything back; idempotent, never waits for peers."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        _in_flight.pop(self, None)
        self.latest = None
        if os.getpid() != self._process:  # a fork is no part of the plan: its messages are the parent's
            return
        with contextlib.suppress(Exception):
            self._settle()
        if self._running:
            self.group.lost += self.spec.choice.name == "mpi_a2a"
            keep(self)  # with its requests, workspace and arrays: MPI may still write, and peers are not waited for
            return
        if self._mover is not None:
            self._mover.close()
        self._release()

    def _settle(self) -> None:
        """End an operation that is complete, or that has failed and has nothing under way: it is in nobody's use."""
        if self._poison is None:
            self.test()
        elif self._running and self._mover is not None:
            self._missing.difference_update(self._mover.arrived())
            self._running = bool(self._missing) or not self._mover.sent()
        else:
            self._running = False

    def _release(self) -> None:
        """Free what belongs to this plan alone."""
        if hasattr(self, "workspace"):
            self.workspace.release(self)

    def __str__(self) -> str:
        return f"{self.spec.operation}({self.spec.choice.name}, rank {self.group.rank} of {self.group.size})"


@atexit.register
def _keep_pending() -> None:
    """Keep what is pending when the interpreter ends: MPI is finalized after Python has freed its objects."""
    for engine in list(_open):
        if engine.pending:
            keep(engine)


def _help_others(waiting: Engine) -> None:
    """Advance the other pending operations: ranks may wait for theirs in another order."""
    for other in list(_in_flight):
        if other is not waiting:
            attempt(other.test)  # an error stays with its plan, whose own wait raises
