# SPDX-License-Identifier: Apache-2.0
"""Owns the passage between a whole array on one rank and the parts of all ranks; knows nothing of plans.

One piece, the part of one rank in one field, is under way at a time, in C order of the axes: the root only cuts, and
each rank brings its piece into its own memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from . import _build
from .array import ArrayView, host_view, plan_dtype
from .binding import Argument
from .comm import Communicator, attempt
from .grid import as_int
from .memory import allocate, plan_shape
from .pencil import Pencil

MESSAGE = 1 << 30  # bytes; the most in one message, since counts of MPI 3 end at 2**31 - 1
TAG = 0  # those of plans begin at 1

Array = np.ndarray[Any, Any]


def scatter(
    array: Any,
    pencil: Pencil,
    comm: Any = None,
    root: int = 0,
    *,
    out: Any = None,
    fields: int | None = None,
    device: Literal["host", "cuda"] = "host",
) -> Any:
    """Spread a whole array, which lies on one rank, over the parts of all ranks.

    Parameters
    ----------
    array : numpy.ndarray
        On the root: of shape ``global_shape`` in axis order, with a leading axis if there are several fields. It may
        have any strides, or be a `numpy.memmap` that is larger than memory. Not looked at on other ranks.
    pencil : Pencil
        Which part each rank gets, and how it lies in memory.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks of the process grid are ranks of `comm`. None: this process alone; MPI is not imported.
    root : int
        The rank that has the whole array.
    out : array or sequence of arrays, optional
        What this rank's part is written to, on the host or the device, as a plan takes it: of the array's dtype, in
        memory order, of the pencil's memory shape or flat and large enough; several fields as one array with a leading
        axis or as one array each. Halo and padding are left as they were. None: a new array, with zeros there.
    fields : int, optional
        How many arrays of the global shape `array` holds along a leading axis; None: one, and no such axis.
    device : {"host", "cuda"}
        Where a new array lies.

    Returns
    -------
    array
        `out`, or the new array: a NumPy array or a DeviceArray.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        An argument is wrong on any rank, or differs between ranks: the same exception on all ranks.

    Notes
    -----
    Collective over `comm`; blocks until this rank has its part. No operation of a plan may be pending. Besides the
    arrays, the root needs memory for the largest part of any rank, each other rank for its own, and ranks whose array
    lies on a device for a copy of it on the host. Device arrays are ordered after the default stream and the stream
    that they export, and complete on return.
    """
    passage = _Passage("scatter", comm, pencil, root, fields)
    whole = passage.agreed(lambda: passage.whole(array, "array") if passage.at_root else None)
    dtype = passage.from_root(whole.dtype if passage.at_root else None)
    part = passage.agreed(lambda: passage.part_or_new(out, dtype, device))
    passage.agreed(lambda: passage.reserve(dtype, part.hosts, [whole]))
    for cut, own, peer in passage.pieces(whole, part):
        passage.carry(cut, own, peer)
    part.finish()
    return part.array


def gather(
    array: Any, pencil: Pencil, comm: Any = None, root: int = 0, *, out: Any = None, fields: int | None = None
) -> Array | None:
    """Put the parts of all ranks together to a whole array on one rank.

    Parameters
    ----------
    array : array or sequence of arrays
        This rank's part, on the host or the device, as a plan takes it: in memory order, of the pencil's memory shape
        or flat and large enough; several fields as one array with a leading axis or as one array each. Only its
        interior is read. The dtype is the same on all ranks.
    pencil : Pencil
        Which part each rank has, and how it lies in memory.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks of the process grid are ranks of `comm`. None: this process alone; MPI is not imported.
    root : int
        The rank that gets the whole array.
    out : numpy.ndarray, optional
        On the root: what to write to, of the parts' dtype and of shape ``global_shape`` in axis order, with a leading
        axis if there are several fields. It may have any strides, or be a `numpy.memmap` that is larger than memory.
        None: a new array. Not looked at on other ranks.
    fields : int, optional
        How many arrays there are along the leading axis; None: one, and no such axis.

    Returns
    -------
    numpy.ndarray or None
        `out` or the new array on the root; None on other ranks.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        An argument is wrong on any rank, or differs between ranks: the same exception on all ranks.

    Notes
    -----
    Collective over `comm`; blocks until the root has this rank's part or MPI has taken it. No operation of a plan may
    be pending. Memory and the order of streams are as for `scatter`.
    """
    passage = _Passage("gather", comm, pencil, root, fields)
    part = passage.agreed(lambda: passage.part(array, "array"), lambda part: {"dtype": repr(part.dtype)})
    whole = passage.agreed(lambda: passage.whole_or_new(out, part.dtype) if passage.at_root else None)
    passage.agreed(lambda: passage.reserve(part.dtype, [whole], part.hosts))
    for cut, own, peer in passage.pieces(whole, part):
        passage.carry(own, cut, peer)
    if not passage.at_root:
        return None
    return out if out is not None else whole if passage.fields > 1 else whole[0]


class _Part:
    """This rank's array, and its interior in host memory: a view per field, in axis order.

    An array on a device is copied to the host, and by `finish` back.
    """

    def __init__(self, array: Any, views: Sequence[ArrayView], pencil: Pencil, rank: int, fields: int):
        self.array = array
        self.dtype = views[0].dtype
        # A view of host memory has a NumPy array as its owner.
        self.hosts = hosts = [view.owner if isinstance(view.owner, np.ndarray) else _to_host(view) for view in views]
        self._copies = [(host, view) for host, view in zip(hosts, views, strict=True) if host is not view.owner]
        interiors = [pencil.interior(host, rank) for host in hosts]
        self.interiors = interiors if len(interiors) == fields else list(interiors[0])

    def finish(self) -> None:
        """Bring what was written to the device."""
        for host, view in self._copies:
            _to_device(host, view)


class _Passage:
    """The arguments that all ranks share, checked, and the way of a piece from the root to a rank or back.

    Constructing it is collective, as are `agreed` and `from_root`. The rest is local but for the messages.
    """

    def __init__(self, what: str, comm: Any, pencil: Pencil, root: int, fields: int | None):
        self.what = what
        self.group: Any = Communicator.of(comm)
        self.rank, self.size = self.group.rank, self.group.size
        shared = self.agreed(
            lambda: _checked(what, pencil, root, fields, self.size),
            lambda shared: {"operation": what} | {name: repr(value) for name, value in shared.items()},
        )
        self.pencil, self.root, self.fields = shared["pencil"], shared["root"], shared["fields"]
        self.at_root = self.rank == self.root

    def agreed(self, action: Callable[[], Any], spec_of: Callable[[Any], dict[str, str]] = lambda found: {}) -> Any:
        """Return what a local action returns; all ranks raise alike if it fails on any, or if its spec differs."""
        found, error = attempt(action)
        self.group.agree(self.what, error, spec_of(found) if error is None else None)
        return found

    def from_root(self, value: Any) -> Any:
        """Return the root's value, on all ranks."""
        return value if self.group.user is None else self.group.mpi.bcast(value, self.root)

    def whole(self, array: Any, name: str) -> Array:
        """Return a whole array after checking it, with an axis of fields in front."""
        view = host_view(array, f"{self.what}: {name}")
        plan_dtype(view.dtype)
        lead = (self.fields,) if self.fields > 1 else ()
        if view.shape != lead + self.pencil.global_shape:
            raise ValueError(
                f"{self.what}: {name} has shape {view.shape}, expected {lead + self.pencil.global_shape}, "
                f"{f'{self.fields} fields of ' if lead else ''}the global shape in axis order"
            )
        return view.owner if lead else view.owner[np.newaxis]

    def whole_or_new(self, out: Any, dtype: np.dtype[Any]) -> Array:
        """Return the whole array to be written, as `whole` does."""
        if out is None:
            return np.empty((self.fields, *self.pencil.global_shape), dtype)
        whole = self.whole(out, "out")
        if whole.dtype != dtype:
            raise TypeError(f"{self.what}: out has dtype {whole.dtype}, expected {dtype}, that of the parts")
        if not whole.flags.writeable:
            raise ValueError(f"{self.what}: out is read-only, expected a writable array")
        return whole

    def _check_apart(self, written: Sequence[Array | None], read: Sequence[Array | None]) -> None:
        """Raise if an array that is written shares memory with another one."""
        for i, one in enumerate(written):
            for other in (*written[:i], *read):
                if one is not None and other is not None and np.may_share_memory(one, other):
                    raise ValueError(f"{self.what}: its arrays overlap in memory, expected separate ones")

    def part(self, array: Any, name: str, dtype: np.dtype[Any] | None = None) -> _Part:
        """Return this rank's array after checking it; to be written if it must have a certain dtype."""
        label = f"{self.what}: {name}"
        if dtype is None:
            first = array[0] if isinstance(array, list | tuple) and array else array
            dtype = plan_dtype(_view(first, label).dtype)
            writable = False
        else:
            writable = True
        shape, size = self.pencil.memory_shape(self.rank), self.pencil.size(self.rank)
        views = Argument(label, dtype, (shape,), size, self.fields, writable).views(array, _view)
        return _Part(array, views, self.pencil, self.rank, self.fields)

    def part_or_new(self, out: Any, dtype: np.dtype[Any], device: str) -> _Part:
        """Return the array of this rank to be written."""
        if device not in ("host", "cuda"):
            raise ValueError(f"{self.what}: device is {device!r}, expected 'host' or 'cuda'")
        if out is None:
            if device == "cuda":
                _require_cuda(self.what)
            out = allocate(plan_shape((self.pencil,), self.rank, self.fields), dtype, device)
            if device == "cuda":
                out.set(np.zeros(out.shape, dtype))
            else:
                out.reshape(-1).view(np.uint8)[...] = 0
        return self.part(out, "out", dtype)

    def reserve(self, dtype: np.dtype[Any], written: Sequence[Array | None], read: Sequence[Array | None]) -> None:
        """Get the memory that pieces pass through on this rank, once it is known that the arrays do not overlap."""
        self._check_apart(written, read)
        ranks = range(self.size) if self.at_root else (self.rank,)
        items = max((self.pencil.box(rank).size for rank in ranks if rank != self.root), default=0)
        self._buffer = np.empty(items, dtype)

    def pieces(self, whole: Array | None, part: _Part) -> Iterator[tuple[Array | None, Array | None, int]]:
        """Yield views of each piece that passes here, in the whole array and in this rank's own, and the rank it meets.

        Both are in axis order; what lies on another rank is None.
        """
        for field in range(self.fields):
            for rank in range(self.size) if self.at_root else (self.rank,):
                if self.pencil.box(rank).size:
                    cut = None if whole is None else whole[field][self.pencil.slices(rank)]
                    own = part.interiors[field] if rank == self.rank else None
                    yield cut, own, rank if self.at_root else self.root

    def carry(self, source: Array | None, target: Array | None, peer: int) -> None:
        """Bring a piece from `source` to `target`, of which one may lie on `peer`."""
        if source is not None and target is not None:
            target[...] = source
        elif source is not None:
            piece = self._piece(source.shape)
            piece[...] = source
            for message in _messages(piece):
                self.group.mpi.Send(message, peer, TAG)
        elif target is not None:
            piece = self._piece(target.shape)
            for message in _messages(piece):
                self.group.mpi.Recv(message, peer, TAG)
            target[...] = piece

    def _piece(self, shape: tuple[int, ...]) -> Array:
        return self._buffer[: prod(shape)].reshape(shape)


