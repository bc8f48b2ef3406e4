# SPDX-License-Identifier: Apache-2.0
"""Owns the schedule of one rank: which copies and messages carry out an exchange; knows nothing of MPI or devices.

All rewrites of the plain "pack everything, send everything, unpack everything" are decided here, once, and are visible
in the schedule. Both ends of a message derive its wire order from the same numbers: nothing has to be negotiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd, prod
from typing import NamedTuple

from .blocks import Block, blocks_of
from .exchange import Exchange, Message
from .pencil import Pencil

# Every message starts on such a boundary of the workspace, in bytes: whole cache lines, and wide accesses on GPUs.
ALIGNMENT = 256

# Bytes from which on a block is worth a message of its own, where that saves a pass through the workspace. Measured
# with three fields by MPICH on one host: blocks of 27 KiB lose a third by it, those of 64 KiB gain a fifth.
WORTH_A_MESSAGE = 48 << 10


class Bases(NamedTuple):
    """The numbering of base addresses.

    `fields` sources, `fields` destinations, send and receive workspace, flags, the landing, the slots, and for each of
    `mapped` peers its destination arrays and its flags. A run knows the `fixed` ones when it starts; a GPU finds those
    of the peers in its slots.
    """

    fields: int
    mapped: int = 0

    def src(self, field: int) -> int:
        """Return the base of the source array of a field."""
        return field

    def dst(self, field: int) -> int:
        """Return the base of the destination array of a field."""
        return self.fields + field

    @property
    def send(self) -> int:
        """The base of the part of the workspace that holds packed messages to send."""
        return 2 * self.fields

    @property
    def recv(self) -> int:
        """The base of the part of the workspace that messages arrive in."""
        return 2 * self.fields + 1

    @property
    def flags(self) -> int:
        """The base of the completion flags that a device raises for the host."""
        return 2 * self.fields + 2

    @property
    def landing(self) -> int:
        """The base of the workspace that peers write into, laid out as the destination arrays, field after field."""
        return 2 * self.fields + 3

    @property
    def slots(self) -> int:
        """The base of the addresses that a GPU looks up while it runs: those of the mapped peers, in this order."""
        return 2 * self.fields + 4

    @property
    def fixed(self) -> int:
        """The number of bases without those of the mapped peers, which follow."""
        return self.slots + 1

    def peer(self, number: int, field: int) -> int:
        """Return the base of a mapped peer's destination array of a field."""
        return self.fixed + number * (self.fields + 1) + field

    def peer_flags(self, number: int) -> int:
        """Return the base of a mapped peer's flags."""
        return self.peer(number, self.fields)

    @property
    def length(self) -> int:
        """The length of the table of base addresses."""
        return self.peer(self.mapped, 0)


class Copy(NamedTuple):
    """A strided copy of a box; offsets and strides in items, one stride per axis, in axis order."""

    shape: tuple[int, ...]
    src_base: int
    src_offset: int
    src_strides: tuple[int, ...]
    dst_base: int
    dst_offset: int
    dst_strides: tuple[int, ...]


class Part(NamedTuple):
    """One message as a transport sees it: `items` contiguous items at `offset` items from a base.

    A peer may get several: both ends have them in the same order.
    """

    peer: int
    base: int
    offset: int
    items: int
    segment: int  # of the pack or unpack program; -1: the message lies in the user's array, nothing to pack or unpack


class Load(NamedTuple):
    """What travels in one piece: blocks of some fields, one field after the other."""

    peer: int
    blocks: tuple[Block, ...]
    fields: range

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(prod(block.shape) for block in self.blocks) * len(self.fields)

    @property
    def pieces(self) -> int:
        """How many blocks lie in different places of the arrays."""
        return len(self.blocks) * len(self.fields)


class Put(NamedTuple):
    """The items that go straight into a mapped peer's memory, by a segment of the pack program."""

    peer: int
    items: int
    segment: int


