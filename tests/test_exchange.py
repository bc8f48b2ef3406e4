# SPDX-License-Identifier: Apache-2.0
"""Tests of the exchange: what each rank sends and receives, and in which order."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, pairs

from cudecomp import testing as reference
from cudecomp.exchange import BoxCopy, Exchange, Message
from cudecomp.grid import ProcessGrid
from cudecomp.pencil import Pencil

ORDERS = list(itertools.permutations(range(3)))


def exchanges(src, dst, nodes=None):
    return [Exchange(src, dst, rank, nodes) for rank in range(src.grid.size)]


def transpose(src, dst, srcs, dtype):
    """Run an exchange by the reference, and check what it wrote."""
    dsts = [reference.poisoned(dst, rank, dtype) for rank in range(dst.grid.size)]
    reference.run(exchanges(src, dst), srcs, dsts)
    for rank, array in enumerate(dsts):
        reference.check(dst, rank, array)
    return dsts


def there_and_back(src, dst, dtype):
    srcs = [reference.fill(src, rank, dtype) for rank in range(src.grid.size)]
    transpose(dst, src, transpose(src, dst, srcs, dtype), dtype)
    for rank, array in enumerate(srcs):
        reference.check(src, rank, array)


@PROPERTY
@given(pairs())
def test_sends_equal_the_matching_receives(pair):
    everyone = exchanges(*pair)
    sent = {(e.rank, message.peer): message.copies for e in everyone for message in e.sends}
    received = {(message.peer, e.rank): message.copies for e in everyone for message in e.recvs}
    assert sent == received
    for e, peer in itertools.product(everyone, range(len(everyone))):
        assert e.bytes_to(peer, 8) == everyone[peer].bytes_from(e.rank, 8)


@PROPERTY
@given(pairs())
def test_the_messages_of_a_rank_tile_its_boxes(pair):
    src, dst = pair
    for e in exchanges(src, dst):
        for pencil, messages, field in ((src, e.sends, "src_start"), (dst, e.recvs, "dst_start")):
            times_named = np.zeros(pencil.global_shape, int)
            for message in messages:
                assert message.items > 0
                for copy in message.copies:
                    start = getattr(copy, field)
                    times_named[tuple(slice(i, i + n) for i, n in zip(start, copy.shape, strict=True))] += 1
            held = np.zeros(pencil.global_shape, int)
            held[pencil.slices(e.rank)] = 1
            assert (times_named == held).all()


@PROPERTY
@given(pairs())
def test_a_message_is_the_intersection_of_two_boxes(pair):
    src, dst = pair
    for e in exchanges(src, dst):
        expected = {}
        for peer in range(dst.grid.size):
            common = src.box(e.rank).intersect(dst.box(peer))
            if common.size:
                expected[peer] = Message(peer, (BoxCopy(common.shape, common.start, common.start),))
        assert {message.peer: message for message in e} == expected


@PROPERTY
@given(pairs(), st.sampled_from([np.int8, np.uint16, np.int64, np.float32, np.float64, np.complex64, "V12", "?"]))
def test_there_and_back_is_the_identity(pair, dtype):
    there_and_back(*pair, dtype)


@pytest.mark.parametrize("src_order", ORDERS)
@pytest.mark.parametrize("dst_order", ORDERS)
def test_all_pairs_of_orders(src_order, dst_order):
    src = Pencil((5, 6, 7), ProcessGrid((2, 2)), 0, order=src_order, halo=(0, 1, (2, 0)))
    there_and_back(src, src.pencil(1, order=dst_order, padding=1), np.complex128)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (1, 2)])
def test_pencils_with_empty_parts(shape, a, b):
    pencil = Pencil((3, 5, 2), ProcessGrid(shape), a, order="contiguous", halo=1)
    there_and_back(pencil, pencil.pencil(b), np.complex128)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_more_ranks_than_items_along_an_axis(shape):
    pencil = Pencil((2, 2, 3), ProcessGrid(shape), 0)
    there_and_back(pencil, pencil.pencil(1), np.float64)
    there_and_back(pencil.pencil(1), pencil.pencil(2), np.float64)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Pencil((5, 6, 7), ProcessGrid((2, 2)), 0), Pencil((5, 6, 7), ProcessGrid((2, 2)), 2)),
        (Pencil((5, 6, 7), ProcessGrid((2, 2)), 0), Pencil((5, 6, 7), ProcessGrid((1, 4)), 0)),
        (Pencil((5, 6, 7), ProcessGrid((2, 2)), 1), Pencil((5, 6, 7), ProcessGrid((4, 1)), 1)),
        (Pencil((5, 6, 7), ProcessGrid((2, 2)), 1), Pencil((5, 6, 7), ProcessGrid((2, 2), rank_order="column"), 1)),
        (Pencil((5, 6, 7), ProcessGrid((4, 1)), 1), Pencil((5, 6, 7), ProcessGrid((1, 4)), 1, dist_shape=(4, 4, 4))),
    ],
    ids=["first to last axis", "pencil to slab", "another grid", "another rank order", "another split"],
)
def test_layouts_that_are_no_neighbours(src, dst):
    there_and_back(src, dst, np.int64)


def test_neighbouring_pencils_talk_in_columns_and_rows():
    grid = ProcessGrid((2, 3))
    pencils_ = [Pencil((12, 12, 12), grid, axis) for axis in range(3)]
    for rank in range(grid.size):
        assert {m.peer for m in Exchange(pencils_[0], pencils_[1], rank)} == set(grid.column(rank))
        assert {m.peer for m in Exchange(pencils_[1], pencils_[2], rank)} == set(grid.row(rank))


def test_a_rank_without_items_has_no_messages():
    src = Pencil((8, 8, 8), ProcessGrid((1, 16)), 0)
    exchange = Exchange(src, src.pencil(1), 12)
    assert exchange.sends == exchange.recvs == ()
    assert list(exchange) == []
    assert exchange.bytes_to(0, 8) == exchange.bytes_from(12, 8) == 0


def test_messages_go_round_the_ring_and_end_at_home():
    src = Pencil((12, 12, 12), ProcessGrid((1, 6)), 1)
    for e in exchanges(src, src.pencil(2)):
        assert [(m.peer - e.rank) % 6 for m in e.sends] == [1, 2, 3, 4, 5, 0]
        assert [(e.rank - m.peer) % 6 for m in e.recvs] == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("rank_order", ["row", "column"])
def test_other_nodes_come_first(rank_order):
    grid = ProcessGrid((4, 3), rank_order=rank_order)
    src = Pencil((24, 24, 24), grid, 0)
    names = [f"node{rank // 4}" for rank in range(grid.size)]
    for dst in (src.pencil(1), src.pencil(2)):
        for e in exchanges(src, dst, names):
            for messages, sign in ((e.sends, 1), (e.recvs, -1)):
                peers = [m.peer for m in messages]
                near = [2 if p == e.rank else int(names[p] == names[e.rank]) for p in peers]
                assert near == sorted(near)
                for _, some in itertools.groupby(peers, key=lambda p: (p == e.rank, names[p] == names[e.rank])):
                    steps = [sign * (p - e.rank) % grid.size for p in some]
                    assert steps == sorted(steps)
            assert e == Exchange(src, dst, e.rank, names.__getitem__)
            assert e == Exchange(src, dst, e.rank, np.array(names))
            plain = Exchange(src, dst, e.rank)
            assert sorted(plain.sends) == sorted(e.sends)
            assert sorted(plain.recvs) == sorted(e.recvs)


def test_the_work_grows_with_the_messages_and_not_with_the_ranks(monkeypatch):
    boxes, nodes = [], []
    box = Pencil.box
    monkeypatch.setattr(Pencil, "box", lambda self, rank: boxes.append(rank) or box(self, rank))
    src = Pencil((512, 512, 512), ProcessGrid((64, 64)), 0)
    exchange = Exchange(src, src.pencil(1), 100, lambda rank: nodes.append(rank) or rank // 8)
    assert len(exchange.sends) == len(exchange.recvs) == 64
    assert boxes == [100, 100]
    assert len(nodes) <= 1 + 64 + 64


def test_messages_beyond_32_bits():
    src = Pencil((2064, 2064, 2064), ProcessGrid((2, 1)), 0)
    exchange = Exchange(src, src.pencil(1), 0)
    assert exchange.bytes_to(1, 1) == exchange.bytes_from(1, 1) == 1032 * 1032 * 2064 > 2**31 - 1
    whole = Pencil((4096, 4096, 4096), ProcessGrid((1, 1)), 0)
    assert Exchange(whole, whole.pencil(2), 0).bytes_to(0, 16) == 2**40


def test_given_copies_may_cross_a_periodic_edge():
    pencil = Pencil((4, 3), ProcessGrid((2,)), 1, halo=((1, 1), 0))
    both = [  # of rank 0 and rank 1: what goes up and what goes down, in the receiver's frame
        {1: [BoxCopy((1, 3), (1, 0), (1, 0)), BoxCopy((1, 3), (0, 0), (4, 0))], 0: []},
        {0: [BoxCopy((1, 3), (3, 0), (-1, 0)), BoxCopy((1, 3), (2, 0), (2, 0)), BoxCopy((0, 3), (2, 0), (2, 0))]},
    ]
    everyone = [
        Exchange.from_copies(pencil, pencil, rank, both[rank], {1 - rank: both[1 - rank][rank]}) for rank in (0, 1)
    ]
    assert [e.sends[0].items for e in everyone] == [6, 6]
    assert [len(e.sends) for e in everyone] == [1, 1]
    arrays = [reference.fill(pencil, rank, np.int64) for rank in (0, 1)]
    reference.run(everyone, arrays, arrays)
    whole = np.pad(np.arange(12).reshape(4, 3), ((1, 1), (0, 0)), mode="wrap")
    for rank in (0, 1):
        reference.check(pencil, rank, arrays[rank], whole[2 * rank : 2 * rank + 4])


def test_an_exchange_is_a_value_and_leaves_its_pencils_alone():
    src = Pencil((5, 6, 7), ProcessGrid((2, 2)), 0, order="contiguous", halo=1)
    dst = src.pencil(1)
    before = repr(src), hash(src)
    exchange = Exchange(src, dst, 1)
    exchange.bytes_to(3, 8)
    assert exchange == Exchange(src, dst, 1)
    assert hash(exchange) == hash(Exchange(src, dst, 1))
    assert exchange != Exchange(src, dst, 2)
    assert exchange != Exchange(dst, src, 1)
    assert pickle.loads(pickle.dumps(exchange)) == exchange
    assert repr(exchange).startswith("<Exchange of rank 1: sends to 2, receives from 2; Pencil(")
    with pytest.raises(AttributeError):
        exchange.rank = 0
    assert (repr(src), hash(src)) == before
    assert Exchange(src, src.pencil(2), 1) == Exchange(src, src.pencil(2), 1)


def test_pencils_that_do_not_belong_together():
    src = Pencil((4, 4, 4), ProcessGrid((2, 2)), 0)
    with pytest.raises(ValueError, match=r"must have one global shape, got \(4, 4, 4\) and \(4, 4, 5\)"):
        Exchange(src, Pencil((4, 4, 5), ProcessGrid((2, 2)), 1), 0)
    with pytest.raises(ValueError, match="must have one global shape"):
        Exchange(src, Pencil((4, 4), ProcessGrid((4,)), 1), 0)
    with pytest.raises(ValueError, match="equally many ranks"):
        Exchange(src, Pencil((4, 4, 4), ProcessGrid((2, 3)), 1), 0)
    with pytest.raises(TypeError, match="dst must be a Pencil, got None"):
        Exchange(src, None, 0)


def test_other_arguments_that_do_not_fit():
    src = Pencil((4, 4, 4), ProcessGrid((2, 2)), 0)
    exchange = Exchange(src, src.pencil(1), 0)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"got rank {rank}"):
            Exchange(src, src.pencil(1), rank)
        with pytest.raises(ValueError, match=f"got peer {rank}"):
            exchange.bytes_to(rank, 8)
    with pytest.raises(TypeError, match="rank must be an integer"):
        Exchange(src, src.pencil(1), 0.0)
    with pytest.raises(ValueError, match="got 3 nodes, expected one per rank, 4 in all"):
        Exchange(src, src.pencil(1), 0, [0, 0, 1])
    with pytest.raises(TypeError, match="nodes must be a sequence or callable, got int"):
        Exchange(src, src.pencil(1), 0, 3)
    with pytest.raises(ValueError, match="got itemsize 0"):
        exchange.bytes_from(0, 0)
