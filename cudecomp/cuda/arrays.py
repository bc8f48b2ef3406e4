# SPDX-License-Identifier: Apache-2.0
"""Owns what the package knows of users' device arrays and streams; knows nothing of pencils or plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import ArrayView
from .runtime import location

LEGACY_STREAM = 0  # the default stream of CUDA without per-thread streams


def device_view(array: Any, what: str, device: int) -> ArrayView:
    """Describe an array in the memory of a device, given by its ordinal; TypeError if it is none.

    Takes what exports `__cuda_array_interface__` (CuPy, PyTorch, JAX, Numba, DeviceArray), or DLPack where cuda.core is
    installed. Local, copies nothing.
    """
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except (RuntimeError, TypeError) as error:  # PyTorch: a tensor that is not on the device, or that needs gradients
        raise TypeError(f"{what} is a {type(array).__name__} that is no plain device array: {error}") from None
    if interface is not None:
        view = _from_interface(array, interface)
    elif isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        raise TypeError(f"{what} is a {type(array).__name__}, expected an array in device memory")
    else:
        view = _from_dlpack(array, what)
    _check_place(view, what, device)
    return view


def _from_interface(array: Any, interface: dict[str, Any]) -> ArrayView:
    dtype = np.dtype(interface["typestr"])
    descr = interface.get("descr")
    if dtype.kind == "V" and descr and len(descr) > 1:
        dtype = np.dtype([tuple(entry) for entry in descr])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _c_strides(shape, dtype.itemsize)
    address, readonly = interface["data"]
    return ArrayView(address or 0, shape, tuple(strides), dtype, readonly, array, _exported(interface.get("stream")))


def _from_dlpack(array: Any, what: str) -> ArrayView:
    from cuda.core.utils import StridedMemoryView

    try:
        view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what} is a {type(array).__name__} that cannot be read as a device array: {error}") from None
    shape, dtype = tuple(view.shape), np.dtype(view.dtype)
    strides = tuple(s * dtype.itemsize for s in view.strides) if view.strides else _c_strides(shape, dtype.itemsize)
    return ArrayView(view.ptr, shape, strides, dtype, view.readonly, (array, view))


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _exported(stream: int | None) -> int | None:
    """Return the stream that an array says it is in use on; the interface writes the legacy default one as 1."""
    return LEGACY_STREAM if stream == 1 else stream


def _check_place(view: ArrayView, what: str, device: int) -> None:
    if view.nbytes == 0:
        return
    unit = min(16, view.dtype.itemsize & -view.dtype.itemsize)  # bytes that the kernels copy at once
    if view.address % unit:
        raise ValueError(f"{what} starts at {view.address:#x}, expected a multiple of {unit} bytes")
    kind, where = location(view.address)
    if kind not in ("device", "managed"):
        raise TypeError(f"{what} lies in {kind} memory, expected memory of device {device}")
    if kind == "device" and where != device:
        raise TypeError(f"{what} lies in memory of device {where}, expected device {device}, the plan's")


def stream_address(stream: Any) -> int:
    """Return the cudaStream_t of a stream object of cuda.core, CuPy, PyTorch or Numba, or of an int."""
    if isinstance(stream, bool):
        raise TypeError(f"stream is {stream!r}, expected a stream, an int or None")
    if isinstance(stream, int | np.integer):
        if stream < 0:
            raise ValueError(f"stream is {stream}, expected the address of a cudaStream_t")
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):  # cuda.core's protocol: (version, address)
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba
        address = getattr(stream, name, None)
        if address is not None:
            return int(getattr(address, "value", address) or 0)
    raise TypeError(
        f"stream is a {type(stream).__name__}, expected a cuda.core, CuPy or PyTorch stream, an int or None"
    )
