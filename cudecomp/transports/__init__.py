# SPDX-License-Identifier: Apache-2.0
"""Owns the choice of a transport; each transport is one module of this package, imported when a plan asks for it.

A transport knows buffers, peers and counts; it knows nothing of pencils or axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

MPI = ("mpi_p2p", "mpi_p2p_pl", "mpi_a2a")
BACKENDS = {"host": ("direct", *MPI), "cuda": ("direct", *MPI)}


class Mover(Protocol):
    """A transport that takes send and receive buffers and moves messages between them.

    One operation at a time: `post`, then `send` until all messages are on their way, `arrived` until all have come,
    `sent` until it is true. There may be several messages from one rank to another: both have them in the same order.

    Attributes
    ----------
    pipelined : bool
        Whether `send` may be called for one message after the other; otherwise one call names them all.
    """

    pipelined: bool

    def rebind(self, send: int, recv: int) -> None:
        """Take the addresses of the two parts of the workspace; local, between operations."""

    def post(self, table: Any) -> None:
        """Begin an operation: make receives ready. `table` maps bases to addresses."""

    def send(self, first: int, last: int, table: Any) -> None:
        """Start the messages first <= i < last, whose items are in place."""

    def arrived(self) -> list[int]:
        """Return the messages that have arrived since the last call; does not block."""

    def sent(self) -> bool:
        """Tell whether all send buffers may be written again; does not block."""

    def close(self) -> None:
        """Give resources back; never waits for peers."""


class Choice(NamedTuple):
    """The transport of a plan, and why it is this one.

    `device_buffers`: whether the transport takes addresses in device memory.
    """

    name: str
    why: str
    device_buffers: bool = False


def choose(backend: str, device: str, comm: Any, size: int) -> Choice:
    """Return the transport for a plan; ValueError if the one asked for cannot work. Local and the same on all ranks."""
    known = BACKENDS[device]
    if backend not in ("auto", "local", *known):
        raise ValueError(f"backend is {backend!r}, expected 'auto', 'local' or one of {', '.join(known)} on {device}")
    if backend == "local" and size > 1:
        raise ValueError(f"backend 'local' serves one process, the communicator has {size}")
    if comm is None:
        if backend in known:
            raise ValueError(f"backend {backend!r} needs a communicator, got comm=None")
        return Choice("local", "no communicator: this process alone")
    if backend == "local" or (backend == "auto" and size == 1):
        return Choice("local", "the communicator has one process")
    why = "asked for by name"
    if backend == "auto":
        backend, why = _best(device)
    return Choice(backend, why)


def direct_or(choice: Choice, mapped: bool) -> Choice:
    """Return the direct transport, which "auto" takes where any two ranks map each other's memory, else `choice`."""
    return Choice("direct", "auto: ranks of this host map each other's memory") if mapped else choice


def with_awareness(choice: Choice, aware: bool, reason: str) -> Choice:
    """Add to the choice of an MPI transport for a GPU whether device addresses are given to MPI, and why."""
    way = "device buffers are given to MPI" if aware else "messages are staged through pinned host memory"
    return choice._replace(why=f"{choice.why}; {way}: {reason}", device_buffers=aware)


def _best(device: str) -> tuple[str, str]:
    """Return the MPI transport that "auto" takes, and why."""
    if device == "host":
        return "mpi_p2p", "auto: no peers to map; MPI transports differ little, and this one takes the fewest steps"
    return "mpi_p2p_pl", "auto: the first message leaves while the others are still being packed"
