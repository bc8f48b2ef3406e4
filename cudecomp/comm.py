# SPDX-License-Identifier: Apache-2.0
"""Owns the package's communicators and what ranks agree on; knows nothing of pencils or of the data that travels.

One duplicate is made per user communicator and kept as an MPI attribute of it, since MPI libraries have few
communicators to give; plans on it differ by tag. mpi4py is imported only when a communicator is at hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .forever import keep
from .text import ranks_text

# Polls before a waiting rank gives its core away: where ranks share cores, every poll more costs the others time.
SPINS = 20

_keyval: int | None = None

# The exceptions that travel from one rank to the others; others arrive as the nearest of these that they are.
_TRAVELLING = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, MemoryError, RuntimeError, TimeoutError, OSError, ImportError)
}


class Alone:
    """A group of this process alone; MPI is not imported."""

    lost = 0
    rank = 0
    size = 1
    nodes = (0,)
    user = None

    def agree(
        self,
        what: str,
        error: BaseException | None,
        spec: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Raise `error` if there is one."""
        if error is not None:
            raise error


class Communicator:
    """This package's duplicate of a user's communicator, shared by all plans on it.

    Build it with `Communicator.of` (collective at its first call for a communicator).

    Attributes
    ----------
    user, mpi : mpi4py.MPI.Intracomm
        The communicator given by the user, and the duplicate that messages travel in.
    rank, size : int
        Of the communicator.
    nodes : tuple of int
        For each rank the lowest rank that shares its host.
    """

    def __init__(self, user: Any, timeout: float | None = None):
        from mpi4py import MPI

        self.user = user
        self._given_up = False  # an agreement that this rank began and did not wait for
        self.mpi, request = user.Idup()
        self._complete(request, "the first plan on a communicator", timeout)
        self.rank = self.mpi.Get_rank()
        self.size = self.mpi.Get_size()
        self._tags = 0
        self._tag_limit = self.mpi.Get_attr(MPI.TAG_UB) or 32767
        self.registries: dict[str, Any] = {}  # of memory that ranks map, by device, made at the first need
        self._aware: tuple[bool, str] | None = None
        self.lost = 0  # collectives that this rank began and gave up
        self._groups: dict[Hashable, tuple[Any, tuple[int, ...]] | None] = {}
        host = self.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        self.nodes = tuple(self.mpi.allgather(host.bcast(self.rank)))
        host.Free()

    @classmethod
    def of(cls, comm: Any, timeout: float | None = None) -> Communicator | Alone:
        """Return the duplicate of `comm`, made at the first call (then collective over it); None means this process.

        TimeoutError if that takes longer than `timeout` seconds.
        """
        if comm is None:
            return Alone()
        MPI = _mpi_of(comm)
        global _keyval
        if _keyval is None:
            _keyval = MPI.Comm.Create_keyval(delete_fn=_release)
        found = comm.Get_attr(_keyval)
        if found is None:
            found = cls(comm, timeout)
            comm.Set_attr(_keyval, found)
        return found

    def cuda_aware(self) -> tuple[bool, str]:
        """Return whether MPI takes device addresses on all ranks, and why; collective at the first call."""
        if self._aware is None:
            from .aware import cuda_aware

            # One rank of each host asks, since the answer takes a process of its own.
            found = cuda_aware() if self.nodes[self.rank] == self.rank else (True, "")
            answers = self.mpi.allgather(found)
            self._aware = next((a for a in answers if not a[0]), answers[0])
        return self._aware

    def tag(self) -> int:
        """Return the tag of the next plan; the same on all ranks, since plans are built collectively."""
        self._tags = self._tags % self._tag_limit + 1
        return self._tags

    def group(self, name: Hashable, color: int, present: bool) -> tuple[Any, tuple[int, ...]] | None:
        """Return the communicator of the ranks with the same `color`, and those ranks; None where not `present`.

        Collective. Ranks that have nothing to say are left out: some MPI libraries (Open MPI 4) return early from a
        collective without data, and do not match the next one on that communicator. Nor do ranks that gave a
        collective up match those that never began it: new communicators are made after that.
        """
        from mpi4py import MPI

        key = name, tuple(self.mpi.allgather((present, self.lost)))
        if key not in self._groups:
            members = self.mpi.Split(color if present else MPI.UNDEFINED, self.rank)
            self._groups[key] = (members, tuple(members.allgather(self.rank))) if present else None
        return self._groups[key]

    def agree(
        self,
        what: str,
        error: BaseException | None,
        spec: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Raise the same exception on all ranks, or on none.

        Collective. The error of the lowest failing rank is raised everywhere; without errors, ranks whose `spec`
        differs from rank 0's give a ValueError that names the first differing entry, its values and their ranks.
        A rank that waits for the others for more than `timeout` seconds raises TimeoutError, alone.
        """
        digest = hashlib.sha256(repr(sorted((spec or {}).items())).encode()).digest()
        told = self._gather(what, bytes([error is not None]) + digest, timeout)
        if any(one[0] for one in told):
            errors = self.mpi.allgather(None if error is None else (_travelling(error), str(error)))
            failed = [(rank, found) for rank, found in enumerate(errors) if found is not None]
            raise _shared_error(failed, self.size) from error
        if any(one != told[0] for one in told):
            raise ValueError(f"{what}: {_difference(self.mpi.allgather(dict(spec or {})))}")

    def _gather(self, what: str, mine: bytes, timeout: float | None) -> list[bytes]:
        """Return what each rank says, all of one length; collective."""
        if self._given_up:
            raise RuntimeError(
                f"{what}: this communicator cannot be used any more: a rank waited for the others in vain"
            )
        everything = bytearray(len(mine) * self.size)
        self._complete(self.mpi.Iallgather(mine, everything), what, timeout, (mine, everything))
        return [bytes(everything[i : i + len(mine)]) for i in range(0, len(everything), len(mine))]

    def _complete(self, request: Any, what: str, timeout: float | None, buffers: Any = None) -> None:
        """Wait for a collective; TimeoutError after `timeout` seconds. Given up, its buffers stay: MPI may write."""
        tries, end = 0, None if timeout is None else time.monotonic() + timeout
        try:
            while not request.Test():
                tries += 1
                if tries > SPINS:
                    os.sched_yield()
                    if end is not None and time.monotonic() > end:
                        raise TimeoutError(
                            f"{what}: not all ranks of the communicator were there within {timeout:g} s; building a "
                            "plan, and each run with check=True, is collective: all its ranks have to call it"
                        )
        except BaseException:
            self._given_up = True
            keep((request, buffers))
            raise


def _mpi_of(comm: Any) -> Any:
    """Return the MPI module that `comm` is an intracommunicator of."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL, expected a communicator that this process belongs to")
    if MPI is None or not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is a {type(comm).__name__}, expected an mpi4py.MPI.Intracomm or None")
    return MPI


