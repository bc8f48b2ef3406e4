# SPDX-License-Identifier: Apache-2.0
"""Owns which memory of which rank this process can address; knows nothing of what is exchanged.

Ranks of one host map each other's segments. Reachable means that it was tried: a word was written through the mapping
and read back by its owner.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any, Protocol, Self

from .comm import attempt
from .shm import Segment as HostSegment


class Segment(Protocol):
    """Memory that processes of one host share: `shm.Segment`, `cuda.ipc.Segment`."""

    address: int
    nbytes: int
    offer: Any  # what `attach` takes in another process
    memory: Any  # what must live as long as another process maps it

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment of zeros."""

    @classmethod
    def attach(cls, offer: Any, nbytes: int) -> Segment:
        """Map a segment of another process."""

    def withdraw(self) -> None:
        """Note that everybody has it mapped."""

    def store(self, index: int, value: int) -> None:
        """Write a 64-bit word."""

    def load(self, index: int) -> int:
        """Read a 64-bit word."""


class Registry:
    """The shared memory of the ranks of a communicator on one device, by rank and number.

    Numbers are the same on all ranks; one that all ranks have given up is used again. Build it with `Registry.of`,
    collective at the first call.

    Attributes
    ----------
    reachable : frozenset of int
        The ranks whose memory this process can address and that can address its memory, itself included.
    place : dict of int to int
        The position of each rank of this host among them; the same on all of them.
    any_reachable, all_reachable : bool
        Whether any two ranks can address each other's memory, and whether all can; the same on all ranks.
    """

    device = "host"
    segments: type[Segment] = HostSegment

    def __init__(self, group: Any):
        self.group = group
        here = group.nodes[group.rank]
        self.place = {rank: i for i, rank in enumerate(r for r, node in enumerate(group.nodes) if node == here)}
        # By number, the latest last: the segment, what must live as long as a peer maps it, and when it was registered.
        self._mine: dict[int, tuple[weakref.ref[Segment], Any, int]] = {}
        self._leaving: dict[int, Any] = {}  # memory of what was given up, by when it was registered
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._serials: dict[tuple[int, int], int] = {}  # when they were registered
        self._dropped: dict[tuple[int, int], weakref.ref[Segment]] = {}  # by (rank, when)
        self._serial = 0  # counts registrations, the same on all ranks
        self._count = 0
        self._given_up: Counter[int] = Counter()  # by how many ranks, by number
        self._spare: list[int] = []  # numbers to be used again
        self.reachable = self._try_out()
        group.agree("shared memory", attempt(self._prepare)[1])

    def _prepare(self) -> None:
        """Make what a device needs."""

    @classmethod
    def of(cls, group: Any) -> Self:
        """Return the registry of a communicator for this class's device; collective at the first call."""
        if cls.device not in group.registries:
            group.registries[cls.device] = cls(group)
        return group.registries[cls.device]

    def register(self, nbytes: int) -> tuple[int, Any]:
        """Make shared memory of `nbytes`, zeroed, that reachable ranks have mapped on return.

        Collective; `nbytes` may differ between ranks. Returns the number of the registration and this rank's segment,
        which belongs to whoever holds it: mappings of segments that nobody holds any more go at the next registration.

        Raises
        ------
        OSError
            The memory is not there, or cannot be mapped, on any rank; the same on all ranks.
        """
        return self.admit(*attempt(lambda: self.segments.create(nbytes)))

    def admit(self, segment: Any, error: Exception | None = None) -> tuple[int, Any]:
        """Have reachable ranks map a segment of this one; otherwise as `register`.

        `error` says why this rank has none; it is raised on all ranks.
        """
        self._serial += 1
        news, failed = attempt(self._news)
        mine = (segment.offer, segment.nbytes) if segment else (None, 0)
        offers = self.group.mpi.allgather((*mine, *(news or ([], []))))
        self._drop(news[0] if news else [], offers)
        number = self._spare[-1] if self._spare else self._count
        error = error or failed
        if error is None:
            _, error = attempt(lambda: self._map(number, offers))
        try:
            self.group.agree("shared memory", error)
        except BaseException:
            if segment:
                self._leaving[self._serial] = segment.memory
            for rank in self.reachable:  # what other ranks did get must not stay occupied by this one
                self._unmap(rank, number)
            raise
        finally:
            if segment:
                segment.withdraw()
        if self._spare:
            self._spare.pop()
        else:
            self._count += 1
        self._mine[number] = weakref.ref(segment), segment.memory, self._serial
        return number, segment

    def _map(self, number: int, offers: list[tuple[Any, ...]]) -> None:
        """Map what the ranks within reach offer."""
        for rank in self.reachable - {self.group.rank}:
            offer, nbytes, *_ = offers[rank]
            if offer is not None:
                self._theirs[rank, number] = self.segments.attach(offer, nbytes)
                self._serials[rank, number] = self._serial

    def _news(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return what other ranks have to know: the numbers that this one gives up, and what it still maps of theirs.

        The latter as (rank, serial), of segments that their ranks have given up.
        """
        self._dropped = {key: ref for key, ref in self._dropped.items() if ref() is not None}
        return [number for number, (ref, *_) in self._mine.items() if ref() is None], list(self._dropped)

    def _drop(self, mine: list[int], offers: list[tuple[Any, ...]]) -> None:
        """Drop what ranks have given up: this one's mappings now, its memory as soon as no peer maps it any more."""
        for rank, (_, _, gone, _) in enumerate(offers):
            self._given_up.update(gone)
            for number in gone:
                self._unmap(rank, number)
        for number in [n for n, ranks in self._given_up.items() if ranks == self.group.size]:
            del self._given_up[number]
            self._spare.append(number)
        lingering = {serial for *_, held in offers for rank, serial in held if rank == self.group.rank}
        self._leaving = {serial: memory for serial, memory in self._leaving.items() if serial in lingering}
        for number in mine:
            _, memory, serial = self._mine.pop(number)
            if memory is not None:
                self._leaving[serial] = memory

    def _unmap(self, rank: int, number: int) -> None:
        """Let go of a mapping; others may still hold it."""
        mapped = self._theirs.pop((rank, number), None)
        if mapped is not None:
            self._dropped[rank, self._serials.pop((rank, number))] = weakref.ref(mapped)

    def mapped(self, rank: int, number: int) -> Any:
        """Return a segment of another rank; it stays mapped as long as it is held, whatever its owner does."""
        return self._theirs[rank, number]

    def address(self, rank: int, number: int) -> int:
        """Return where a segment of another rank is mapped."""
        return self._theirs[rank, number].address

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (number, byte offset) of this rank's registered memory that holds a range; None if there is none."""
        for number, (ref, *_) in reversed(self._mine.items()):
            segment = ref()
            if segment and segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return number, address - segment.address
        return None

    def segment(self, number: int) -> Any:
        """Return this rank's segment of a registration; as long as it is held, the number stands for it."""
        return self._mine[number][0]()

    def _try_out(self) -> frozenset[int]:
        """Return the ranks that can be reached and that reach this one; collective."""
        mpi, rank = self.group.mpi, self.group.rank
        segment, _ = attempt(lambda: self.segments.create(8 * len(self.place)))
        offers = mpi.allgather(segment.offer if segment else None)
        theirs = []
        for peer in self.place:
            if peer != rank and offers[peer] is not None:
                found, _ = attempt(partial(self.segments.attach, offers[peer], 8 * len(self.place)))
                if found and attempt(partial(found.store, self.place[rank], rank + 1))[1] is None:
                    theirs.append(found)
        mpi.Barrier()
        heard = attempt(lambda: {peer for peer, i in self.place.items() if segment.load(i) == peer + 1})[0] or set()
        del theirs  # mapped until their owners have read, and no longer than these live
        everyone = mpi.allgather(heard)
        if segment:
            segment.withdraw()
        pairs = {(one, other) for one, heard in enumerate(everyone) for other in heard if other != one}
        mutual = {pair for pair in pairs if pair[::-1] in pairs}
        self.any_reachable = bool(pairs)
        self.all_reachable = len(mutual) == len(everyone) * (len(everyone) - 1)
        return frozenset({peer for peer in heard if rank in everyone[peer]} | {rank})
