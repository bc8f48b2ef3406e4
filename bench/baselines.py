# SPDX-License-Identifier: Apache-2.0
"""Owns what transposes are compared with: Alltoallw over subarray types, by hand and by mpi4py-fft.

Both leave packing to MPI's datatypes and keep the order of axes in memory. They know nothing of plans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from cudecomp import Exchange, Pencil


class Alltoallw:
    """The exchange as one Alltoallw of subarrays of the two arrays, by the group of ranks that exchange data.

    This is how mpi4py-fft moves data. The memory orders of both pencils have to be the same.
    """

    def __init__(self, src: Pencil, dst: Pencil, dtype: np.dtype, comm: MPI.Intracomm, src_array: Any, dst_array: Any):
        exchange = Exchange(src, dst, comm.rank)
        self._item = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
        self._comm, ranks = self._group(comm, {m.peer for m in (*exchange.sends, *exchange.recvs)})
        place = {rank: i for i, rank in enumerate(ranks)}
        self._send = self._types(
            place, src, comm.rank, [(m.peer, m.copies[0].shape, m.copies[0].src_start) for m in exchange.sends]
        )
        self._recv = self._types(
            place, dst, comm.rank, [(m.peer, m.copies[0].shape, m.copies[0].dst_start) for m in exchange.recvs]
        )
        counts = tuple(int(one is not None) for one in self._send), tuple(int(one is not None) for one in self._recv)
        zeros = (0,) * len(ranks)
        types = [[one or MPI.BYTE for one in side] for side in (self._send, self._recv)]
        self._messages = [src_array, counts[0], zeros, types[0]], [dst_array, counts[1], zeros, types[1]]

    @staticmethod
    def can(src: Pencil, dst: Pencil) -> bool:
        """Tell whether the exchange can be done this way."""
        return src.order == dst.order

    def run(self) -> None:
        """Exchange; collective over the group, blocking."""
        self._comm.Alltoallw(*self._messages)

    def close(self) -> None:
        """Free the types and the communicator."""
        for one in (*self._send, *self._recv, self._item):
            if one is not None:
                one.Free()
        self._comm.Free()

    @staticmethod
    def _group(comm: MPI.Intracomm, peers: set[int]) -> tuple[MPI.Intracomm, list[int]]:
        """Return the communicator of all ranks that are connected with this one, and these ranks."""
        label = comm.rank
        for _ in range(comm.size):  # the smallest rank spreads along the edges
            labels = comm.allgather(label)
            label = min([labels[peer] for peer in peers] + [label])
        made = comm.Split(label, comm.rank)
        return made, made.allgather(comm.rank)

    def _types(self, place: dict[int, int], pencil: Pencil, rank: int, boxes: list[Any]) -> list[MPI.Datatype | None]:
        types: list[MPI.Datatype | None] = [None] * len(place)
        halo, first = pencil.halo, pencil.start(rank)
        for peer, shape, start in boxes:
            begin = [i - lo + low for i, lo, (low, _) in zip(start, first, halo, strict=True)]
            ordered = [[values[axis] for axis in pencil.order] for values in (shape, begin)]
            types[place[peer]] = self._item.Create_subarray(pencil.memory_shape(rank), *ordered).Commit()
        return types


class Mpi4pyFFT:
    """The exchange by mpi4py-fft's Pencil and Transfer."""

    def __init__(self, src: Pencil, dst: Pencil, dtype: np.dtype, comm: MPI.Intracomm, src_array: Any, dst_array: Any):
        from mpi4py_fft.pencil import Pencil as Theirs
        from mpi4py_fft.pencil import Subcomm

        parts = [src.parts(axis) for axis in range(src.ndim)]
        self._subcomm = Subcomm(comm, parts)
        theirs = Theirs(self._subcomm, src.global_shape, axis=src.axis)
        self._transfer = theirs.transfer(theirs.pencil(dst.axis), dtype)
        shapes = self._transfer.subshapeA, self._transfer.subshapeB
        if shapes != (src.memory_shape(comm.rank), dst.memory_shape(comm.rank)):
            raise ValueError(f"mpi4py-fft has shapes {shapes} for {src} and {dst}")
        self._arrays = src_array, dst_array

    @staticmethod
    def can(src: Pencil, dst: Pencil) -> bool:
        """Tell whether mpi4py-fft is there and has these pencils."""
        try:
            import mpi4py_fft.pencil  # noqa: F401
        except ImportError:
            return False
        plain = all(
            pencil.order == tuple(range(pencil.ndim))
            and pencil.dist_shape is None
            and not any(pencil.padding)
            and not any(low or high for low, high in pencil.halo)
            for pencil in (src, dst)
        )
        return plain and src.grid == dst.grid and src.grid.rank_order == "row"

    def run(self) -> None:
        """Exchange; collective over the group, blocking."""
        self._transfer.forward(*self._arrays)

    def close(self) -> None:
        """Free types and communicators."""
        self._transfer.destroy()
        self._subcomm.destroy()


BASELINES = {"alltoallw": Alltoallw, "mpi4py-fft": Mpi4pyFFT}
