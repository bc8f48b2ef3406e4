# SPDX-License-Identifier: Apache-2.0
"""Processes that ask what MPI can do are jobs of their own, whatever launcher started their parent."""

import subprocess
import sys

from cudecomp.launcher import environment_of_no_job

ASK = "from mpi4py import MPI; MPI.COMM_SELF.sendrecv(0, 0, source=0); print(MPI.COMM_WORLD.size)"


def test_a_child_is_no_rank(comm, verdict):
    command = [sys.executable, "-P", "-c", ASK]
    done = subprocess.run(command, env=environment_of_no_job(), capture_output=True, text=True, timeout=60, check=False)
    verdict([] if done.stdout.strip() == "1" else [f"{done.returncode} {done.stdout} {done.stderr}"])
