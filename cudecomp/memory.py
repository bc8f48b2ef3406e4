# SPDX-License-Identifier: Apache-2.0
"""Owns the allocation of arrays for pencils; knows nothing of plans."""

from __future__ import annotations

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
    return empty_array(pencil, plan_dtype(dtype), rank, device, 1)


def empty_array(pencil: Pencil, dtype: np.dtype[Any], rank: int, device: str, fields: int) -> Any:
    """Return an uninitialised array, with a leading axis for several fields."""
    lead = (fields,) if fields > 1 else ()
    return _allocate((*lead, *pencil.memory_shape(rank)), dtype, device)


def empty_inplace(src: Pencil, dst: Pencil, dtype: np.dtype[Any], rank: int, device: str, fields: int) -> Any:
    """Return an uninitialised flat buffer that holds either pencil, with a leading axis for several fields."""
    items = max(src.size(rank), dst.size(rank))
    return _allocate((fields, items) if fields > 1 else (items,), dtype, device)


def _allocate(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    if device == "host":
        return aligned_empty(shape, dtype, ALIGNMENT)
    if device != "cuda":
        raise ValueError(f"empty: device is {device!r}, expected 'host' or 'cuda'")
    from .cuda.memory import DeviceArray

    return DeviceArray(shape, dtype)
