# SPDX-License-Identifier: Apache-2.0
"""Owns the allocation of arrays for pencils, and which devices this installation serves; knows nothing of plans."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _build
from .array import aligned_empty, plan_dtype
from .pencil import Pencil

ALIGNMENT = 64  # bytes; a cache line

# In the source tree; pip brings the compiler where there is none.
BUILD_WITH_CUDA = "pip install '.[cu13]' --config-settings=setup-args=-Dcuda=enabled"


def empty(pencil: Pencil, dtype: Any, rank: int, device: str = "host") -> Any:
    """Return an uninitialised array of a rank's memory shape (memory order): a NumPy array or a DeviceArray.

    Parameters
    ----------
    pencil : Pencil
        The layout.
    dtype : dtype-like
        Of the items.
    rank : int
        Whose part of the array.
    device : {"host", "cuda"}
        Where the memory lies.

    Notes
    -----
    Local. Use `pencil.interior(array, rank)` for a view in axis order.
    """
    return allocate(pencil.memory_shape(rank), plan_dtype(dtype), device)


def plan_shape(pencils: Sequence[Pencil], rank: int, fields: int) -> tuple[int, ...]:
    """Return the shape of an array for a pencil, or of a flat one that holds any of several; fields lead."""
    lead = (fields,) if fields > 1 else ()
    if len(pencils) == 1:
        return (*lead, *pencils[0].memory_shape(rank))
    return (*lead, max(pencil.size(rank) for pencil in pencils))


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    """Return an uninitialised array on a device."""
    if device == "host":
        return aligned_empty(shape, dtype, ALIGNMENT)
    if device != "cuda":
        raise ValueError(f"empty: device is {device!r}, expected 'host' or 'cuda'")
    require_cuda()
    from .cuda.memory import DeviceArray

    return DeviceArray(shape, dtype)


def require_cuda() -> None:
    """Raise RuntimeError, saying what to do, if this installation cannot serve device "cuda". Local; asks no device."""
    if not _build.CUDA:
        raise RuntimeError(
            "device 'cuda': this build of cudecomp has no CUDA kernels; to build it with them, in its source tree: "
            + BUILD_WITH_CUDA
        )
    problem = bindings_problem()
    if problem is not None:
        raise RuntimeError(f"device 'cuda': {problem}")


def bindings_problem() -> str | None:
    """Return that the package cuda-bindings is not installed, and what to do about it; None if it is. Local."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("cuda.bindings") is not None:
            return None
    missing = "the package cuda-bindings is not installed"
    if not _build.CUDA:
        return missing
    return f"{missing}; in the source tree of cudecomp: pip install '.[cu{_build.CUDA_VERSION.partition('.')[0]}]'"