def _messages(piece: Array) -> Iterator[Array]:
    """Yield the bytes of a piece without gaps, message by message."""
    data = piece.reshape(-1).view(np.uint8)
    for start in range(0, data.size, MESSAGE):
        yield data[start : start + MESSAGE]


def _checked(what: str, pencil: Pencil, root: int, fields: int | None, size: int) -> dict[str, Any]:
    """Return the arguments that all ranks share, by name."""
    if not isinstance(pencil, Pencil):
        raise TypeError(f"{what}: pencil is a {type(pencil).__name__}, expected a Pencil")
    if pencil.grid.size != size:
        raise ValueError(
            f"{what}: pencil has a grid of {pencil.grid.size} ranks {pencil.grid.shape}, "
            f"expected {size}, the size of the communicator"
        )
    root = as_int(root, f"{what}: root")
    if not 0 <= root < size:
        raise ValueError(f"{what}: root is {root}, expected 0 <= root < {size}")
    fields = 1 if fields is None else as_int(fields, f"{what}: fields")
    if fields < 1:
        raise ValueError(f"{what}: fields is {fields}, expected at least 1")
    return {"pencil": pencil, "root": root, "fields": fields}


def _view(array: Any, what: str) -> ArrayView:
    """Describe an array on the host or on the current device."""
    try:
        on_device = hasattr(array, "__cuda_array_interface__")
    except (RuntimeError, TypeError):  # PyTorch: a tensor on the device that needs gradients; device_view says it
        on_device = True
    if not on_device:
        return host_view(array, what)
    _require_cuda(what)
    from .cuda.arrays import device_view
    from .cuda.runtime import current_device

    return device_view(array, what, current_device())


def _to_host(view: ArrayView) -> Array:
    from .cuda.transfer import to_host

    return to_host(view)


def _to_device(host: Array, view: ArrayView) -> None:
    from .cuda.transfer import to_device

    to_device(host, view)


def _require_cuda(what: str) -> None:
    if not _build.CUDA:
        raise RuntimeError(f"{what}: got device memory, but this build of cudecomp has no CUDA kernels")
