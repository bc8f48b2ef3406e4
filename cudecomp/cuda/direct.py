# SPDX-License-Identifier: Apache-2.0
"""Owns the steps of an operation whose peers map each other's device memory: the device waits for peers, the host does
not, and the whole operation can be recorded as one graph.

Ranks that cannot be mapped get messages, as in `engine.py`, within the same operation.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..comm import attempt
from ..engine import Bound
from ..errors import PoisonedError
from .engine import CudaEngine
from .graph import PackStep, Step, Work
from .ipc import Segment
from .memory import DeviceArray, DeviceMemory, closed_work, open_work
from .reach import DeviceRegistry
from .runtime import Event, Stream
from .signals import ADMIT, ARRIVE, FAIL, LEAVE, LINE, MOST_FIELDS, OFFER, TIMED_OUT, Signals, SignalStep


class CudaDirectEngine(CudaEngine):
    """One rank's part of an operation on device arrays, some of its peers mapped."""

    _registry: DeviceRegistry
    _signals: Any = None  # until the engine is connected

    def _find_registry(self) -> DeviceRegistry:
        return DeviceRegistry.of(self.group)

    def _make_local(self) -> None:
        """The places of the peers' signals are known when the engine is connected."""
        if self._registry.ordinal != self.device:
            raise RuntimeError(
                f"{self}: device {self.device} is current, expected {self._registry.ordinal}, which the other plans on "
                "this communicator use"
            )
        if self.spec.fields > MOST_FIELDS:
            raise ValueError(f"{self}: {self.spec.fields} fields, expected at most {MOST_FIELDS} on this transport")
        self.local = None

    def _connect_mapped(self) -> None:
        self.workspace.share(self.schedule.landing_bytes, self._registry)
        # Per rank of this host: a line for written(k), then lines for free(k) and the places of its arrays.
        stride = LINE + -(-8 * (1 + 2 * self.spec.fields) // LINE) * LINE
        number, self._control = self._registry.register(len(self._registry.place) * stride)
        # Held here: a peer may give its plan up, and register something else, before this rank has closed its own.
        self._theirs = {peer: self._registry.mapped(peer, number) for peer in self._peers()}
        _, error = attempt(lambda: self._make_signals(stride))
        self.group.agree(self.spec.operation, error)

    def _make_signals(self, stride: int) -> None:
        bases = self.schedule.bases
        self._slots = DeviceMemory(8 * max(bases.length - bases.fixed, 1))
        self._registered: list[Segment] = []
        self._aside, self._gave_up = Stream(), Event()  # for what must not wait for anything
        self._compile_local()
        open_work[self] = self._complete
        self._signals = Signals(self._edges(stride), self.spec.fields, self._slots, self.spec.timeout)
        self._status = self._signals.status_address

    def _peers(self) -> set[int]:
        return {*(put.peer for put in self.schedule.puts), *self.schedule.sources}

    def _edges(self, stride: int) -> list[tuple[int, ...]]:
        """Return what `Signals` needs to know of each peer."""
        registry, bases = self._registry, self.schedule.bases
        own = registry.place[self.group.rank]
        slots = {put.peer: bases.peer(i, 0) - bases.fixed for i, put in enumerate(self.schedule.puts)}
        return [
            (
                theirs.address + own * stride,
                self._control.address + registry.place[peer] * stride,
                registry.table(peer),
                peer,
                slots.get(peer, -1),
                peer in self.schedule.sources,
            )
            for peer, theirs in self._theirs.items()
        ]

    def _compile_local(self) -> None:
        """Compile what is written to mapped peers, each with the flag that tells it so, and what stays on the rank."""
        schedule, bases = self.schedule, self.schedule.bases
        segments = schedule.pack[self._messages :]
        flags = [(bases.peer_flags(i), 0) for i in range(len(schedule.puts))]
        flags += [(-1, 0)] * (len(segments) - len(flags))
        self.local = self._program(segments, flags, slots=bases.length - bases.fixed)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array that peers have mapped; collective."""
        dtype = self.spec.dtype
        _, segment = self._registry.register(prod(shape) * dtype.itemsize)
        return DeviceArray(shape, dtype, segment)

    def register(self, array: Any, what: str) -> None:
        """Have peers map an array, which is kept alive until the plan is closed; collective."""

        def share() -> Segment:
            view = self.view(array, what)
            return Segment.of(view.address, view.nbytes, view.owner)

        _, segment = self._registry.admit(*attempt(share))
        self._registered.append(segment)

    # --- device work --------------------------------------------------------------------------------------------

    def _fill(self, table: Any) -> None:
        super()._fill(table)
        table[self.schedule.bases.landing] = self.workspace.shared[1].address
        table[self.schedule.bases.slots] = self._slots.address

    def _make_work(self, bound: Bound) -> Work:
        """Return what the device does: all that peers wait for comes before the first wait."""
        schedule, signals, table = self.schedule, self._signals, bound.table
        singles = 0 if self.spec.launch == "fused" else len(schedule.puts)
        places = self._places(table)
        writes = [PackStep(self.local, table, singles=singles)]
        lands = places is None and bool(schedule.sources)
        # As long as this work can be launched, the numbers of its registrations must stand for these arrays.
        kept = [self._registry.segment(number) for number, _ in places or ()]
        rest = self._rest_steps(bound, lands)
        if not self._theirs:
            return Work([*self._message_steps(bound), *writes, *rest], lands, kept)
        places = places or self._landing_places()
        if self.driven:
            begin = [SignalStep(signals, OFFER, places), *self._message_steps(bound), SignalStep(signals, ADMIT)]
        else:
            begin = [SignalStep(signals, OFFER | ADMIT, places)]
        return Work([*begin, *writes, SignalStep(signals, ARRIVE), *rest], lands, kept)

    def _key(self, bound: Bound) -> Any:
        places = self._places(bound.table)
        return bound.key, tuple(places) if places else None

    def _rest_steps(self, bound: Bound, lands: bool) -> list[Step]:
        """Copy out of the workspace what has come by other ways than messages."""
        own, landing = self.schedule.own_unpack
        if self.spec.inplace:
            return [PackStep(self.unpack, bound.table, own)]
        return [PackStep(self.unpack, bound.table, landing)] if lands else []

    def _in_use(self) -> tuple[Any, ...]:
        return (*super()._in_use(), self._slots, self._control, self._theirs, self.workspace.shared)

    # --- ending -------------------------------------------------------------------------------------------------

    def usable(self) -> None:
        """Raise unless an operation may start; the device may have found out meanwhile that a peer does not answer."""
        self._look()
        super().usable()

    def _look(self) -> None:
        """Raise, once, what the device has found out."""
        stopped = self._signals.stopped if self._signals is not None and self._poison is None else None
        if stopped is None:
            return
        why, peer = stopped
        if why == TIMED_OUT:
            error: Exception = TimeoutError(
                f"{self}: nothing happened for {self.spec.timeout} s while the device waited for rank {peer}"
            )
        else:
            error = PoisonedError(f"{self}: rank {peer} has failed, or has closed the plan")
        self._fail(error)
        raise error

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._give_up()

    def poison(self, why: str) -> None:
        """Make every later operation raise, here and on the peers."""
        super().poison(why)
        self._give_up()

    def _give_up(self) -> None:
        if self._signals is not None:
            self._signals.give(FAIL, self._aside.address)
            self._gave_up.record(self._aside.address)

    def _leave(self) -> None:
        """Tell peers that no other run comes, after those that were begun."""
        own = self._stream.address
        for event in (self._complete, self._gave_up):
            event.order(own)
        self._signals.give(LEAVE, own)
        self._complete.record(own)

    def close(self) -> None:
        """Give everything back; peers that wait for something else from this rank are told that it does not come.

        Raises what the device has found out, if nobody was told yet.
        """
        if self._closed:
            return
        _, found = attempt(self._look)
        super().close()
        if self._signals is not None:  # an operation is pending: what it uses stays, but no other one comes
            self._leave()
        if found is not None:
            raise found

    def _release(self) -> None:
        if self._signals is not None:
            self._leave()
            used = self._signals, self.local, self.unpack, self._registered, *self._in_use()
            closed_work.append((self._complete, used))
            # Peers free their memory when nobody maps it any more: nothing of it stays with the engine.
            self._signals, self._theirs, self._control, self._registered = None, {}, None, []
        super()._release()
