# SPDX-License-Identifier: Apache-2.0
"""The exchange: the boxes that one rank sends and receives to turn one layout of an array into another.

This module must not know of MPI, CUDA, dtypes or memory orders: it names boxes by global indices only.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .grid import as_int
from .pencil import Pencil

__all__ = ["BoxCopy", "Exchange", "Message"]

Nodes = Sequence[Hashable] | Callable[[int], Hashable]


class BoxCopy(NamedTuple):
    """A box of items to be copied from the sender's array to the receiver's.

    All three are in axis order. The starts are global indices as :meth:`Pencil.offset` takes them: `src_start` in the
    source pencil of the sender, `dst_start` in the destination pencil of the receiver. In a transpose they are equal; a
    halo update shifts one against the other across a periodic edge.

    Attributes
    ----------
    shape : tuple of int
        Extent along each axis, at least 1.
    src_start, dst_start : tuple of int
        First global index.
    """

    shape: tuple[int, ...]
    src_start: tuple[int, ...]
    dst_start: tuple[int, ...]

    @property
    def items(self) -> int:
        """Number of items copied."""
        return math.prod(self.shape)


class Message(NamedTuple):
    """All that passes from one rank to another in an exchange.

    Attributes
    ----------
    peer : int
        The rank at the other end: the receiver of a send, the sender of a receive. It may be the rank itself.
    copies : tuple of BoxCopy
        What is sent, in the order in which the message holds it. Both ends have the same copies in the same order.
    """

    peer: int
    copies: tuple[BoxCopy, ...]

    @property
    def items(self) -> int:
        """Number of items in the message."""
        return sum(copy.items for copy in self.copies)


@dataclass(frozen=True, init=False, repr=False)
class Exchange:
    """What one rank sends and receives to turn the layout `src` into the layout `dst`.

    Messages follow the ring that starts at the rank itself, so that the ranks do not all send to the same one at once:
    sends by rising ``(peer - rank) % size``, receives by rising ``(rank - peer) % size``. The peers on other nodes come
    first, since their messages take longest, and the rank itself comes last. Peers that share no items with the rank
    are absent.

    A value: frozen, hashable and comparable. Building it is local, and takes time in proportion to the number of
    messages, not of ranks. Iterating over it gives the sends.

    Parameters
    ----------
    src, dst : Pencil
        Layouts of one array over the same number of ranks. Axes, orders, halos and process grids may differ.
    rank : int
        Whose messages.
    nodes : None, sequence or callable
        Which node each rank is on: ``nodes[rank]`` or ``nodes(rank)``, compared for equality. None: not known.

    Attributes
    ----------
    src, dst, rank
        As given.
    sends, recvs : tuple of Message
        What the rank sends and what it receives, itself included.

    Raises
    ------
    TypeError
        `src` or `dst` is no Pencil, `rank` no integer, or `nodes` neither a sequence nor callable.
    ValueError
        The pencils differ in global shape or number of ranks, `rank` is not in [0, grid.size), or `nodes` has the wrong
        length.
    """

    src: Pencil
    dst: Pencil
    rank: int
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]

    def __init__(self, src: Pencil, dst: Pencil, rank: int, nodes: Nodes | None = None) -> None:
        rank = _checked(src, dst, rank)
        self._set(src, dst, rank, _shared(src, dst, rank), _shared(dst, src, rank), nodes)

    @classmethod
    def from_copies(
        cls,
        src: Pencil,
        dst: Pencil,
        rank: int,
        sends: Mapping[int, Sequence[BoxCopy]],
        recvs: Mapping[int, Sequence[BoxCopy]],
        nodes: Nodes | None = None,
    ) -> Exchange:
        """An exchange of given boxes, for operations other than a transpose.

        Parameters
        ----------
        src, dst, rank, nodes
            As for the constructor.
        sends, recvs : mapping of int to sequence of BoxCopy
            What goes to, and comes from, each peer. The caller sees to it that both ends agree, order included. A peer
            without items is left out.

        Raises
        ------
        TypeError, ValueError
            As for the constructor.
        """
        rank = _checked(src, dst, rank)
        self = cls.__new__(cls)
        self._set(src, dst, rank, _messages(sends), _messages(recvs), nodes)
        return self

    def _set(
        self, src: Pencil, dst: Pencil, rank: int, sends: list[Message], recvs: list[Message], nodes: Nodes | None
    ) -> None:
        size = src.grid.size
        is_near = _nearness(nodes, rank, size)
        set_field = object.__setattr__
        set_field(self, "src", src)
        set_field(self, "dst", dst)
        set_field(self, "rank", rank)
        set_field(self, "sends", tuple(sorted(sends, key=lambda m: (is_near(m.peer), (m.peer - rank) % size))))
        set_field(self, "recvs", tuple(sorted(recvs, key=lambda m: (is_near(m.peer), (rank - m.peer) % size))))

    def __repr__(self) -> str:
        counts = f"sends to {len(self.sends)}, receives from {len(self.recvs)}"
        return f"<Exchange of rank {self.rank}: {counts}; {self.src!r} -> {self.dst!r}>"

    def __iter__(self) -> Iterator[Message]:
        return iter(self.sends)

    def bytes_to(self, peer: int, itemsize: int) -> int:
        """Bytes that this rank sends to `peer`, for items of `itemsize` bytes. ValueError if `peer` is no rank."""
        return self._bytes(self._sent, peer, itemsize, "bytes_to")

    def bytes_from(self, peer: int, itemsize: int) -> int:
        """Bytes that this rank receives from `peer`, for items of `itemsize` bytes. ValueError if `peer` is no rank."""
        return self._bytes(self._received, peer, itemsize, "bytes_from")

    @cached_property
    def _sent(self) -> dict[int, int]:
        return {message.peer: message.items for message in self.sends}

    @cached_property
    def _received(self) -> dict[int, int]:
        return {message.peer: message.items for message in self.recvs}

    def _bytes(self, items: dict[int, int], peer: int, itemsize: int, method: str) -> int:
        peer = as_int(peer, f"Exchange.{method}: peer")
        itemsize = as_int(itemsize, f"Exchange.{method}: itemsize")
        if not 0 <= peer < self.src.grid.size:
            raise ValueError(f"Exchange.{method}: got peer {peer}, expected 0 <= peer < {self.src.grid.size}")
        if itemsize < 1:
            raise ValueError(f"Exchange.{method}: got itemsize {itemsize}, expected at least 1")
        return items.get(peer, 0) * itemsize


def _checked(src: Pencil, dst: Pencil, rank: int) -> int:
    for name, pencil in (("src", src), ("dst", dst)):
        if not isinstance(pencil, Pencil):
            raise TypeError(f"Exchange: {name} must be a Pencil, got {pencil!r} of type {type(pencil).__name__}")
    if src.global_shape != dst.global_shape:
        raise ValueError(
            f"Exchange: src and dst must have one global shape, got {src.global_shape} and {dst.global_shape}"
        )
    if src.grid.size != dst.grid.size:
        raise ValueError(f"Exchange: src and dst must have equally many ranks, got {src.grid!r} and {dst.grid!r}")
    rank = as_int(rank, "Exchange: rank")
    if not 0 <= rank < src.grid.size:
        raise ValueError(f"Exchange: got rank {rank}, expected 0 <= rank < {src.grid.size}")
    return rank


def _shared(mine: Pencil, theirs: Pencil, rank: int) -> list[Message]:
    """What the interior of `rank` in one layout has in common with those of all ranks in the other."""
    box = mine.box(rank)
    if not box.size:
        return []
    pieces = [_pieces(theirs, axis, box.start[axis], box.stop[axis]) for axis in range(mine.ndim)]
    messages = []
    for piece in itertools.product(*pieces):
        ranks, start, shape = zip(*piece, strict=True)
        messages.append(Message(sum(ranks), (BoxCopy(shape, start, start),)))
    return messages


def _pieces(pencil: Pencil, axis: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """The range start:stop of `axis`, cut as in `pencil`: (what the part adds to the rank, start, extent) each."""
    entry = pencil.entry(axis)
    rank_stride = 0 if entry is None else pencil.grid.rank_strides[entry]
    cuts = pencil.cuts(axis)
    # Bisecting finds the parts that the range meets; empty parts all begin at the end of the axis and are never met.
    parts = range(bisect_right(cuts, start) - 1, bisect_left(cuts, stop))
    bounds = [start, *cuts[parts.start + 1 : parts.stop], stop]
    return [
        (part * rank_stride, low, high - low)
        for part, (low, high) in zip(parts, itertools.pairwise(bounds), strict=True)
    ]


def _messages(copies: Mapping[int, Iterable[BoxCopy]]) -> list[Message]:
    messages = (Message(peer, tuple(copy for copy in some if copy.items)) for peer, some in copies.items())
    return [message for message in messages if message.copies]


def _nearness(nodes: Any, rank: int, size: int) -> Callable[[int], int]:
    """A function of the peer: 0 on another node, 1 on this one, 2 for the rank itself."""
    if nodes is None:
        return lambda peer: 2 if peer == rank else 0
    if callable(nodes):
        node_of = nodes
    elif hasattr(nodes, "__len__") and hasattr(nodes, "__getitem__"):
        if len(nodes) != size:
            raise ValueError(f"Exchange: got {len(nodes)} nodes, expected one per rank, {size} in all")
        node_of = nodes.__getitem__
    else:
        raise TypeError(f"Exchange: nodes must be a sequence or callable, got {type(nodes).__name__}")
    here = node_of(rank)
    return lambda peer: 2 if peer == rank else int(node_of(peer) == here)
