# SPDX-License-Identifier: Apache-2.0
"""Owns the registry of device memory: a table in device memory says where peers' registrations are mapped here."""

from __future__ import annotations

from typing import Any

from ..registry import Registry
from .ipc import Segment, write_words
from .memory import DeviceMemory, free_abandoned
from .runtime import current_device

# Registrations that may live at once, per communicator. A word per registration and rank of the host.
MOST = 4096


class DeviceRegistry(Registry):
    """The device memory of the ranks of a communicator, by rank and number.

    Attributes
    ----------
    ordinal : int
        The device whose memory is mapped and shared.
    """

    device = "cuda"
    segments = Segment

    def _prepare(self) -> None:
        self.ordinal = current_device()
        self._table = DeviceMemory(8 * MOST * len(self.place))

    def table(self, rank: int) -> int:
        """Return the address, in device memory, of the addresses of a rank's registrations by number."""
        return int(self._table.address) + 8 * MOST * self.place[rank]

    def _map(self, number: int, offers: list[tuple[Any, ...]]) -> None:
        if number >= MOST:
            raise MemoryError(f"the ranks of this communicator share {MOST} device arrays, expected no more")
        super()._map(number, offers)
        for rank in self.reachable - {self.group.rank}:
            if (rank, number) in self._theirs:
                write_words(self.table(rank) + 8 * number, [self.address(rank, number)])

    def _news(self) -> tuple[list[int], list[tuple[int, int]]]:
        # While the device may be waiting for peers, a run in flight may have offered what nobody holds any more; and
        # mappings that nobody holds are closed only later.
        return super()._news() if free_abandoned() else ([], list(self._dropped))
