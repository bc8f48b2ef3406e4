# SPDX-License-Identifier: Apache-2.0
"""Owns the signals of the direct transport: who may write where, and what has been written; nothing of pencils.

Peers on one host address each other's memory, and every item is written once, in its final place. For each pair of
ranks and run k: free(k), the receiver says where its arrays are and that they may be written; then the writes; then
written(k). Epochs are compared with >=. Each word has one writer, and each pair a cache line of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import PoisonedError
from ..flags import load, read_words, store, write_words
from ..registry import Registry

LINE = 64  # bytes
LAST = 1 << 62  # added to an epoch: none comes after it, the peer has failed, or has closed the plan


class Mapper:
    """The signals of one plan on the host device.

    Building one is collective.

    Parameters
    ----------
    registry : Registry
        Of the plan's communicator.
    puts, sources : sequence of int
        The ranks this one writes to, and those that write to it.
    fields : int
        Destination arrays per rank.
    """

    def __init__(self, registry: Registry, puts: Sequence[int], sources: Sequence[int], fields: int):
        self.puts = puts
        self.sources = sources
        self._registry = registry
        self._fields = fields
        # Per rank of this host: a line for written(k), then lines for free(k) and the places of its arrays.
        self._stride = LINE + -(-8 * (1 + 2 * fields) // LINE) * LINE
        self._number, self._control = registry.register(len(registry.place) * self._stride)
        # Held here: a peer may give its plan up, and register something else, before this rank has closed its own.
        self._theirs = {peer: registry.mapped(peer, self._number) for peer in {*puts, *sources}}
        self._epoch = 0
        self._process = os.getpid()

    def written_place(self) -> int:
        """Return the offset, in each peer's control memory, of the flag that announces this rank's writes."""
        return self._line(self._registry.group.rank)

    def control(self, peer: int) -> int:
        """Return the address of a peer's control memory."""
        return self._theirs[peer].address

    def offer(self, places: Sequence[tuple[int, int]]) -> None:
        """Begin a run: tell all sources that they may write, to (registration, byte offset) of each field."""
        self._epoch += 1
        words = [word for place in places for word in place]
        for source in self.sources:
            line = self.control(source) + self.written_place() + LINE
            write_words(line + 8, words)
            store(line, self._epoch)

    def destination(self, peer: int) -> list[int] | None:
        """Return where a peer's fields may be written in this run, as addresses; None if it is not ready for it."""
        line = self._control.address + self._line(peer) + LINE
        if not self._reached(line, peer):
            return None
        words = read_words(line + 8, 2 * self._fields)
        return [
            self._registry.address(peer, number) + offset
            for number, offset in zip(words[::2], words[1::2], strict=True)
        ]

    def arrived(self, source: int) -> bool:
        """Tell whether everything that a source writes in this run is there."""
        return self._reached(self._control.address + self._line(source), source)

    def leave(self, failed: bool) -> None:
        """Tell all peers that no other epoch comes; where this rank has failed, nor may its arrays be written."""
        if os.getpid() != self._process:  # a fork has the mappings too, but is no part of the plan
            return
        for peer in {*self.puts, *self.sources}:
            at = self.control(peer) + self.written_place()
            store(at, load(at) | LAST)
            store(at + LINE, LAST if failed else load(at + LINE) | LAST)

    def _line(self, rank: int) -> int:
        return self._registry.place[rank] * self._stride

    def _reached(self, address: int, peer: int) -> bool:
        epoch = load(address)
        if epoch & LAST and epoch - LAST < self._epoch:
            raise PoisonedError(f"rank {peer} has failed, or has closed the plan")
        return epoch >= self._epoch
