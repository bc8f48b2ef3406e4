# SPDX-License-Identifier: Apache-2.0
"""Owns how tests start programs of several ranks; knows nothing of what these do."""

import shutil
import subprocess
import sys
from pathlib import Path

from cudecomp.launcher import environment_of_no_job

LAUNCHER = Path(sys.executable).with_name("mpiexec")
LAUNCHER = str(LAUNCHER) if LAUNCHER.exists() else shutil.which("mpiexec")


def launch(ranks, *arguments, options=(), timeout=30, **more):
    """Run Python with `arguments` on several ranks, as a job of its own; return the completed process."""
    command = [LAUNCHER, *options, "-n", str(ranks), sys.executable, *arguments]
    env = environment_of_no_job() | {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False, **more)
