# SPDX-License-Identifier: Apache-2.0
"""Owns the steps of an operation on the host device: copies block, so that what is packed can be sent at once."""

from __future__ import annotations

from typing import Any

from .array import ArrayView, host_view
from .engine import Bound, Engine


class HostEngine(Engine):
    """One rank's part of an operation on arrays in host memory."""

    def _device_setup(self) -> None:
        self.unpack = self._program(self.schedule.unpack)
        self.pack = self._program(self.schedule.pack)

    def view(self, array: Any, what: str) -> ArrayView:
        """Describe an array in host memory."""
        return host_view(array, what)

    def _record(self, bound: Bound) -> Any:
        """On the host device the record is the bound operation itself: its arrays were checked."""
        return bound

    def _check_stream(self, bound: Bound, stream: Any) -> None:
        if stream is not None:
            raise ValueError(f"{self}: stream is {stream!r}, expected None on the host device")

    def _begin(self, bound: Bound, stream: Any, record: Any) -> None:
        table = bound.table
        if self._mover is not None:
            self._mover.post(table)
            self._pack_and_send(bound)
        self.pack.run(table, self.schedule.own_segment)
        if self.spec.inplace:
            self._unpack_own(table)

    def _unpack_own(self, table: Any) -> None:
        """Move what stays on this rank, and lay in the workspace meanwhile, to its place: everything is packed."""
        self.unpack.run(table, *self.schedule.own_unpack)

    def _pack_and_send(self, bound: Bound) -> None:
        """Pack and start the messages: one after the other where the transport is pipelined, else all at once."""
        sends = self.schedule.sends
        if not self._mover.pipelined:
            self.pack.run(bound.table, 0, self.schedule.message_segments)
            self._send(len(sends))
            return
        for i, part in enumerate(sends):
            if part.segment >= 0:
                self.pack.run(bound.table, part.segment, part.segment + 1)
            self._send(i + 1)
            if not self.spec.inplace:  # in place, an unpack would overwrite what is still to be packed
                self._collect()

    def _unpack(self, segments: list[int]) -> None:
        self.unpack.run_list(self._bound.table, segments)
