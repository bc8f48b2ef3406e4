# SPDX-License-Identifier: Apache-2.0
"""Owns what the package knows of users' arrays: address, shape, strides, dtype; knows nothing of pencils or plans."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np


class ArrayView(NamedTuple):
    """An array as the engine sees it.

    Strides in bytes; `owner` keeps the memory alive; `stream` is the one the array says it is in use on.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    readonly: bool
    owner: Any
    stream: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the items."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the items lie in C order without gaps; strides of extents of one do not matter."""
        step = self.dtype.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != step:
                return prod(self.shape) == 0
            step *= n
        return True


def plan_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a plan; TypeError unless its items are of one fixed size and hold no references."""
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}, expected something that numpy.dtype accepts: {error}") from None
    if dtype is None or found.hasobject or found.itemsize == 0 or found.subdtype is not None:
        raise TypeError(f"dtype is {dtype!r}, expected items of a fixed size without Python objects")
    return found


def host_view(array: Any, what: str) -> ArrayView:
    """Describe an array in host memory; TypeError if it is none.

    Takes NumPy arrays, and what exports `__array_interface__` or DLPack for the CPU. Local, copies nothing.
    """
    if not isinstance(array, np.ndarray):
        array = _as_numpy(array, what)
    address, readonly = array.__array_interface__["data"]
    return ArrayView(address, array.shape, array.strides, array.dtype, readonly, array)


def _as_numpy(array: Any, what: str) -> np.ndarray[Any, Any]:
    """Return a NumPy view of another library's host array."""
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"{what} is a {type(array).__name__} in device memory, expected an array in host memory")
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{what} is a {type(array).__name__} that cannot be read on the host: {error}") from None
    raise TypeError(f"{what} is a {type(array).__name__}, expected a NumPy array or one that exports DLPack")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> np.ndarray[Any, Any]:
    """Return an uninitialised NumPy array in C order that starts on a multiple of `alignment` bytes."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + alignment, np.uint8)
    skip = -raw.__array_interface__["data"][0] % alignment
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