def _release(comm: Any, keyval: int, found: Communicator) -> None:
    """Free the duplicate together with the user's communicator."""
    with contextlib.suppress(Exception):
        for group in found._groups.values():
            if group is not None:
                group[0].Free()
        found.mpi.Free()


def _travelling(error: BaseException) -> str:
    """Return the name of the nearest class of an exception that all ranks know."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _TRAVELLING), "RuntimeError")


def _shared_error(failed: list[tuple[int, tuple[str, str]]], size: int) -> Exception:
    kind, text = failed[0][1]
    if len(failed) < size:
        text += f" (on {ranks_text([rank for rank, _ in failed])} of {size})"
    return _TRAVELLING[kind](text)


def _difference(specs: list[dict[str, str]]) -> str:
    """Describe the first entry of the specification that is not the same on all ranks."""
    for name in specs[0]:
        ranks: dict[str, list[int]] = {}
        for rank, spec in enumerate(specs):
            ranks.setdefault(spec.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value} on {ranks_text(at)}" for value, at in ranks.items())
            return f"{name} differs over the ranks: {values}; expected the same on all"
    return "the ranks ask for different operations"


def attempt(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return (result, None) or (None, exception), for errors that are to be agreed on before they are raised."""
    try:
        return action(), None
    except Exception as error:
        return None, error
