# SPDX-License-Identifier: Apache-2.0
"""Owns the memory that messages pass through and that plans may share; knows nothing of what is exchanged."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np

from .array import aligned_empty
from .comm import Alone, Communicator, attempt

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
    device : {"host", "cuda"}
        The device of the plans. Plans on "cuda" whose messages are staged through the host take pinned host memory from
        it, others device memory.

    Attributes
    ----------
    nbytes : int
        The bytes this rank holds now, of all kinds of memory.

    Notes
    -----
    Building one is collective over `comm`. An operation that starts while another plan's is pending in the same
    workspace is refused (RuntimeError, local).
    """

    def __init__(self, comm: Any = None, device: str = "host"):
        group = Communicator.of(comm)
        wrong = device not in ("host", "cuda")
        error = ValueError(f"Workspace: device is {device!r}, expected 'host' or 'cuda'") if wrong else None
        group.agree("Workspace", error, {"device": repr(device)})
        self._start(group, device)

    @classmethod
    def own(cls, group: Communicator | Alone, device: str) -> Workspace:
        """Return an empty workspace on `device` for one plan of a group. Local."""
        workspace = cls.__new__(cls)
        workspace._start(group, device)
        workspace._of_one_plan = True
        return workspace

    def _start(self, group: Communicator | Alone, device: str) -> None:
        self.comm = group
        self.device = device
        self._of_one_plan = False
        self._memory: dict[str, Any] = {}
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._holder: Any = None
        self.last_use: Any = None  # on a GPU: an event after the last operation in this memory
        self.shared: Any = None  # (number, segment) in the registry of memory that peers map

    @property
    def nbytes(self) -> int:
        """The bytes this rank holds now, of all kinds of memory."""
        mapped = self.shared[1].nbytes if self.shared else 0
        return mapped + sum(memory.nbytes for memory in self._memory.values())

    def memory(self, kind: str) -> Any:
        """Return the owner of the memory of a kind: "host", "pinned" or "device". Local."""
        return self._memory[kind]

    def address(self, kind: str) -> int:
        """Return where the memory of a kind starts; it moves when a plan that needs more is built. Local."""
        memory = self._memory[kind]
        return int(memory.__array_interface__["data"][0] if kind == "host" else memory.address)

    def reserve(self, nbytes: int, kind: str, tenant: Tenant) -> None:
        """Grow to at least `nbytes` of a kind and note a tenant; the others are told when the memory moves. Local."""
        if getattr(self._holder, "closed", False):
            raise RuntimeError(
                f"Workspace: an operation of a closed plan ({self._holder}) was never completed in it: make another one"
            )
        if kind not in self._memory or nbytes > self._memory[kind].nbytes:
            self._refuse_growth()
            self._memory[kind] = _allocate(nbytes, kind)
            for other in list(self._tenants):
                other.rebind()
        self._tenants.add(tenant)

    def share(self, nbytes: int, registry: Any) -> None:
        """Have at least `nbytes` of memory that peers can map; collective over the registry's communicator."""
        short = self.shared is None or nbytes > self.shared[1].nbytes
        if any(registry.group.mpi.allgather(short)):
            registry.group.agree("Workspace", attempt(self._refuse_growth)[1])
            held = 0 if self.shared is None else self.shared[1].nbytes
            self.shared = registry.register(max(nbytes, held))
            for tenant in list(self._tenants):
                tenant.rebind()

    def _refuse_growth(self) -> None:
        """Raise while an operation is pending: it has told peers, and its copies, where the memory is."""
        if self._holder is not None:
            raise RuntimeError("Workspace: it cannot grow while an operation is pending in it; wait for it first")

    def release(self, tenant: Tenant) -> None:
        """Forget a tenant; what belonged to one plan alone goes with it. Local."""
        self._tenants.discard(tenant)
        self.leave(tenant)
        if self._of_one_plan:
            self._memory.clear()
            self.shared = None

    def enter(self, tenant: Tenant) -> None:
        """Claim the memory for one operation of `tenant`; RuntimeError while another one is pending. Local."""
        if self._holder is not None:
            raise RuntimeError(f"{tenant}: its workspace is in use by a pending operation of {self._holder}")
        self._holder = tenant

    @property
    def busy(self) -> bool:
        """Whether an operation is pending in the memory."""
        return self._holder is not None

    def leave(self, tenant: Tenant) -> None:
        """End the operation of a tenant. Local."""
        if self._holder is tenant:
            self._holder = None

    def __repr__(self) -> str:
        return f"Workspace(device={self.device!r}, nbytes={self.nbytes})"


def _allocate(nbytes: int, kind: str) -> Any:
    """Return memory of a kind: "host", "pinned" (host memory that the device can address), or "device"."""
    if kind == "host":
        return aligned_empty((nbytes,), np.dtype(np.uint8), ALIGNMENT)
    from .cuda.memory import DeviceMemory, PinnedMemory

    return PinnedMemory(nbytes) if kind == "pinned" else DeviceMemory(nbytes)
