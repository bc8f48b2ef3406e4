# SPDX-License-Identifier: Apache-2.0
"""Owns which memory of which rank this process can address; knows nothing of what is exchanged.

Ranks of one host map each other's segments. Reachable means that it was tried: a word was written through the mapping
and read back by its owner.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from functools import partial
from typing import Any

from .comm import attempt
from .flags import load, store
from .shm import Segment


class Registry:
    """The shared memory of the ranks of a communicator, by rank and number.

    Numbers count registrations, the same on all ranks. Build it with `Registry.of`, collective at the first call.

    Attributes
    ----------
    reachable : frozenset of int
        The ranks whose memory this process can address and that can address its memory, itself included.
    place : dict of int to int
        The position of each rank of this host among them; the same on all of them.
    any_reachable : bool
        Whether any two ranks can address each other's memory; the same on all ranks.
    """

    def __init__(self, group: Any):
        self.group = group
        here = group.nodes[group.rank]
        self.place = {rank: i for i, rank in enumerate(r for r, node in enumerate(group.nodes) if node == here)}
        self._mine: dict[int, weakref.ref[Segment]] = {}
        self._starts: list[tuple[int, int]] = []  # (address, number) of `_mine`, sorted
        self._theirs: dict[tuple[int, int], Segment] = {}
        self._count = 0
        self.reachable = self._try_out()

    @classmethod
    def of(cls, group: Any) -> Registry:
        """Return the registry of a communicator; collective at the first call."""
        if group.registry is None:
            group.registry = cls(group)
        return group.registry

    def register(self, nbytes: int) -> tuple[int, Segment]:
        """Make shared memory of `nbytes`, zeroed, that reachable ranks have mapped on return.

        Collective; `nbytes` may differ between ranks. Returns the number of the registration and this rank's segment,
        which belongs to whoever holds it: mappings of segments that nobody holds any more go at the next registration.

        Raises
        ------
        OSError
            The memory is not there, or cannot be mapped, on any rank; the same on all ranks.
        """
        segment, error = attempt(lambda: Segment.create(nbytes))
        path = segment.path if segment else ""
        gone = [number for number, ref in self._mine.items() if ref() is None]
        offers = self.group.mpi.allgather((path, nbytes, gone))
        if error is None:
            _, error = attempt(lambda: self._map(offers))
        try:
            self.group.agree("shared memory", error)
        except BaseException:
            for rank in self.reachable:  # what other ranks did get must not stay occupied by this one
                self._theirs.pop((rank, self._count), None)
            raise
        finally:
            if segment:
                segment.unlink()
        for number in gone:
            del self._mine[number]
        self._mine[self._count] = weakref.ref(segment)
        held = ((ref(), number) for number, ref in self._mine.items())
        self._starts = sorted((one.address, number) for one, number in held if one)
        self._count += 1
        return self._count - 1, segment

    def _map(self, offers: list[tuple[str, int, list[int]]]) -> None:
        """Map what the ranks within reach offer, and drop what they have given up."""
        for rank in self.reachable - {self.group.rank}:
            path, nbytes, gone = offers[rank]
            if path:
                self._theirs[rank, self._count] = Segment.attach(path, nbytes)
            for number in gone:
                self._theirs.pop((rank, number), None)

    def mapped(self, rank: int, number: int) -> Segment:
        """Return a segment of another rank; it stays mapped as long as it is held, whatever its owner does."""
        return self._theirs[rank, number]

    def address(self, rank: int, number: int) -> int:
        """Return where a segment of another rank is mapped."""
        return self._theirs[rank, number].address

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (number, byte offset) of this rank's registered memory that holds a range; None if there is none."""
        at = bisect_right(self._starts, (address, self._count))
        if at:  # the last one that starts no later; segments that are held do not overlap
            start, number = self._starts[at - 1]
            segment = self._mine[number]()
            if segment and address + nbytes <= start + segment.nbytes:
                return number, address - start
        return None

    def _try_out(self) -> frozenset[int]:
        """Return the ranks that can be reached and that reach this one; collective."""
        mpi, rank = self.group.mpi, self.group.rank
        segment, _ = attempt(lambda: Segment.create(8 * len(self.place)))
        paths = mpi.allgather(segment.path if segment else "")
        for peer in self.place:
            if peer != rank and paths[peer]:
                theirs, _ = attempt(partial(Segment.attach, paths[peer], 8 * len(self.place)))
                if theirs:
                    store(theirs.address + 8 * self.place[rank], rank + 1)
        mpi.Barrier()
        heard = set()
        if segment:
            heard = {peer for peer, i in self.place.items() if load(segment.address + 8 * i) == peer + 1}
        everyone = mpi.allgather(heard)
        if segment:
            segment.unlink()
        pairs = ((one, other) for one, heard in enumerate(everyone) for other in heard if other != one)
        self.any_reachable = any(one in everyone[other] for one, other in pairs)
        return frozenset({peer for peer in heard if rank in everyone[peer]} | {rank})
