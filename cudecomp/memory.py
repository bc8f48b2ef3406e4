# SPDX-License-Identifier: Apache-2.0
"""Owns the allocation of arrays for pencils; knows nothing of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .array import aligned_empty, plan_dtype
from .pencil import Pencil

ALIGNMENT = 64  # bytes; a cache line


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
    from .cuda.memory import DeviceArray

    return DeviceArray(shape, dtype)
