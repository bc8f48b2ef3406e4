# SPDX-License-Identifier: Apache-2.0
"""Owns a crew: all ranks of a schedule in one process, packing with the host kernels, messages moved by hand.

It does what the engines do, in the orders that they allow, and knows nothing of MPI or of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from framed import Framed

from cudecomp.boxes import compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Schedule


class Member:
    """One rank: its arrays and workspace between canaries, and the programs of its schedule.

    Parameters
    ----------
    schedule : Schedule
        What it does.
    sources, targets : sequence of ndarray
        The arrays of each field; the same where a plan takes one array.
    rng : numpy.random.Generator
        Of where the arrays lie and of what comes first.
    """

    def __init__(
        self, schedule: Schedule, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], rng: np.random.Generator
    ):
        self.schedule, self.rng = schedule, rng
        self.rank = schedule.exchange.rank
        dtype = sources[0].dtype

        def placed(array: np.ndarray) -> Framed:
            return Framed(array, int(rng.integers(64)))

        self.sources = [placed(array) for array in sources]
        self.targets = self.sources if targets is sources else [placed(array) for array in targets]
        sizes = (schedule.send_items, schedule.recv_items, schedule.landing_items)
        self.send, self.recv, self.landing = (placed(np.zeros(items, dtype)) for items in sizes)
        # Whether peers write into the landing: where the target is none of the plan's, and always in place.
        self.landed = schedule.inplace or bool(rng.integers(2))
        bases = schedule.bases
        self.table = AddressTable(bases.length)
        for field in range(schedule.fields):
            self.table[bases.src(field)] = self.sources[field].address
            self.table[bases.dst(field)] = self.targets[field].address
        self.table[bases.send], self.table[bases.recv] = self.send.address, self.recv.address
        self.table[bases.landing] = self.landing.address
        self.pack, self.unpack = self._program(schedule.pack), self._program(schedule.unpack)

    def _program(self, segments: Any) -> PackProgram:
        boxes = compile_copies(segments, self.schedule.itemsize)
        return PackProgram("host", boxes, len(segments), self.schedule.bases.length)

    def begin(self) -> None:
        """Pack the messages, then what stays on the rank."""
        schedule = self.schedule
        for segment in self.rng.permutation(schedule.message_segments):
            self.pack.run_list(self.table, [int(segment)])
        self.pack.run(self.table, schedule.own_segment)
        if schedule.inplace and not schedule.mapped:
            self.unpack.run(self.table, *schedule.own_unpack)

    def offered(self, field: int) -> int:
        """Where peers may write a field."""
        if not self.landed:
            return self.targets[field].address
        dst = self.schedule.exchange.dst
        return self.landing.address + field * dst.size(self.rank) * self.schedule.itemsize

    def put(self, number: int, peer: Member) -> None:
        """Write straight into the memory of a mapped peer."""
        schedule = self.schedule
        for field in range(schedule.fields):
            self.table[schedule.bases.peer(number, field)] = peer.offered(field)
        segment = schedule.puts[number].segment
        self.pack.run(self.table, segment, segment + 1)

    def receive(self, sender: Member, sent: Any) -> None:
        """Take a message to where it is expected, and unpack it."""
        (part,) = (part for part in self.schedule.recvs if part.peer == sender.rank)
        assert part.items == sent.items
        self._items(part, self.schedule.bases.recv, self.recv, self.targets)[...] = sender._items(
            sent, sender.schedule.bases.send, sender.send, sender.sources
        )
        if part.segment >= 0:
            self.unpack.run_list(self.table, [part.segment])

    def _items(self, part: Any, base: int, workspace: Framed, arrays: list[Framed]) -> np.ndarray:
        memory = workspace if part.base == base else arrays[0]
        flat = memory.array.reshape(-1)
        assert part.offset + part.items <= flat.size
        return flat[part.offset :][: part.items]

    def finish(self) -> None:
        """Copy what was brought into the landing, and in place what stays, once all is read."""
        own, landing = self.schedule.own_unpack
        if self.schedule.inplace and self.schedule.mapped:
            self.unpack.run(self.table, own)
        elif self.landed and self.schedule.sources:
            self.unpack.run(self.table, landing)

    def problems(self) -> list[str]:
        """What is wrong with the canaries."""
        named = [("source", self.sources), ("target", self.targets)]
        named += [("send", [self.send]), ("recv", [self.recv]), ("landing", [self.landing])]
        return [text for name, all_of_them in named for one in all_of_them for text in one.problems((self.rank, name))]


def shuffled(rng: np.random.Generator, entries: Sequence[Any]) -> list[Any]:
    return [entries[i] for i in rng.permutation(len(entries))]


def play(schedules: Sequence[Schedule], arrays: Callable[[int], Any], rng: np.random.Generator) -> list[Member]:
    """Carry out the schedules of all ranks; `arrays(rank)` returns the sources and targets of one."""
    crew = [Member(schedule, *arrays(schedule.exchange.rank), rng) for schedule in schedules]
    for member in shuffled(rng, crew):
        member.begin()
    puts = [(member, number) for member in crew for number in range(len(member.schedule.puts))]
    for member, number in shuffled(rng, puts):
        member.put(number, crew[member.schedule.puts[number].peer])
    written = [(put.peer, member.rank) for member in crew for put in member.schedule.puts]
    awaited = [(member.rank, source) for member in crew for source in member.schedule.sources]
    assert sorted(written) == sorted(awaited)
    messages = [(member, part) for member in crew for part in member.schedule.sends]
    assert len(messages) == sum(len(member.schedule.recvs) for member in crew)
    for member, part in shuffled(rng, messages):
        crew[part.peer].receive(member, part)
    for member in shuffled(rng, crew):
        member.finish()
    return crew
