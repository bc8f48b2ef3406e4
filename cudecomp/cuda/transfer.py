# SPDX-License-Identifier: Apache-2.0
"""Owns copies of whole device arrays to the host and back; knows nothing of pencils or plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import ArrayView, host_view
from .runtime import copy, synchronize


def to_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return a copy of a device array without gaps in host memory, of the same shape.

    Blocks. What the default stream and the stream that the array exports hold is done first.
    """
    host = np.empty(view.shape, view.dtype)
    _transfer(host_view(host, "the copy"), view)
    return host


def to_device(host: np.ndarray[Any, Any], view: ArrayView) -> None:
    """Copy a host array in C order to a device array without gaps of the same size; blocks, ordered as `to_host`."""
    _transfer(view, host_view(host, "the copy"))


def _transfer(target: ArrayView, source: ArrayView) -> None:
    for stream in (target.stream, source.stream):
        if stream is not None:
            synchronize(stream)
    if target.nbytes:
        copy(target.address, source.address, target.nbytes)
        synchronize()
