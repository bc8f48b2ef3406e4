# SPDX-License-Identifier: Apache-2.0
"""Random plans over every host transport, the same on all ranks and in each run: values, and canaries around memory."""

import geometries
import numpy as np
import pytest
from exercise import DTYPES, STAMP, WAYS, Trial, same_bytes
from framed import Framed
from mpi4py import MPI

from cudecomp import HaloPlan, TransposePlan
from cudecomp import testing as reference
from cudecomp.halo import halo_exchange

SIZE = MPI.COMM_WORLD.Get_size()
MOVERS = ("mpi_p2p", "mpi_p2p_pl", "mpi_a2a", "direct")
BATCH = 20


def options(rng, nodes, backend):
    """Options of a plan; the hosts decide who gets messages from whom of "direct", and in which order."""
    some = {"backend": backend, "fields": int(rng.integers(1, 4)), "timeout": 20}
    return some | ({"nodes": nodes} if rng.random() < 0.75 else {})


def surround(plan):
    """Put canaries around the workspace that messages pass through."""
    workspace = plan.workspace
    frame = Framed(np.zeros(workspace.memory("host").nbytes, np.uint8))
    workspace._memory["host"] = frame.array
    for tenant in list(workspace._tenants):
        tenant.rebind()
    return frame


class Arrays:
    """The arrays of a run between canaries, at any address of this rank, or such as peers have mapped."""

    def __init__(self, plan, mapped, number):
        self._plan, self._mapped = plan, mapped
        self._rng = np.random.default_rng([number, plan.rank])
        self._frames = []

    def placed(self, array, empty):
        """A copy of an array, where the plan can use it."""
        if self._mapped:
            place = empty()
            place[...] = array
            return place
        self._frames.append(Framed(array, int(self._rng.integers(64))))
        return self._frames[-1].array

    def move(self, trial):
        """Give other places to the arrays of a trial."""
        one = not isinstance(trial.src, list)
        for name in ("src", "dst"):
            formed = getattr(trial, name)
            if formed is not None:
                empty = getattr(self._plan, f"empty_{name}")
                moved = [self.placed(array, empty) for array in ([formed] if one else formed)]
                setattr(trial, name, moved[0] if one else moved)

    def problems(self):
        return [text for frame in self._frames for text in frame.problems("array")]


def transposed(comm, number, backend):
    """Carry out a random transpose; return the problems of this rank."""
    rng = geometries.generator(number)
    src, dst, nodes = geometries.transpose(rng, SIZE, 11)
    some = options(rng, nodes, backend)
    dtype, inplace, mapped = geometries.one_of(rng, *DTYPES.values()), bool(rng.integers(2)), bool(rng.integers(2))
    form = "array" if mapped else geometries.one_of(rng, "array", "sequence", "flat")
    found = []
    with TransposePlan(src, dst, dtype, comm, inplace=inplace, **some) as plan:
        frame = surround(plan)
        for stamp in range(2):
            trial, arrays = Trial(plan, stamp, form), Arrays(plan, mapped, number)
            arrays.move(trial)
            found += trial.run(geometries.one_of(rng, *WAYS)) + arrays.problems()
        found += frame.problems("workspace")
    return [f"number {number}, {some}: {text}" for text in found]


def updated(comm, number, backend):
    """Carry out a random halo update; return the problems of this rank."""
    rng = geometries.generator(number)
    pencil, periods, axes, nodes = geometries.halo(rng, SIZE, 11)
    some, dtype, mapped = options(rng, nodes, backend), geometries.one_of(rng, "i2", "f8", "c16"), rng.random() < 0.5
    ranks = range(SIZE)
    before = [reference.fill(pencil, rank, np.int64) for rank in ranks]
    after = [array.copy() for array in before]
    reference.run([halo_exchange(pencil, rank, periods, axes) for rank in ranks], after, after)

    def stacked(cells):
        fields = [reference.items(cells + field * STAMP, dtype) for field in range(some["fields"])]
        return np.stack(fields) if len(fields) > 1 else fields[0]

    found = []
    with HaloPlan(pencil, dtype, comm, periods=periods, axes=axes, **some) as plan:
        frame = surround(plan)
        for _ in range(2):
            arrays = Arrays(plan, mapped, number)
            array = arrays.placed(stacked(before[comm.rank]), plan.empty_src)
            WAYS[geometries.one_of(rng, *WAYS)](plan, array, None)
            if not same_bytes(array, stacked(after[comm.rank])):
                found.append(f"{pencil}, periods {periods}, axes {axes}")
            found += arrays.problems()
        found += frame.problems("workspace")
    return [f"number {number}, {some}: {text}" for text in found]


@pytest.mark.parametrize("backend", MOVERS)
@pytest.mark.parametrize("first", range(0, 4 * BATCH, BATCH))
def test_transposes(comm, verdict, backend, first):
    verdict([text for number in range(first, first + BATCH) for text in transposed(comm, number, backend)])


@pytest.mark.parametrize("backend", MOVERS)
@pytest.mark.parametrize("first", range(10_000, 10_000 + 2 * BATCH, BATCH))
def test_halo_updates(comm, verdict, backend, first):
    verdict([text for number in range(first, first + BATCH) for text in updated(comm, number, backend)])
