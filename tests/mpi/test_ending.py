# SPDX-License-Identifier: Apache-2.0
"""How processes end: programs of two ranks, started from a test of one rank, that leave plans in every bad state."""

import pytest
from launch import LAUNCHER, launch
from mpi4py import MPI

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.Get_size() > 1, reason="starts ranks of its own: once is enough, on 1 rank"),
    pytest.mark.skipif(LAUNCHER is None, reason="no mpiexec beside Python or on PATH"),
]

HEAD = """
import warnings
import numpy as np
from mpi4py import MPI
from cudecomp import Pencil, PoisonedError, ProcessGrid, TransposePlan, spec

def given_up(action):
    try:
        action()
    except TimeoutError as error:
        assert "not all ranks of the communicator were there within 0.5 s" in str(error), error
    else:
        raise SystemExit("no rank was missed")

def refused(action):
    try:
        action()
    except RuntimeError as error:
        assert "cannot be used any more" in str(error), error
    else:
        raise SystemExit("not refused")

comm = MPI.COMM_WORLD
grid = ProcessGrid((comm.size, 1))
x = Pencil((64, 64, 64), grid, 0)
y = x.pencil(1)
plan = TransposePlan(x, y, "f8", comm, backend=BACKEND, timeout=0.5)
a, b = plan.empty_src(), plan.empty_dst()
"""

PROGRAMS = {
    "one rank absent": """
if comm.rank:
    try:
        plan.run(a, b)
    except (TimeoutError, PoisonedError) as error:
        print(error)
plan.close()
print("the end")
""",
    "one rank absent, not closed": """
warnings.simplefilter("ignore")
if comm.rank:
    try:
        plan.run(a, b)
    except (TimeoutError, PoisonedError) as error:
        print(error)
print("the end")
""",
    "closed without wait": """
if comm.rank:
    plan.bind(a, b).start()
plan.close()
print("the end")
""",
    "arrays freed under way": """
if comm.rank:
    plan.bind(a, b).start()
plan.close()
del plan, a, b
rooms = [np.zeros(1 << 18) for _ in range(20)]
print("the end")
""",
    "never waited": """
warnings.simplefilter("ignore")
plan.bind(a, b).start()
print("the end")
""",
    "interrupted": """
import signal
def interrupt(number, frame):
    raise KeyboardInterrupt
warnings.simplefilter("ignore")
if comm.rank:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        plan.run(a, b)
    except (KeyboardInterrupt, PoisonedError) as error:
        print(repr(error))
    a = b = None
print("the end")
""",
    "never closed": """
warnings.simplefilter("ignore")
plan.run(a, b)
print("the end")
""",
    "built by one rank alone": """
spec.BUILD_PATIENCE = 0.5
if comm.rank:
    given_up(lambda: TransposePlan(x, y, "f8", comm, backend=BACKEND, timeout=0.1))
    refused(lambda: TransposePlan(x, y, "f8", comm, backend=BACKEND))
plan.close()
print("the end")
""",
    "the first plan built by one rank alone": """
spec.BUILD_PATIENCE = 0.5
other = comm.Dup()
if comm.rank:
    given_up(lambda: TransposePlan(x, y, "f8", other, backend=BACKEND, timeout=0.1))
plan.close()
print("the end")
""",
    "checked by one rank alone": """
with TransposePlan(x, y, "f8", comm, backend=BACKEND, timeout=0.5, check=True) as checked:
    if comm.rank:
        given_up(lambda: checked.run(a, b))
        refused(lambda: checked.run(a, b))
plan.close()
print("the end")
""",
    "finalized by hand": """
plan.run(a, b)
MPI.Finalize()
plan.close()
print("the end")
""",
}


# What one rank does alone is to agree with the others, before there is a transport.
CASES = [
    (name, backend)
    for name in PROGRAMS
    for backend in (("direct",) if "alone" in name else ("mpi_p2p", "mpi_a2a", "direct"))
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_processes_end(tmp_path, name, backend):
    """Neither a hang nor a crash in MPI_Finalize, whatever was left pending."""
    program = tmp_path / "program.py"
    program.write_text((HEAD + PROGRAMS[name]).replace("BACKEND", repr(backend)))
    done = launch(2, str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the end") == 2, done.stdout + done.stderr
