# SPDX-License-Identifier: Apache-2.0
"""Owns what a user asks of a plan: checked, and comparable over ranks; knows nothing of how it is carried out."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .array import plan_dtype
from .grid import as_ints
from .memory import require_cuda
from .pencil import Pencil
from .transports import BACKENDS, Choice, choose
from .workspace import Workspace

# How a GPU packs, by the value of `launch`.
LAUNCHES = {
    "fused": "one kernel packs all messages in order and raises a flag per message",
    "per_peer": "a kernel per message, each of which raises its flag",
    "per_peer_events": "a kernel and an event per message",
}


class Directions(NamedTuple):
    """What a halo update fills: per axis whether it is periodic, and the axes."""

    periods: tuple[bool, ...]
    axes: tuple[int, ...]


# The least time, in seconds, that ranks which build a plan wait for one another: what a program does before, such as
# reading its input, takes ranks apart further than messages do.
BUILD_PATIENCE = 30.0


@dataclass(frozen=True)
class Spec:
    """The arguments of a plan after checking.

    All fields but `workspace` have to be the same on all ranks.
    """

    operation: str
    src: Pencil
    dst: Pencil
    dtype: np.dtype[Any]
    device: str
    backend: str  # as asked for
    choice: Choice
    launch: str
    graphs: bool
    fields: int
    inplace: bool
    details: Directions | tuple[()]  # of a halo update; empty for a transpose
    timeout: float | None
    check: bool
    nodes: tuple[int, ...] | None
    workspace: Workspace | None

    @property
    def one_array(self) -> bool:
        """Whether a run takes one array: in place, or a halo update."""
        return self.inplace or bool(self.details)

    @property
    def staged(self) -> bool:
        """Whether messages between device arrays pass through pinned host memory."""
        return self.device == "cuda" and self.choice.name != "local" and not self.choice.device_buffers

    @property
    def zero_copy(self) -> bool:
        """Whether the transport may send from, and receive into, the user's arrays."""
        return not self.staged

    @property
    def memory(self) -> str:
        """The kind of memory the workspace is: "host", "pinned" or "device"."""
        return "pinned" if self.staged else "device" if self.device == "cuda" else "host"

    def table(self) -> dict[str, str]:
        """Return what ranks compare, by the name of the argument."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "workspace"}
        if isinstance(self.details, Directions):
            del values["src"], values["dst"], values["details"], values["inplace"]
            values = {"operation": self.operation, "pencil": self.src, **self.details._asdict(), **values}
        shown = {name: repr(value) for name, value in values.items()}
        shown["workspace"] = "none" if self.workspace is None else "shared"
        return shown


def transpose_spec(group: Any, src: Pencil, dst: Pencil, dtype: Any, **options: Any) -> Spec:
    """Check the arguments of a TransposePlan for this rank of a group. Local."""
    item = plan_dtype(dtype)
    for name, pencil in (("src", src), ("dst", dst)):
        _require_pencil(f"TransposePlan: {name}", pencil)
    if src.global_shape != dst.global_shape:
        raise ValueError(
            f"TransposePlan: src has global shape {src.global_shape} and dst {dst.global_shape}, expected the same"
        )
    for name, pencil in (("src", src), ("dst", dst)):
        _require_ranks(f"TransposePlan: {name}", pencil, group)
    return _spec("TransposePlan", group, src, dst, item, **options)


def halo_spec(group: Any, pencil: Pencil, dtype: Any, periods: Any, axes: Any, **options: Any) -> Spec:
    """Check the arguments of a HaloPlan for this rank of a group. Local."""
    item = plan_dtype(dtype)
    _require_pencil("HaloPlan: pencil", pencil)
    _require_ranks("HaloPlan: pencil", pencil, group)
    details = Directions(_periods(periods, pencil.ndim), _axes(axes, pencil.ndim))
    return _spec("HaloPlan", group, pencil, pencil, item, inplace=False, details=details, **options)


def _require_pencil(what: str, pencil: Any) -> None:
    if not isinstance(pencil, Pencil):
        raise TypeError(f"{what} is a {type(pencil).__name__}, expected a Pencil")


def _require_ranks(what: str, pencil: Pencil, group: Any) -> None:
    if pencil.grid.size != group.size:
        hint = f"; start the program with mpiexec -n {pencil.grid.size}, or choose a grid of {group.size}"
        if group.user is None:
            hint = "; comm is None, which means this process alone: pass comm=MPI.COMM_WORLD"
        raise ValueError(
            f"{what} has a grid of {pencil.grid.size} ranks {pencil.grid.shape}, "
            f"expected {group.size}, the size of the communicator{hint}"
        )


def _periods(periods: Any, ndim: int) -> tuple[bool, ...]:
    """Return one flag per axis."""
    if isinstance(periods, bool | np.bool_):
        return (bool(periods),) * ndim
    if not isinstance(periods, list | tuple | np.ndarray):
        raise TypeError(f"HaloPlan: periods is {periods!r}, expected True, False or one of them per axis")
    if len(periods) != ndim:
        raise ValueError(f"HaloPlan: periods has {len(periods)} entries, expected {ndim}, one per axis")
    return tuple(_flag("HaloPlan: an entry of periods", period) for period in periods)


def _axes(axes: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes asked for, in rising order."""
    if axes is None:
        return tuple(range(ndim))
    found = as_ints((axes,) if isinstance(axes, int | np.integer) else axes, "HaloPlan: axes")
    if len(set(found)) != len(found) or any(not 0 <= axis < ndim for axis in found):
        raise ValueError(f"HaloPlan: axes is {axes!r}, expected different ones of 0 to {ndim - 1}")
    return tuple(sorted(found))


