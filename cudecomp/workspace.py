# SPDX-License-Identifier: Apache-2.0
"""Owns the memory that messages pass through and that plans may share; knows nothing of what is exchanged."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np

from .array import aligned_empty
from .comm import Alone, Communicator

ALIGNMENT = 4096  # bytes; a page


class Tenant(Protocol):
    """A plan that uses a workspace."""

    def rebind(self) -> None:
        """Take note that the memory has moved."""


class Workspace:
    """Memory that plans with the same communicator and device share, one operation at a time.

    A workspace grows to the largest need of the plans built on it. It grows only while a plan is built, never in a run.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The communicator of the plans; None for this process alone.
    device : {"host"}
        Where the memory lies.

    Attributes
    ----------
    nbytes : int
        The bytes this rank holds now.

    Notes
    -----
    Building one is collective over `comm`. An operation that starts while another plan's is pending in the same
    workspace is refused (RuntimeError, local).
    """

    def __init__(self, comm: Any = None, device: str = "host"):
        if device != "host":
            raise ValueError(f"Workspace: device is {device!r}, expected 'host'")
        self.comm: Communicator | Alone = Communicator.of(comm)
        self.device = device
        self._memory = aligned_empty((0,), np.dtype(np.uint8), ALIGNMENT)
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._holder: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes this rank holds now."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where the memory starts; a multiple of 4096. It moves when a plan that needs more is built."""
        return int(self._memory.__array_interface__["data"][0])

    def reserve(self, nbytes: int, tenant: Tenant) -> None:
        """Grow to at least `nbytes` and note a tenant; the others are told when the memory moves. Local."""
        if nbytes > self.nbytes:
            if self._holder is not None:
                raise RuntimeError("Workspace: it cannot grow while an operation is pending in it; wait for it first")
            self._memory = aligned_empty((nbytes,), np.dtype(np.uint8), ALIGNMENT)
            for other in list(self._tenants):
                other.rebind()
        self._tenants.add(tenant)

    def release(self, tenant: Tenant) -> None:
        """Forget a tenant. Local."""
        self._tenants.discard(tenant)
        self.leave(tenant)

    def enter(self, tenant: Tenant) -> None:
        """Claim the memory for one operation; RuntimeError while another one is pending. Local."""
        if self._holder is not None:
            raise RuntimeError(f"{tenant}: its workspace is in use by a pending operation of {self._holder}")
        self._holder = tenant

    def leave(self, tenant: Tenant) -> None:
        """End the operation of a tenant. Local."""
        if self._holder is tenant:
            self._holder = None

    def __repr__(self) -> str:
        return f"Workspace(device={self.device!r}, nbytes={self.nbytes})"
