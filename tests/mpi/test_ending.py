# SPDX-License-Identifier: Apache-2.0
"""How processes end: programs of two ranks, started from a test of one rank, that leave plans in every bad state."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

LAUNCHER = Path(sys.executable).with_name("mpiexec")
LAUNCHER = str(LAUNCHER) if LAUNCHER.exists() else shutil.which("mpiexec")
# Variables by which launchers tell a process that it belongs to a job; the programs are jobs of their own.
INHERITED = ("PMI", "OMPI_COMM_WORLD", "OMPI_UNIVERSE", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIR_", "PRTE_", "SLURM_")

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.Get_size() > 1, reason="starts ranks of its own: once is enough, on 1 rank"),
    pytest.mark.skipif(LAUNCHER is None, reason="no mpiexec beside Python or on PATH"),
]

HEAD = """
import warnings
import numpy as np
from mpi4py import MPI
from cudecomp import Pencil, PoisonedError, ProcessGrid, TransposePlan
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
    "finalized by hand": """
plan.run(a, b)
MPI.Finalize()
plan.close()
print("the end")
""",
}


@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_a2a", "direct"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_end(tmp_path, name, backend):
    """Neither a hang nor a crash in MPI_Finalize, whatever was left pending."""
    program = tmp_path / "program.py"
    program.write_text(HEAD.replace("BACKEND", repr(backend)) + PROGRAMS[name])
    env = {key: value for key, value in os.environ.items() if not key.startswith(INHERITED)}
    command = [LAUNCHER, "-n", "2", sys.executable, str(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the end") == 2, done.stdout + done.stderr
