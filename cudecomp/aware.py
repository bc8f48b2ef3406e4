# SPDX-License-Identifier: Apache-2.0
"""Owns the question whether MPI takes addresses in device memory.

A wrong yes would crash the process, so a library's claim is put to the test in another process first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .launcher import environment_of_no_job
from .library import call_symbol

VARIABLE = "CUDECOMP_CUDA_AWARE_MPI"

TEST = """
from mpi4py import MPI
from cudecomp.cuda.memory import DeviceMemory
from cudecomp.cuda.runtime import copy, synchronize
n = 1 << 20
memory = DeviceMemory(2 * n)
host = bytearray(bytes(range(256)) * (n // 256))
address = MPI.memory.frombuffer(host).address
copy(memory.address, address, n)
send = MPI.memory.fromaddress(memory.address, n)
recv = MPI.memory.fromaddress(memory.address + n, n)
MPI.COMM_SELF.Sendrecv(send, 0, 7, recv, 0, 7)
back = bytearray(n)
copy(MPI.memory.frombuffer(back).address, memory.address + n, n)
synchronize()
print("moved" if back == host else "lost")
"""


def cuda_aware() -> tuple[bool, str]:
    """Return whether this process's MPI takes device addresses, and how that is known. Local; may start a process.

    CUDECOMP_CUDA_AWARE_MPI (1 or 0) stands for the claim of the MPI library where it is set. Otherwise the library is
    asked, by the standard's `mpi_memory_alloc_kinds` (MPI 4.1) or by MPIX_Query_cuda_support (Open MPI, MPICH).
    """
    claim, reason = _claim()
    if claim and not _moves_device_memory():
        return False, f"{reason}, but a test message between device buffers failed"
    return claim, reason


def _claim() -> tuple[bool, str]:
    told = os.environ.get(VARIABLE, "")
    if told in ("0", "1"):
        return told == "1", f"{VARIABLE}={told}"
    from mpi4py import MPI

    kinds = _memory_kinds(MPI)
    if "cuda" in kinds:
        return True, f"MPI lists the memory kinds {kinds}"
    if any(call_symbol(path, "MPIX_Query_cuda_support") == 1 for path in _mpi_libraries()):
        return True, "MPIX_Query_cuda_support says yes"
    return False, f"MPI does not say that it is CUDA-aware ({VARIABLE}=1 claims it)"


def _memory_kinds(MPI: Any) -> str:
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""
    finally:
        info.Free()


def _mpi_libraries() -> set[str]:
    """Return the paths of the MPI libraries that are loaded into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if Path(path).name.startswith("libmpi")}


def _moves_device_memory() -> bool:
    """Send between two device buffers in a process of its own, which may crash."""
    command = [sys.executable, "-P", "-c", TEST]
    try:
        done = subprocess.run(
            command, env=environment_of_no_job(), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "moved" in done.stdout
