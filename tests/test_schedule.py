# SPDX-License-Identifier: Apache-2.0
"""Schedules carried out with NumPy for all ranks in one process, with messages moved by hand, against the reference."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import updates
from exercise import filled, interior
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from strategies import pairs, pencils

from cudecomp import Exchange, Pencil, ProcessGrid
from cudecomp import testing as reference
from cudecomp.blocks import blocks_of
from cudecomp.halo import halo_exchange
from cudecomp.schedule import (
    ALIGNMENT,
    Schedule,
    aligned,
    exchange_subgrid,
    has_no_gaps,
    packed_strides,
    same_layout,
)

FEW = settings(deadline=None, max_examples=150)
ITEMSIZES = (1, 2, 3, 8, 12, 16, 24)


@st.composite
def options(draw):
    """The options of Schedule, item size included."""
    return {
        "itemsize": draw(st.sampled_from(ITEMSIZES)),
        "fields": draw(st.integers(1, 3)),
        "inplace": draw(st.booleans()),
        "zero_copy": draw(st.booleans()),
        "uniform": draw(st.booleans()),
        "worth": draw(st.sampled_from([1, 1 << 20])),
    }


def schedules(src, dst, **some):
    return [Schedule(Exchange(src, dst, rank), **some) for rank in range(src.grid.size)]


class Player:
    """One rank: its bases as flat arrays, and its programs."""

    def __init__(self, schedule):
        self.schedule, exchange = schedule, schedule.exchange
        src, dst, rank, fields = exchange.src, exchange.dst, exchange.rank, range(schedule.fields)
        dtype = np.dtype(f"V{schedule.itemsize}")
        self.sources = [filled(src, rank, dtype, field).reshape(-1) for field in fields]
        self.expected = [filled(dst, rank, dtype, field).reshape(-1) for field in fields]
        if schedule.inplace:
            items = max(src.size(rank), dst.size(rank))
            room = [np.full(items * dtype.itemsize, 0xA5, np.uint8).view(dtype) for _ in fields]
            for buffer, source in zip(room, self.sources, strict=True):
                buffer[: source.size] = source
            self.expected = [self._overlaid(*both) for both in zip(room, self.expected, strict=True)]
            arrays = room * 2
        else:
            arrays = self.sources + [reference.poisoned(dst, rank, dtype).reshape(-1) for _ in fields]
        self.results = arrays[schedule.fields :]
        send, recv = (np.zeros(n, dtype) for n in (schedule.send_items, schedule.recv_items))
        self.memory = [*arrays, send, recv]
        self.writes = [np.zeros(array.size, int) for array in self.memory]
        self.received = Counter()

    def _overlaid(self, buffer, wanted):
        pencil, rank = self.schedule.exchange.dst, self.schedule.exchange.rank
        result, inside = buffer.copy(), interior(pencil, rank).reshape(-1)
        result[: wanted.size][inside] = wanted[inside]
        return result

    def view(self, arrays, shape, base, offset, strides):
        """A box of a base, which it must not leave."""
        flat = arrays[base]
        assert offset >= 0
        assert offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) < flat.size
        return as_strided(flat[offset:], shape, [s * flat.itemsize for s in strides])

    def run(self, segments):
        for copy in itertools.chain.from_iterable(segments):
            source = self.view(self.memory, copy.shape, copy.src_base, copy.src_offset, copy.src_strides)
            self.view(self.memory, copy.shape, copy.dst_base, copy.dst_offset, copy.dst_strides)[...] = source
            self.view(self.writes, copy.shape, copy.dst_base, copy.dst_offset, copy.dst_strides)[...] += 1

    def message(self, part):
        assert part.offset + part.items <= self.memory[part.base].size
        return slice(part.offset, part.offset + part.items)

    def receive(self, sender, sent):
        """Take the message `sent` of another rank to where it is expected: the messages of a rank come in order."""
        source = sender.schedule.exchange.rank
        there = [part for part in self.schedule.recvs if part.peer == source][self.received[source]]
        self.received[source] += 1
        assert there.items == sent.items
        self.memory[there.base][self.message(there)] = sender.memory[sent.base][sender.message(sent)]
        self.writes[there.base][self.message(there)] += 1


class Updated(Player):
    """One rank in a halo update: its source arrays are its destination arrays."""

    def __init__(self, schedule, before, after):
        self.schedule, self.received = schedule, Counter()
        dtype = before.dtype
        self.results = [before.reshape(-1).copy() for _ in range(schedule.fields)]
        self.expected = [after.reshape(-1)] * schedule.fields
        workspace = [np.zeros(n, dtype) for n in (schedule.send_items, schedule.recv_items)]
        self.memory = [*self.results, *self.results, *workspace]
        self.writes = [np.zeros(array.size, int) for array in self.memory]


def play(all_schedules):
    """Carry out the schedules of all ranks, in the order that engines follow."""
    return play_with([Player(schedule) for schedule in all_schedules])


def play_with(players):
    for player in players:
        player.run(player.schedule.pack)
        if player.schedule.inplace:
            player.run(player.schedule.unpack[sum(part.segment >= 0 for part in player.schedule.recvs) :])
    for player in players:
        for part in player.schedule.sends:
            players[part.peer].receive(player, part)
    assert sum(len(p.schedule.sends) for p in players) == sum(len(p.schedule.recvs) for p in players)
    for player in players:
        for part in player.schedule.recvs:
            if part.segment >= 0:
                player.run(player.schedule.unpack[part.segment : part.segment + 1])
    return players


def check(players):
    for player in players:
        for field, (got, expected) in enumerate(zip(player.results, player.expected, strict=True)):
            assert got.tobytes() == expected.tobytes(), f"rank {player.schedule.exchange.rank}, field {field}"


@FEW
@given(pairs(), options())
def test_all_ranks_together_do_what_the_exchange_says(pair, some):
    players = play(schedules(*pair, **some))
    check(players)
    if not some["inplace"] and some["fields"] == 1:
        dtype = np.dtype(f"V{some['itemsize']}")
        srcs = [reference.fill(pair[0], rank, dtype) for rank in range(len(players))]
        dsts = [reference.poisoned(pair[1], rank, dtype) for rank in range(len(players))]
        reference.run([player.schedule.exchange for player in players], srcs, dsts)
        for player, dst in zip(players, dsts, strict=True):
            reference.check(pair[1], player.schedule.exchange.rank, player.results[0], dst)


@FEW
@given(pencils(), options(), st.data())
def test_all_ranks_together_update_their_halos(pencil, some, data):
    some["inplace"] = False
    periods = data.draw(st.tuples(*[st.booleans()] * pencil.ndim))
    axes = sorted(data.draw(st.sets(st.integers(0, pencil.ndim - 1))))
    before, after = updates.outcome(pencil, periods, axes, f"V{some['itemsize']}")
    every = [Schedule(halo_exchange(pencil, rank, periods, axes), **some) for rank in range(pencil.grid.size)]
    players = [Updated(*one) for one in zip(every, before, after, strict=True)]
    check(play_with(players))
    for player in players:
        assert max((writes.max(initial=0) for writes in player.writes), default=0) <= 1


@FEW
@given(pencils(), st.data())
def test_blocks_are_the_cells_of_their_boxes(pencil, data):
    periods = data.draw(st.tuples(*[st.booleans()] * pencil.ndim))
    for rank in range(pencil.grid.size):
        for message in halo_exchange(pencil, rank, periods, range(pencil.ndim)).recvs:
            blocks = blocks_of(message.copies, pencil.order)
            assert sorted(copy for block in blocks for copy in block.copies) == sorted(message.copies)
            for block in blocks:
                cells = np.zeros(block.shape, int)
                for copy in block.copies:
                    first = [b - a for a, b in zip(block.dst_start, copy.dst_start, strict=True)]
                    assert min(first) >= 0
                    cells[tuple(slice(i, i + n) for i, n in zip(first, copy.shape, strict=True))] += 1
                assert (cells == 1).all()


@FEW
@given(pairs(), options())
def test_nothing_is_written_twice_and_no_workspace_is_wasted(pair, some):
    """Offsets of different peers do not overlap, and the workspace ends with the last item, alignment aside."""
    for player in play(schedules(*pair, **some)):
        schedule = player.schedule
        assert max((writes.max(initial=0) for writes in player.writes), default=0) <= 1
        used = 0
        for base in (schedule.bases.send, schedule.bases.recv):
            touched = np.flatnonzero(player.writes[base])
            used += aligned((touched[-1] + 1 if touched.size else 0) * schedule.itemsize)
        step = math.lcm(schedule.itemsize, ALIGNMENT)
        assert used <= schedule.workspace_bytes <= used + 2 * (step - ALIGNMENT)
        for part in schedule.sends + schedule.recvs:
            if part.segment >= 0:
                assert part.offset * schedule.itemsize % ALIGNMENT == 0


@FEW
@given(pairs(), options())
def test_parts_and_segments_fit_together(pair, some):
    for schedule in schedules(*pair, **some):
        exchange = schedule.exchange
        for parts, messages, program in (
            (schedule.sends, exchange.sends, schedule.pack),
            (schedule.recvs, exchange.recvs, schedule.unpack),
        ):
            others = [message for message in messages if message.peer != exchange.rank]
            per_peer = [(peer, list(some)) for peer, some in itertools.groupby(parts, lambda part: part.peer)]
            assert [peer for peer, _ in per_peer] == [message.peer for message in others]
            assert [sum(part.items for part in some) for _, some in per_peer] == [
                message.items * schedule.fields for message in others
            ]
            assert all(len(some) in (1, schedule.fields) for _, some in per_peer)
            numbered = [part.segment for part in parts if part.segment >= 0]
            assert numbered == list(range(len(numbered)))
            assert len(program) - len(numbered) in (0, 1)
            for part in parts:
                if part.segment >= 0:
                    items = sum(math.prod(copy.shape) for copy in program[part.segment])
                    assert items == part.items
            if schedule.uniform:
                assert len({part.base for part in parts}) <= 1
                assert len(parts) == len(others)
        assert schedule.message_segments == sum(part.segment >= 0 for part in schedule.sends)
        if not schedule.zero_copy or schedule.inplace:
            assert all(part.segment >= 0 for part in schedule.sends + schedule.recvs)


@FEW
@given(pairs())
def test_rewrites_take_effect(pair):
    """Whatever lies without gaps, in the order that both ends travel in, is neither packed nor unpacked."""
    src, dst = pair
    for schedule in schedules(src, dst, itemsize=8):
        rank = schedule.exchange.rank
        for part, message in zip(schedule.sends, schedule.exchange.sends, strict=False):
            gapless = has_no_gaps(message.copies[0].shape, src.axis_strides(rank), src.order)
            if part.segment < 0:
                assert gapless
            else:
                # It is packed for a reason: it has gaps, or travels in the destination's order.
                theirs = packed_strides(message.copies[0].shape, dst.order)
                assert not gapless or not same_layout(message.copies[0].shape, src.axis_strides(rank), theirs)
        sent = sum(part.segment < 0 for part in schedule.sends)
        assert any("leave from the source array" in text for text in schedule.rewrites) == bool(sent)
        landed = sum(part.segment < 0 for part in schedule.recvs)
        assert any("land in the destination array" in text for text in schedule.rewrites) == bool(landed)


def test_a_slab_along_its_first_axis_is_sent_and_received_without_a_copy():
    """Axis 0 is whole in src, axis 1 in dst: one side has no gaps, and only the other one is copied."""
    grid = ProcessGrid((4, 1))
    x, y = Pencil((8, 8, 8), grid, 0), Pencil((8, 8, 8), grid, 1)
    there, back = Schedule(Exchange(x, y, 0), 8), Schedule(Exchange(y, x, 0), 8)
    assert [part.segment for part in there.sends] == [-1] * 3
    assert there.send_items == 0
    assert there.recv_items > 0
    assert "3 of 3 messages leave from the source array (already packed)" in there.rewrites
    assert [part.segment for part in back.recvs] == [-1] * 3
    assert back.recv_items == 0
    assert "3 of 3 messages land in the destination array (no unpack)" in back.rewrites


@pytest.mark.parametrize(("n", "apart"), [(64, True), (16, False)])
def test_fields_without_gaps_travel_one_by_one_where_they_are_large(n, apart):
    """Each field then leaves from its own array; small ones share a message, which costs less than three."""
    grid = ProcessGrid((4, 1))
    x, y = Pencil((n, n, n), grid, 0), Pencil((n, n, n), grid, 1)
    there, back = Schedule(Exchange(x, y, 0), 8, fields=3), Schedule(Exchange(y, x, 0), 8, fields=3)
    for parts, items, ring in ((there.sends, there.send_items, (1, 2, 3)), (back.recvs, back.recv_items, (3, 2, 1))):
        assert [part.peer for part in parts] == [peer for peer in ring for _ in range(3 if apart else 1)]
        assert [part.segment for part in parts] == ([-1] * 9 if apart else [0, 1, 2])
        assert (items == 0) == apart
    if apart:
        assert [part.base for part in there.sends] == [there.bases.src(field) for field in (0, 1, 2)] * 3
        assert "9 of 9 messages leave from the source array (already packed)" in there.rewrites
    assert len(Schedule(Exchange(x, y, 0), 8, fields=3, uniform=True).sends) == 3


def test_fields_with_gaps_share_a_message():
    grid = ProcessGrid((1, 4))
    x, y = Pencil((64, 64, 64), grid, 1), Pencil((64, 64, 64), grid, 2, order="contiguous")
    assert [part.segment for part in Schedule(Exchange(x, y, 0), 8, fields=3).sends] == [0, 1, 2]


@pytest.mark.parametrize("fields", [1, 3])
@pytest.mark.parametrize(("ranks", "peers"), [(2, [1, 1]), (4, [1, 3])])
def test_faces_without_gaps_are_sent_and_received_without_a_copy(ranks, peers, fields):
    """Two ranks of a periodic axis share two faces, which lie apart: each is a message."""
    pencil = Pencil((16, 80, 80), ProcessGrid((ranks, 1)), 2, halo=1)
    all_ranks = [Schedule(halo_exchange(pencil, r, (True,) * 3, (0,)), 8, fields=fields) for r in range(ranks)]
    one = all_ranks[0]
    assert sorted(part.peer for part in one.sends) == sorted(peers * fields)
    assert {part.segment for part in one.sends + one.recvs} == {-1}
    assert one.workspace_bytes == 0
    assert one.pack == one.unpack == ()
    count = 2 * fields
    assert f"{count} of {count} messages leave from the source array (already packed)" in one.rewrites
    assert f"{count} of {count} messages land in the destination array (no unpack)" in one.rewrites
    for rank, peer in itertools.product(range(ranks), repeat=2):  # both ends have the same messages in the same order
        sent = [(p.items, p.base) for p in all_ranks[rank].sends if p.peer == peer]
        assert sent == [(p.items, p.base - fields) for p in all_ranks[peer].recvs if p.peer == rank]


def test_faces_with_edges_and_corners_land_where_they_belong():
    """All axes in one step: a face comes from nine places of its sender, and fills one of its receiver."""
    pencil = Pencil((16, 80, 80), ProcessGrid((4, 1)), 2, halo=1)
    schedule = Schedule(halo_exchange(pencil, 0, (True,) * 3, (0, 1, 2)), 8)
    assert [part.segment for part in schedule.sends] == [0, 1]
    assert [len(segment) for segment in schedule.pack[:2]] == [9, 9]
    assert [part.segment for part in schedule.recvs] == [-1, -1]
    assert schedule.recv_items == 0
    assert "2 of 2 messages land in the destination array (no unpack)" in schedule.rewrites
    pencil = Pencil((80, 16, 80), ProcessGrid((4, 1)), 0, halo=1)
    across = Schedule(halo_exchange(pencil, 0, (True,) * 3, (0, 1, 2)), 8)
    assert [len(segment) for segment in across.unpack] == [1, 1]


def test_faces_with_gaps_are_packed_into_one_message():
    pencil = Pencil((80, 80, 16), ProcessGrid((1, 2)), 0, halo=1)
    schedule = Schedule(halo_exchange(pencil, 0, (True,) * 3, (2,)), 8)
    assert [(part.peer, part.segment) for part in schedule.sends + schedule.recvs] == [(1, 0), (1, 0)]
    assert [len(segment) for segment in schedule.pack] == [2]


def test_zero_copy_can_be_forbidden():
    grid = ProcessGrid((4, 1))
    exchange = Exchange(Pencil((8, 8, 8), grid, 0), Pencil((8, 8, 8), grid, 1), 0)
    schedule = Schedule(exchange, 8, zero_copy=False)
    assert [part.segment for part in schedule.sends] == [0, 1, 2]
    assert schedule.rewrites == ()


def test_one_rank_needs_no_workspace():
    grid = ProcessGrid((1, 1))
    exchange = Exchange(Pencil((5, 6, 7), grid, 0), Pencil((5, 6, 7), grid, 1, order="contiguous"), 0)
    schedule = Schedule(exchange, 16)
    assert schedule.workspace_bytes == 0
    assert schedule.rewrites == ("no other rank takes part: one local copy",)
    assert Schedule(exchange, 16, inplace=True).workspace_bytes == aligned(5 * 6 * 7 * 16)


def test_items_that_stay_in_place_are_not_copied():
    pencil = Pencil((5, 6, 7), ProcessGrid((1, 1)), 0)
    schedule = Schedule(Exchange(pencil, pencil, 0), 8, inplace=True)
    assert schedule.stays
    assert schedule.pack == schedule.unpack == ()
    assert "the items of this rank stay where they are" in schedule.rewrites


@pytest.mark.parametrize(
    ("shape", "bytes_of_one"), [((2048, 1024, 1024), 2**31), ((4096, 4096, 4096), 2**36), ((2**40, 2, 2), 2**42)]
)
def test_sizes_beyond_32_bits(shape, bytes_of_one):
    """Plan-only: offsets, strides and workspaces of large arrays, in whole numbers of any size."""
    grid = ProcessGrid((1, 1))
    src, dst = Pencil(shape, grid, 0), Pencil(shape, grid, 2, order="contiguous", halo=1)
    assert src.size(0) == bytes_of_one
    schedule = Schedule(Exchange(src, dst, 0), 16, inplace=True)
    (copies, *_) = schedule.pack
    assert sum(math.prod(copy.shape) for copy in copies) == bytes_of_one
    assert schedule.workspace_bytes == 16 * bytes_of_one
    (local,) = Schedule(Exchange(src, dst, 0), 1).pack
    last = local[0].dst_offset + sum((n - 1) * s for n, s in zip(local[0].shape, local[0].dst_strides, strict=True))
    assert last < dst.size(0) == math.prod(n + 2 for n in shape)


def test_messages_beyond_32_bits():
    grid = ProcessGrid((2, 1))
    src, dst = Pencil((4096, 4096, 4096), grid, 0), Pencil((4096, 4096, 4096), grid, 1)
    first, second = schedules(src, dst, itemsize=8)
    assert first.sends[0].items == second.recvs[0].items == 2**34
    assert first.workspace_bytes == 2**37


@FEW
@given(pairs())
def test_subgrids_hold_all_messages(pair):
    """Every peer of a rank has the rank's color, ranks of one color are as many as said, and know the same entries."""
    subgrids = [exchange_subgrid(Exchange(*pair, rank)) for rank in range(pair[0].grid.size)]
    for rank, subgrid in enumerate(subgrids):
        exchange = Exchange(*pair, rank)
        for message in exchange.sends + exchange.recvs:
            assert subgrids[message.peer].color == subgrid.color
        assert subgrid.entries == subgrids[0].entries
        assert sum(other.color == subgrid.color for other in subgrids) == subgrid.size


def test_subgrids_are_rows_and_columns():
    grid = ProcessGrid((3, 4))
    x, y, z = (Pencil((9, 10, 11), grid, axis) for axis in range(3))
    assert [exchange_subgrid(Exchange(a, b, 5)).size for a, b in ((x, y), (y, z), (x, z))] == [3, 4, 12]
    assert exchange_subgrid(Exchange(x, x, 5)).size == 12  # it could be a halo update
