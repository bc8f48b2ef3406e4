# SPDX-License-Identifier: Apache-2.0
"""Many random geometries, the same in each run: all ranks in one process, on the host kernels."""

import geometries
import numpy as np
import pytest
from crew import play
from exercise import STAMP, same_bytes

from cudecomp import Exchange
from cudecomp import testing as reference
from cudecomp.halo import halo_exchange
from cudecomp.schedule import Schedule

ITEMSIZES = (1, 2, 3, 4, 8, 12, 16, 24)
MOST_RANKS = 8
BATCH = 100


def options(rng, nodes):
    """Options of a Schedule, by rank: an MPI transport, an all-to-all, or peers that are mapped on each host."""
    kind = geometries.one_of(rng, "messages", "uniform", "mapped")
    some = {
        "itemsize": geometries.one_of(rng, *ITEMSIZES),
        "fields": int(rng.integers(1, 4)),
        "zero_copy": bool(rng.random() < 0.8),
        "uniform": kind == "uniform",
    }

    def of(rank):
        here = frozenset(peer for peer, node in enumerate(nodes) if node == nodes[rank])
        return {**some, "mapped": here if kind == "mapped" else frozenset()}

    return of


class Memory:
    """What the memory of a rank holds: canaries outside, and inside, for each field, values that tell items apart."""

    def __init__(self, pencil, rank, dtype):
        self._cells = reference.fill(pencil, rank, np.int64).reshape(-1)
        self._dtype = dtype
        self.inside = self._cells >= 0

    def field(self, number):
        return reference.items(np.where(self.inside, self._cells + number * STAMP, self._cells), self._dtype)

    def poisoned(self):
        return reference.items(np.where(self.inside, reference.POISON, self._cells), self._dtype)


def transposed(number):
    """Carry out one random transpose; return the problems."""
    rng = geometries.generator(number)
    src, dst, nodes = geometries.transpose(rng, int(rng.integers(1, MOST_RANKS + 1)))
    of, inplace = options(rng, nodes), bool(rng.integers(2))
    ranks = range(src.grid.size)
    schedules = [Schedule(Exchange(src, dst, rank, nodes), inplace=inplace, **of(rank)) for rank in ranks]
    fields, dtype = range(schedules[0].fields), np.dtype(f"V{schedules[0].itemsize}")

    def arrays(rank):
        memory, target = Memory(src, rank, dtype), Memory(dst, rank, dtype)
        sources = [memory.field(field) for field in fields]
        if not inplace:
            return sources, [target.poisoned() for _ in fields], target
        beyond = np.full(max(src.size(rank), dst.size(rank)) * dtype.itemsize, 0x5A, np.uint8).view(dtype)
        buffers = [np.concatenate([source, beyond[source.size :]]) for source in sources]
        return buffers, buffers, target

    before = [arrays(rank) for rank in ranks]
    crew = play(schedules, lambda rank: before[rank][:2], rng)
    return [text for member in crew for text in member.problems() + wrong(member, *before[member.rank], inplace)]


def wrong(member, sources, targets, memory, inplace):
    """What is wrong with the arrays of one rank after a transpose."""
    exchange, found = member.schedule.exchange, []
    for field, (target, before) in enumerate(zip(member.targets, targets, strict=True)):
        expected = before.copy()
        expected[: memory.inside.size][memory.inside] = memory.field(field)[memory.inside]
        if not same_bytes(target.array, expected):
            found.append(f"rank {member.rank}, field {field}: {exchange.src} to {exchange.dst}")
        if not inplace and not same_bytes(member.sources[field].array, sources[field]):
            found.append(f"rank {member.rank}, field {field}: the source was changed")
    return found


def updated(number):
    """Carry out one random halo update; return the problems."""
    rng = geometries.generator(number)
    pencil, periods, axes, nodes = geometries.halo(rng, int(rng.integers(1, MOST_RANKS + 1)))
    of, ranks = options(rng, nodes), range(pencil.grid.size)
    exchanges = [halo_exchange(pencil, rank, periods, axes, nodes) for rank in ranks]
    schedules = [Schedule(exchange, **of(exchange.rank)) for exchange in exchanges]
    fields, dtype = range(schedules[0].fields), np.dtype(f"V{schedules[0].itemsize}")
    memories = [Memory(pencil, rank, dtype) for rank in ranks]
    arrays = [[memory.field(field) for field in fields] for memory in memories]
    crew = play(schedules, lambda rank: (arrays[rank], arrays[rank]), rng)
    found = [text for member in crew for text in member.problems()]
    for field in fields:
        after = [array[field] for array in arrays]
        reference.run(exchanges, after, after)
        for member, expected in zip(crew, after, strict=True):
            if not same_bytes(member.targets[field].array, expected):
                found.append(f"rank {member.rank}, field {field}: {pencil}, periods {periods}, axes {axes}")
    return found


@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_transposes(first):
    for number in range(first, first + BATCH):
        found = transposed(number)
        assert not found, f"number {number}: {found[:3]}"


@pytest.mark.parametrize("first", range(10_000, 10_500, BATCH))
def test_halo_updates(first):
    for number in range(first, first + BATCH):
        found = updated(number)
        assert not found, f"number {number}: {found[:3]}"
