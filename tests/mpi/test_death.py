# SPDX-License-Identifier: Apache-2.0
"""A rank that dies while nobody waits for it: the others, which had its memory mapped, learn of it and end."""

import pytest
from launch import LAUNCHER, launch
from mpi4py import MPI

# Launchers end a job with a rank that is killed; this one does not if it is told so.
VENDOR, VERSION = MPI.get_vendor()
LETS_LIVE = VENDOR == "Open MPI" and VERSION[0] <= 4

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.Get_size() > 1, reason="starts ranks of its own: once is enough, on 1 rank"),
    pytest.mark.skipif(
        LAUNCHER is None or not LETS_LIVE, reason="needs the launcher of Open MPI 4: others end all ranks"
    ),
]

PROGRAM = """
import os, signal, time
from mpi4py import MPI
from cudecomp import Pencil, ProcessGrid, TransposePlan
comm = MPI.COMM_WORLD
x = Pencil((32, 32, 32), ProcessGrid((comm.size, 1)), 0)
plan = TransposePlan(x, x.pencil(1), "f8", comm, device=DEVICE, backend="direct", timeout=1.0)
a, b = plan.empty_src(), plan.empty_dst()
plan.run(a, b)
plan.run(a, b)
if DEVICE == "cuda":
    from cudecomp.cuda.runtime import synchronize
    synchronize()
comm.Barrier()
if comm.rank == VICTIM:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
start = time.monotonic()
try:
    for _ in range(3):  # on a GPU, the call after the one that was given up says so
        plan.run(a, b)
        if DEVICE == "cuda":
            synchronize()
except Exception as error:
    print(f"rank {comm.rank}: {type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
try:
    plan.close()
finally:
    print(f"rank {comm.rank} ends", flush=True)
    os._exit(0)  # MPI would wait for the dead
"""


def outlived(device, victim):
    """Run the program on 3 ranks, of which one dies; return what the others say."""
    program = f"DEVICE, VICTIM = {device!r}, {victim}\n{PROGRAM}"
    done = launch(3, "-P", "-c", program, options=["--enable-recovery"], timeout=60)
    return done.stdout + done.stderr


def check(said, victim):
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {rank} ends" in said, said
        assert f"rank {rank}: TimeoutError" in said or f"rank {rank}: PoisonedError" in said, said
    assert f"rank {victim}" in said.replace(f"rank {victim} ends", ""), said


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies(victim):
    check(outlived("host", victim), victim)


@pytest.mark.gpu
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies_on_a_gpu(victim):
    check(outlived("cuda", victim), victim)