def packed_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides per axis, in items, of a box without gaps, its axes from slowest to fastest in `order`."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def same_layout(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tell whether two sets of strides address a box alike; strides of extents of one do not matter."""
    return all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def has_no_gaps(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Tell whether a box within an array of these strides per axis is contiguous in memory."""
    return same_layout(shape, strides, packed_strides(shape, order))


@dataclass(frozen=True)
class Schedule:
    """What one rank does to carry out an exchange: copies in numbered segments, messages, workspace.

    Parameters
    ----------
    exchange : Exchange
        The box copies and messages of this rank.
    fields : int
        How many arrays travel together.
    inplace : bool
        Source and destination are one buffer: everything goes through the workspace and nothing is unpacked before the
        last item was packed.
    zero_copy : bool
        Messages may start from, and land in, the user's arrays where their boxes have no gaps. The same on all ranks.
    uniform : bool
        All messages to send come from one base, and all received ones land in one (an all-to-all needs this).
    worth : int
        Bytes from which on a block is sent by itself where that saves a pass. The same on all ranks.
    mapped : frozenset of int
        Ranks whose memory this process can address. They get no messages: each item is written in its final place, or
        in the receiver's landing, which is laid out like its destination. Mapping is mutual.

    Attributes
    ----------
    sends, recvs : tuple of Part
        Messages to other ranks, in the order of the exchange: one per peer, or one per block and field.
    pack, unpack : tuple of tuple of Copy
        The copies of each segment. After the segments of the messages, `pack` has those of the puts and one for the
        items that stay on this rank (none where they stay in place); with `inplace` that segment fills the workspace
        and `unpack` has its counterpart after the segments of the messages. With mapped peers `unpack` ends with a
        segment that copies everything out of the landing.
    puts : tuple of Put
        What goes straight to mapped peers, in the order of the exchange.
    sources : tuple of int
        The mapped peers that write into this rank's memory, in the order of the exchange.
    send_items, recv_items : int
        The items of the two parts of the workspace, gaps for alignment included.
    """

    exchange: Exchange
    itemsize: int
    fields: int = 1
    inplace: bool = False
    zero_copy: bool = True
    uniform: bool = False
    worth: int = WORTH_A_MESSAGE
    mapped: frozenset[int] = frozenset()

    @cached_property
    def bases(self) -> Bases:
        """The numbering of base addresses; mapped peers are numbered in the order of `puts`."""
        return Bases(self.fields, len(self._put_messages))

    @property
    def _mapped_peers(self) -> frozenset[int]:
        return self.mapped - {self.exchange.rank}

    @cached_property
    def _put_messages(self) -> tuple[Message, ...]:
        return tuple(message for message in self.exchange.sends if message.peer in self._mapped_peers)

    @cached_property
    def puts(self) -> tuple[Put, ...]:
        """What goes straight to mapped peers, in the order of the exchange."""
        return tuple(
            Put(message.peer, message.items * self.fields, self.message_segments + number)
            for number, message in enumerate(self._put_messages)
        )

    @property
    def out(self) -> list[tuple[int, int]]:
        """What leaves this rank, by message or by put: (peer, items)."""
        return [(one.peer, one.items) for one in self.sends] + [(one.peer, one.items) for one in self.puts]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The mapped peers that write into this rank's memory, in the order of the exchange."""
        return tuple(message.peer for message in self.exchange.recvs if message.peer in self._mapped_peers)

    @property
    def landing_items(self) -> int:
        """The items of the landing: what the destination arrays hold, where there are sources."""
        return self.exchange.dst.size(self.exchange.rank) * self.fields if self.sources else 0

    @property
    def sends(self) -> tuple[Part, ...]:
        """Messages to other ranks, in the order of the exchange."""
        return self._pack_side[0]

    @property
    def recvs(self) -> tuple[Part, ...]:
        """Messages from other ranks, in the order of the exchange."""
        return self._unpack_side[0]

    @property
    def pack(self) -> tuple[tuple[Copy, ...], ...]:
        """The copies of the pack program, per segment."""
        return self._pack_side[1]

    @property
    def unpack(self) -> tuple[tuple[Copy, ...], ...]:
        """The copies of the unpack program, per segment."""
        return self._unpack_side[1]

    @property
    def send_items(self) -> int:
        """The items of the workspace that packed messages need."""
        return self._pack_side[2]

    @property
    def recv_items(self) -> int:
        """The items of the workspace that arriving messages need."""
        return self._unpack_side[2]

    @property
    def message_bytes(self) -> int:
        """The bytes of workspace that messages need on this rank, alignment included."""
        return aligned(self.send_items * self.itemsize) + aligned(self.recv_items * self.itemsize)

    @property
    def landing_bytes(self) -> int:
        """The bytes of workspace that mapped peers write into, alignment included."""
        return aligned(self.landing_items * self.itemsize)

    @property
    def workspace_bytes(self) -> int:
        """The bytes of workspace this rank needs, alignment included."""
        return self.message_bytes + self.landing_bytes

    @property
    def message_segments(self) -> int:
        """How many segments of the pack program belong to messages; those of the puts follow."""
        return sum(part.segment >= 0 for part in self.sends)

    @property
    def own_segment(self) -> int:
        """The segment of the pack program from which on items stay on this rank."""
        return self.message_segments + len(self.puts)

    @property
    def own_unpack(self) -> tuple[int, int]:
        """The range of segments of the unpack program for the items that stay on this rank: one in place, else none."""
        first = sum(part.segment >= 0 for part in self.recvs)
        return first, len(self.unpack) - bool(self.sources)

    @cached_property
    def stays(self) -> bool:
        """Whether the items of this rank that go to itself already are where they belong (in place, same layout)."""
        src, dst, rank = self.exchange.src, self.exchange.dst, self.exchange.rank
        message = own(self.exchange.sends, rank)
        return message is None or (
            self.inplace
            and all(
                same_layout(copy.shape, src.axis_strides(rank), dst.axis_strides(rank))
                and src.offset(rank, copy.src_start) == dst.offset(rank, copy.dst_start)
                for copy in message.copies
            )
        )

    @cached_property
    def rewrites(self) -> tuple[str, ...]:
        """Which passes of the plain schedule were left out, in words."""
        found = []
        sent = sum(part.segment < 0 for part in self.sends)
        landed = sum(part.segment < 0 for part in self.recvs)
        if sent:
            found.append(f"{sent} of {len(self.sends)} messages leave from the source array (already packed)")
        if landed:
            found.append(f"{landed} of {len(self.recvs)} messages land in the destination array (no unpack)")
        if self.puts:
            found.append(f"{len(self.puts)} peers are mapped: items are written into their memory, without a message")
        if not (self.sends or self.recvs or self.puts or self.sources):
            mine = own(self.exchange.sends, self.exchange.rank)
            found.append(f"no other rank takes part: {'nothing to do' if mine is None else 'one local copy'}")
        if self.inplace and self.stays and own(self.exchange.sends, self.exchange.rank) is not None:
            found.append("the items of this rank stay where they are")
        return tuple(found)

    @cached_property
    def _pack_side(self) -> tuple[tuple[Part, ...], tuple[tuple[Copy, ...], ...], int]:
        return self._side(self.exchange.sends, packing=True)

    @cached_property
    def _unpack_side(self) -> tuple[tuple[Part, ...], tuple[tuple[Copy, ...], ...], int]:
        return self._side(self.exchange.recvs, packing=False)

    def _side(
        self, messages: tuple[Message, ...], packing: bool
    ) -> tuple[tuple[Part, ...], tuple[tuple[Copy, ...], ...], int]:
        """Lay the messages of one direction out: parts, segments of copies, items of workspace."""
        rank = self.exchange.rank
        others = [message for message in messages if message.peer not in self.mapped | {rank}]
        loads = [load for message in others for load in self._loads(message, packing)]
        skip = [self._lies_in_array(load, packing) for load in loads]
        if self.uniform and not all(skip):
            skip = [False] * len(loads)
        parts: list[Part] = []
        segments: list[tuple[Copy, ...]] = []
        used = 0
        for load, in_array in zip(loads, skip, strict=True):
            if in_array:
                parts.append(self._part_in_array(load, packing))
                continue
            base = self.bases.send if packing else self.bases.recv
            parts.append(Part(load.peer, base, used, load.items, len(segments)))
            segments.append(self._copies(load, used, packing))
            used = self._round_up(used + load.items)
        if packing:
            segments += [
                self._straight_copies(message, partial(self.bases.peer, number))
                for number, message in enumerate(self._put_messages)
            ]
        mine = own(messages, rank)
        if mine is not None and not self.stays:
            if self.inplace:
                # The receive side reads this from the end of the send workspace, so both sides must agree on the place.
                load = self._whole(mine)
                segments.append(self._copies(load, self._own_offset, packing, through=self.bases.send))
                used = self._round_up(used + load.items) if packing else used
            elif packing:
                segments.append(self._straight_copies(mine, self.bases.dst))
        if self.sources and not packing:
            segments.append(self._landing_copies())
        return tuple(parts), tuple(segments), used

    @cached_property
    def _own_offset(self) -> int:
        """Where, in place, the items that stay on this rank lie in the send workspace: after all messages."""
        rank, used = self.exchange.rank, 0
        for message in self.exchange.sends:
            if message.peer not in self.mapped | {rank}:
                used = self._round_up(used + message.items * self.fields)
        return used

    def _round_up(self, items: int) -> int:
        step = ALIGNMENT // gcd(ALIGNMENT, self.itemsize)
        return -(-items // step) * step

    def _whole(self, message: Message) -> Load:
        return Load(message.peer, blocks_of(message.copies, self.exchange.dst.order), range(self.fields))

    def _loads(self, message: Message, packing: bool) -> list[Load]:
        """Return what a message is sent as: one piece, or each block of each field by itself.

        The latter where blocks are large enough to be worth more messages, and all are without gaps at one of the ends:
        there they need no pass through the workspace. Both ends decide alike.
        """
        whole = self._whole(message)
        if whole.pieces == 1 or self.uniform or not self._may_skip:
            return [whole]
        if whole.items * self.itemsize < whole.pieces * self.worth:
            return [whole]
        if not any(self._has_no_gaps(whole, side, packing) for side in (True, False)):
            return [whole]
        return [whole._replace(blocks=(block,), fields=range(f, f + 1)) for f in whole.fields for block in whole.blocks]

    def _has_no_gaps(self, load: Load, sending: bool, packing: bool) -> bool:
        """Tell whether each block of a load is without gaps in the array of its sender, or of its receiver."""
        if sending and any(len(block.copies) > 1 for block in load.blocks):
            return False
        pencil = self._array(sending)[0]
        strides = self._strides(pencil, self.exchange.rank if sending == packing else load.peer)
        return all(has_no_gaps(block.shape, strides, pencil.order) for block in load.blocks)

    def _order(self, load: Load, packing: bool) -> tuple[int, ...]:
        """Return the order of axes in which boxes travel: the source's or the destination's memory order.

        One of pack and unpack is then a plain copy, and the other one permutes. The plain copy disappears where the box
        has no gaps. Where it has some on both sides, the destination's order makes the pass after the arrival the cheap
        one; where it has none on both, sending from the array gains more than receiving into it (measured: 8 %).
        """
        src, dst = self.exchange.src, self.exchange.dst
        if not self._may_skip or load.pieces > 1:
            return dst.order
        return src.order if self._has_no_gaps(load, True, packing) else dst.order

    def _strides(self, pencil: Pencil, rank: int) -> tuple[int, ...]:
        """Return `pencil.axis_strides(rank)`; asked for many times per message, computed once."""
        key = pencil is self.exchange.src, rank
        found = self._known_strides.get(key)
        if found is None:
            found = self._known_strides[key] = pencil.axis_strides(rank)
        return found

    @cached_property
    def _known_strides(self) -> dict[tuple[bool, int], tuple[int, ...]]:
        return {}

    def _array(self, packing: bool) -> tuple[Pencil, Callable[[int], int]]:
        """Return the layout, and the base of each field, of the arrays that are packed from or unpacked to."""
        return (self.exchange.src, self.bases.src) if packing else (self.exchange.dst, self.bases.dst)

    @property
    def _may_skip(self) -> bool:
        """Whether messages may use the user's arrays at all."""
        return self.zero_copy and not self.inplace

    def _lies_in_array(self, load: Load, packing: bool) -> bool:
        if not self._may_skip or load.pieces > 1 or (packing and len(load.blocks[0].copies) > 1):
            return False
        strides = self._strides(self._array(packing)[0], self.exchange.rank)
        return has_no_gaps(load.blocks[0].shape, strides, self._order(load, packing))

    def _part_in_array(self, load: Load, packing: bool) -> Part:
        pencil, base = self._array(packing)
        block = load.blocks[0]
        offset = pencil.offset(self.exchange.rank, block.copies[0].src_start if packing else block.dst_start)
        return Part(load.peer, base(load.fields[0]), offset, load.items, -1)

    def _copies(self, load: Load, offset: int, packing: bool, through: int | None = None) -> tuple[Copy, ...]:
        """Return the copies between this rank's arrays and a load at `offset` of the workspace, field by field."""
        rank, order = self.exchange.rank, self._order(load, packing)
        pencil, array = self._array(packing)
        base = through if through is not None else self.bases.send if packing else self.bases.recv
        strides, copies = self._strides(pencil, rank), []
        for field in load.fields:
            packed = []  # (box, offset, strides in the load)
            for block in load.blocks:
                steps = packed_strides(block.shape, order)
                packed += [(box, offset + block.distance(box, steps), steps) for box in block.copies]
                if not packing:
                    near = array(field), pencil.offset(rank, block.dst_start), strides
                    copies.append(Copy(block.shape, base, offset, steps, *near))
                offset += prod(block.shape)
            if packing:
                # In the order of the receiver's memory, as its blocks are: faces that share lines follow each other.
                packed.sort(key=lambda one: [one[0].dst_start[axis] for axis in self.exchange.dst.order])
                copies += [
                    Copy(box.shape, array(field), pencil.offset(rank, box.src_start), strides, base, at, steps)
                    for box, at, steps in packed
                ]
        return tuple(copies)

    def _straight_copies(self, message: Message, dst_base: Callable[[int], int]) -> tuple[Copy, ...]:
        """Return the copies from this rank's source to the receiver's destination, whose bases `dst_base` tells."""
        src, dst, rank, peer = self.exchange.src, self.exchange.dst, self.exchange.rank, message.peer
        return tuple(
            Copy(
                box.shape,
                self.bases.src(field),
                src.offset(rank, box.src_start),
                self._strides(src, rank),
                dst_base(field),
                dst.offset(peer, box.dst_start),
                self._strides(dst, peer),
            )
            for field in range(self.fields)
            for box in message.copies
        )

    def _landing_copies(self) -> tuple[Copy, ...]:
        """Return the copies from the landing to the destination: the same places, another base."""
        dst, rank = self.exchange.dst, self.exchange.rank
        strides, size = self._strides(dst, rank), dst.size(rank)
        boxes = [box for peer, boxes in self.exchange.recvs if peer in self._mapped_peers for box in boxes]
        return tuple(
            Copy(box.shape, self.bases.landing, field * size + at, strides, self.bases.dst(field), at, strides)
            for field in range(self.fields)
            for box in boxes
            for at in (dst.offset(rank, box.dst_start),)
        )


def own(messages: tuple[Message, ...], rank: int) -> Message | None:
    """Return the message of a rank to itself, the last one where there is any."""
    return messages[-1] if messages and messages[-1].peer == rank else None


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to the alignment of messages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Subgrid(NamedTuple):
    """The smallest set of ranks, by whole grid entries, that an exchange of all ranks keeps among themselves."""

    entries: tuple[int, ...]  # grid entries along which it extends; all of them where the grids differ
    color: int  # ranks with the same color form the set of one exchange
    size: int


def exchange_subgrid(exchange: Exchange) -> Subgrid:
    """Return the set of ranks that the exchange of `exchange.rank` stays in.

    In a transpose, a grid entry along which both pencils split the same axis in the same places keeps every item at its
    coordinate. A halo update, from a pencil to itself, may pass items along every entry.
    """
    src, dst, grid = exchange.src, exchange.dst, exchange.src.grid
    entries = tuple(range(len(grid.shape)))
    if grid != dst.grid or src == dst:
        return Subgrid(entries, 0, grid.size)
    moving = tuple(entry for entry in entries if _split(src, entry) != _split(dst, entry))
    color = 0
    for entry, coordinate in enumerate(grid.coords(exchange.rank)):
        if entry not in moving:
            color = color * grid.shape[entry] + coordinate
    return Subgrid(moving, color, prod(grid.shape[entry] for entry in moving))


def _split(pencil: Pencil, entry: int) -> tuple[int, tuple[int, ...]]:
    """Return the axis that a grid entry splits, and where."""
    axis = next(a for a in range(pencil.ndim) if pencil.entry(a) == entry)
    return axis, tuple(pencil.cuts(axis))