def _spec(
    operation: str,
    group: Any,
    src: Pencil,
    dst: Pencil,
    dtype: np.dtype[Any],
    *,
    device: str,
    backend: str,
    launch: str,
    graphs: bool | None,
    fields: int | None,
    inplace: bool,
    workspace: Workspace | None,
    timeout: float | None,
    check: bool,
    nodes: Sequence[int] | None,
    details: Directions | tuple[()] = (),
) -> Spec:
    _one_of("device", device, BACKENDS)
    _one_of("launch", launch, LAUNCHES)
    if device == "cuda":
        require_cuda()
    return Spec(
        operation=operation,
        src=src,
        dst=dst,
        dtype=dtype,
        device=device,
        backend=backend,
        choice=choose(backend, device, group.user, group.size),
        launch=launch,
        graphs=_graphs(graphs),
        fields=_fields(fields),
        inplace=_flag("inplace", inplace),
        details=details,
        timeout=_timeout(timeout),
        check=_flag("check", check),
        nodes=_nodes(nodes, group.size),
        workspace=_workspace(workspace, group, device),
    )


def _one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected a string")
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def _graphs(graphs: Any) -> bool:
    """Return the value given, or that of the environment variable where none was."""
    if graphs is None:
        return os.environ.get("CUDECOMP_ENABLE_CUDA_GRAPHS", "0") == "1"
    return _flag("graphs", graphs)


def _fields(fields: Any) -> int:
    if fields is None:
        return 1
    if isinstance(fields, bool) or not isinstance(fields, int | np.integer):
        raise TypeError(f"fields is {fields!r}, expected an integer or None")
    if fields < 1:
        raise ValueError(f"fields is {fields}, expected at least 1")
    return int(fields)


def _timeout(timeout: Any) -> float | None:
    """Return the seconds given, or those of the environment variable where none were."""
    if timeout is None:
        text = os.environ.get("CUDECOMP_TIMEOUT")
        if not text:
            return None
        try:
            timeout = float(text)
        except ValueError:
            raise ValueError(f"CUDECOMP_TIMEOUT is {text!r}, expected seconds") from None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number):
        raise TypeError(f"timeout is {timeout!r}, expected seconds or None")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}, expected more than 0 seconds")
    return float(timeout)


def patience(timeout: Any) -> float | None:
    """Return how long the ranks wait for one another while a plan is built with this `timeout`, in seconds."""
    try:
        seconds = _timeout(timeout)
    except (TypeError, ValueError):  # which is raised when the ranks have met
        return None
    return None if seconds is None else max(seconds, BUILD_PATIENCE)


def _nodes(nodes: Any, size: int) -> tuple[int, ...] | None:
    if nodes is None:
        return None
    try:
        found = tuple(int(node) for node in nodes)
    except (TypeError, ValueError):
        raise TypeError(f"nodes is {nodes!r}, expected one integer per rank, or None") from None
    if len(found) != size:
        raise ValueError(f"nodes has {len(found)} entries, expected {size}, one per rank")
    return found


def _workspace(workspace: Any, group: Any, device: str) -> Workspace | None:
    if workspace is None:
        return None
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}, expected a Workspace or None")
    if workspace.device != device:
        raise ValueError(f"workspace is on {workspace.device}, expected {device}")
    if workspace.comm.user is not group.user:
        raise ValueError("workspace was made for another communicator than the plan's")
    return workspace
