# SPDX-License-Identifier: Apache-2.0
"""Owns the movement of messages by MPI; knows buffers, peers and counts, nothing of pencils.

Persistent requests serve messages in the workspace. Messages from or into users' arrays, whose addresses change from
call to call, use one request per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from mpi4py import MPI


class Wire:
    """The messages of one rank and the MPI datatype of an item.

    Parameters
    ----------
    sends, recvs : sequence of Part
        Messages, with peers as ranks of `comm`; offsets and counts in items.
    itemsize : int
        Bytes of an item.
    send_base, recv_base : int
        The bases that stand for the workspace.
    """

    def __init__(self, sends: Sequence[Any], recvs: Sequence[Any], itemsize: int, send_base: int, recv_base: int):
        self.sends = sends
        self.recvs = recvs
        self.itemsize = itemsize
        self.send_base = send_base
        self.recv_base = recv_base
        # Counts in items instead of bytes keep messages of up to 2**31 - 1 items within the reach of MPI 3.
        self.item = MPI.BYTE.Create_contiguous(itemsize).Commit()

    def buffer(self, part: Any, base: int) -> list[Any]:
        """Return mpi4py's description of the message `part` whose base lies at the address `base`."""
        memory = MPI.memory.fromaddress(base + part.offset * self.itemsize, part.items * self.itemsize)
        return [memory, part.items, self.item]


class PointToPoint:
    """Sends and receives, all at once (`mpi_p2p`), or each as soon as it is packed (`mpi_p2p_pl`)."""

    def __init__(self, comm: MPI.Intracomm, wire: Wire, tag: int, pipelined: bool):
        self.pipelined = pipelined
        self._comm = comm
        self._wire = wire
        self._tag = tag
        self._sends: list[Any] = [MPI.REQUEST_NULL] * len(wire.sends)
        self._recvs: list[Any] = [MPI.REQUEST_NULL] * len(wire.recvs)
        # Several messages between two ranks are told apart by the order in which they are started, one by one.
        self._ordered = any(len({part.peer for part in parts}) < len(parts) for parts in (wire.sends, wire.recvs))
        self._persistent_recvs: list[Any] = []

    def rebind(self, send: int, recv: int) -> None:
        """Make the persistent requests for the workspace at these addresses."""
        self._free()
        wire, comm = self._wire, self._comm
        for i, part in enumerate(wire.sends):
            if part.base == wire.send_base:
                self._sends[i] = comm.Send_init(wire.buffer(part, send), part.peer, self._tag)
        for i, part in enumerate(wire.recvs):
            if part.base == wire.recv_base:
                self._recvs[i] = comm.Recv_init(wire.buffer(part, recv), part.peer, self._tag)
        self._persistent_recvs = [request for request in self._recvs if request != MPI.REQUEST_NULL]

    def post(self, table: Any) -> None:
        """Start all receives."""
        wire = self._wire
        if not self._ordered:
            MPI.Prequest.Startall(self._persistent_recvs)
        for i, part in enumerate(wire.recvs):
            if part.base != wire.recv_base:
                self._recvs[i] = self._comm.Irecv(wire.buffer(part, table[part.base]), part.peer, self._tag)
            elif self._ordered:
                self._recvs[i].Start()

    def send(self, first: int, last: int, table: Any) -> None:
        """Start the messages first <= i < last."""
        wire = self._wire
        ready = []
        for i in range(first, last):
            part = wire.sends[i]
            if part.base != wire.send_base:
                self._sends[i] = self._comm.Isend(wire.buffer(part, table[part.base]), part.peer, self._tag)
            elif self._ordered:
                self._sends[i].Start()
            else:
                ready.append(self._sends[i])
        MPI.Prequest.Startall(ready)

    def arrived(self) -> list[int]:
        """Return the receives that have completed since the last call."""
        return MPI.Request.Testsome(self._recvs) or []

    def sent(self) -> bool:
        """Tell whether all sends have completed."""
        return MPI.Request.Testall(self._sends)

    def close(self) -> None:
        """Free the persistent requests; no operation is pending."""
        if not MPI.Is_finalized():
            self._free()
            self._wire.item.Free()

    def _free(self) -> None:
        for request in chain(self._sends, self._recvs):
            if request != MPI.REQUEST_NULL:
                request.Free()


class AllToAll:
    """One collective for all messages of a group of ranks (`mpi_a2a`)."""

    pipelined = False

    def __init__(self, comm: MPI.Intracomm, peers: Sequence[int], wire: Wire):
        self._comm = comm
        self._wire = wire
        place = {peer: i for i, peer in enumerate(peers)}
        self._send = self._counts(wire.sends, place)
        self._recv = self._counts(wire.recvs, place)
        self._request: Any = MPI.REQUEST_NULL
        self._addresses = (0, 0)
        self._nothing = MPI.memory.frombuffer(bytearray(wire.itemsize))

    def rebind(self, send: int, recv: int) -> None:
        """Take the addresses of the workspace."""
        self._addresses = (send, recv)

    def post(self, table: Any) -> None:
        """Nothing to do: the collective starts when all is packed."""

    def send(self, first: int, last: int, table: Any) -> None:
        """Start the collective."""
        wire = self._wire
        send = self._address(wire.sends, wire.send_base, self._addresses[0], table)
        recv = self._address(wire.recvs, wire.recv_base, self._addresses[1], table)
        self._request = self._comm.Ialltoallv(
            [self._memory(send, self._send), self._send, wire.item],
            [self._memory(recv, self._recv), self._recv, wire.item],
        )

    def arrived(self) -> list[int]:
        """Return all messages once the collective has completed."""
        if self._request == MPI.REQUEST_NULL or not self._request.Test():
            return []
        return list(range(len(self._wire.recvs)))

    def sent(self) -> bool:
        """Tell whether the collective has completed."""
        return bool(self._request.Test())

    def close(self) -> None:
        """Free the datatype; no operation is pending."""
        if not MPI.Is_finalized():
            self._wire.item.Free()

    @staticmethod
    def _counts(parts: Sequence[Any], place: dict[int, int]) -> tuple[list[int], list[int]]:
        """Return items and offsets by place in the group; offsets count from the first message."""
        counts, offsets, first = [0] * len(place), [0] * len(place), parts_start(parts)
        for part in parts:
            counts[place[part.peer]] = part.items
            offsets[place[part.peer]] = part.offset - first
        return counts, offsets

    def _address(self, parts: Sequence[Any], workspace_base: int, workspace: int, table: Any) -> int:
        """Return the address of the first message of one direction; all parts share one base.

        Not that of the base: a halo update sends from and receives into one array, and Open MPI takes equal addresses
        for MPI_IN_PLACE.
        """
        base = workspace if not parts or parts[0].base == workspace_base else int(table[parts[0].base])
        return base + parts_start(parts) * self._wire.itemsize

    def _memory(self, address: int, vector: tuple[list[int], list[int]]) -> Any:
        """Return the memory of one direction; where there is nothing to move, some other, and no null address.

        Open MPI 5 does not match a collective with a null address on a rank that has something for one direction alone.
        """
        items = max((n + offset for n, offset in zip(*vector, strict=True)), default=0)
        return MPI.memory.fromaddress(address, items * self._wire.itemsize) if items else self._nothing


def parts_start(parts: Sequence[Any]) -> int:
    """Return the offset of the first message, in items."""
    return min((part.offset for part in parts), default=0)
