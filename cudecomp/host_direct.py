# SPDX-License-Identifier: Apache-2.0
"""Owns the steps of an operation whose peers map each other's host memory: writes as soon as peers are ready for them.

Ranks that cannot be mapped get messages, as in `host.py`, within the same operation.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .engine import Bound
from .host import HostEngine
from .registry import Registry
from .transports.direct import Mapper


class DirectEngine(HostEngine):
    """One rank's part of an operation on host arrays, some of its peers mapped."""

    _mapper: Any = None  # until the engine is connected
    _registry: Registry

    def _find_registry(self) -> Registry:
        return Registry.of(self.group)

    def _device_setup(self) -> None:
        self.unpack = self._program(self.schedule.unpack)
        self._unwritten: list[int] = []  # puts that are still to be done, by number
        self._awaited: list[int] = []  # ranks whose writes have not arrived
        self._landed = False  # whether peers write to the landing in this run

    def _connect_mapped(self) -> None:
        schedule = self.schedule
        self.workspace.share(schedule.landing_bytes, self._registry)
        peers = [put.peer for put in schedule.puts]
        self._mapper = Mapper(self._registry, peers, schedule.sources, self.spec.fields)
        # A put ends with the flag that tells its peer so; its base is fixed, unlike that of the peer's arrays.
        flags = [(-1, 0)] * len(schedule.pack)
        for number, put in enumerate(schedule.puts):
            flags[put.segment] = (schedule.bases.peer_flags(number), self._mapper.written_place())
        self.pack = self._program(schedule.pack, flags)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array that peers have mapped; collective."""
        dtype = self.spec.dtype
        _, segment = self._registry.register(prod(shape) * dtype.itemsize)
        return np.asarray(segment).view(dtype).reshape(shape)

    def _fill(self, table: Any) -> None:
        super()._fill(table)
        bases = self.schedule.bases
        table[bases.landing] = self.workspace.shared[1].address
        for number, put in enumerate(self.schedule.puts):
            table[bases.peer_flags(number)] = self._mapper.control(put.peer)

    def _begin(self, bound: Bound, stream: Any, record: Any) -> None:
        self._unwritten = list(range(len(self.schedule.puts)))
        self._awaited = list(self.schedule.sources)
        places = self._places(bound.table)
        self._landed = places is None
        self.stats.landings += self._landed and bool(self.schedule.sources)
        self._mapper.offer(places or self._landing_places())
        super()._begin(bound, stream, record)

    def _write(self) -> bool:
        for number in self._unwritten[:]:
            put = self.schedule.puts[number]
            addresses = self._mapper.destination(put.peer)
            if addresses is None:
                continue
            table, bases = self._bound.table, self.schedule.bases
            for field, address in enumerate(addresses):
                table[bases.peer(number, field)] = address
            self.pack.run(table, put.segment, put.segment + 1)
            self._unwritten.remove(number)
        self._awaited = [rank for rank in self._awaited if not self._mapper.arrived(rank)]
        return not self._unwritten and not self._awaited

    def _unpack_own(self, table: Any) -> None:
        """Nothing yet: in place, the source is still to be read by writes that peers are not ready for."""

    def _collect(self) -> None:
        if not (self.spec.inplace and self._unwritten):
            super()._collect()

    def _finish(self) -> None:
        own, landing = self.schedule.own_unpack
        if self.spec.inplace:
            self.unpack.run(self._bound.table, own)
        elif self._landed:
            self.unpack.run(self._bound.table, landing)

    def _progress(self) -> Any:
        return super()._progress(), len(self._unwritten), len(self._awaited)

    def _waits_for(self) -> list[int]:
        late = {self.schedule.puts[number].peer for number in self._unwritten} | set(self._awaited)
        return sorted(late | set(super()._waits_for()))

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._mapper.leave(failed=True)

    def poison(self, why: str) -> None:
        """Make every later operation raise, here and on the peers."""
        super().poison(why)
        self._mapper.leave(failed=True)

    def close(self) -> None:
        """Give everything back; peers that wait for something else from this rank are told that it does not come."""
        if not self._closed:
            super().close()
            if self._mapper is not None:
                self._mapper.leave(failed=False)
