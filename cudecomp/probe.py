# SPDX-License-Identifier: Apache-2.0
"""Owns the facts about this installation and machine; what may hang or crash is asked in a process of its own.

It knows nothing of plans, and never imports MPI or CUDA into the process that asks.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from . import _build
from .aware import cuda_aware
from .launcher import environment_of_no_job
from .memory import bindings_problem
from .transports import BACKENDS

Facts = dict[str, Any]


def facts(timeout: float) -> Facts:
    """Return all facts, ready for JSON. Local; a question in a process of its own takes at most `timeout` seconds."""
    mpi = asked(mpi_facts, timeout)
    cuda = asked(cuda_facts, timeout)
    return {
        "versions": versions(),
        "build": {
            "cuda": _build.CUDA,
            "cuda_version": _build.CUDA_VERSION or None,
            "cuda_architectures": list(_build.CUDA_ARCHITECTURES),
        },
        "host": {"machine": platform.machine(), "system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
        "cuda": cuda,
        "mpi": mpi,
        "launcher": shutil.which("mpiexec") or shutil.which("mpiexec", path=os.path.dirname(sys.executable)),
        "transports": transports(mpi, cuda),
    }


def versions() -> dict[str, str | None]:
    """Return the version of each package that matters; None where it is not installed."""
    found: dict[str, str | None] = {"cudecomp": _build.VERSION, "python": platform.python_version()}
    for name in ("numpy", "mpi4py", "cuda-bindings", "cupy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def transports(mpi: Facts, cuda: Facts) -> list[dict[str, str]]:
    """Return for each transport and device whether it works here, and if not, why not."""
    rows = []
    for device, names in BACKENDS.items():
        missing = device_problem(device, cuda)
        for name in ("local", *names):
            problem = missing or (mpi["problem"] if name != "local" else None)
            note = {"local": "one process", "direct": "memory that ranks of one host share"}.get(name, how(device, mpi))
            rows.append(
                {"transport": name, "device": device, "works": "no" if problem else "yes", "why": problem or note}
            )
    return rows


def device_problem(device: str, cuda: Facts) -> str | None:
    """Return why no array can lie on a device, or None."""
    if device == "host":
        return None
    if not _build.CUDA:
        return "this build has no CUDA kernels"
    return cuda["problem"]


def how(device: str, mpi: Facts) -> str:
    """Return how MPI takes the memory of a device."""
    if device == "host" or mpi["problem"]:
        return "host memory"
    return "device memory" if mpi.get("cuda_aware") else "staged through pinned host memory"


def asked(question: Callable[[], Facts], timeout: float) -> Facts:
    """Return the answer of a function of this module, called in another process; `problem` says why there is none."""
    code = f"import json; from cudecomp import probe; print(); print(json.dumps(probe.{question.__name__}()))"
    # A child of a rank must not take itself for that rank.
    environment = environment_of_no_job()
    # Whatever folder the command was started from, the child finds the packages that this process found.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {timeout:g} s"}
    if child.returncode < 0:
        return {"problem": f"the process that asked was killed by signal {-child.returncode}"}
    lines = (child.stdout if child.returncode == 0 else child.stderr).split("\n")
    last = next((line for line in reversed(lines) if line.strip()), f"exit status {child.returncode}")
    try:
        return {"problem": None, **json.loads(last)}
    except ValueError:
        return {"problem": last.strip()}


def mpi_facts() -> Facts:
    """Return what the MPI library says of itself. Starts MPI in this process."""
    import mpi4py
    from mpi4py import MPI

    aware, why = cuda_aware()
    return {
        "library": " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split()),
        "standard": "{}.{}".format(*MPI.Get_version()),
        "mpi4py": os.path.dirname(mpi4py.__file__),
        "cuda_aware": aware,
        "cuda_aware_why": why,
    }


def cuda_facts() -> Facts:
    """Return the CUDA devices. Starts the CUDA driver in this process."""
    missing = bindings_problem()
    if missing is not None:
        return {"problem": missing}
    from cuda.bindings import runtime

    status, count = runtime.cudaGetDeviceCount()
    if status.value:
        return {"problem": f"cudaGetDeviceCount: {status.name}"}
    driver, version = runtime.cudaDriverGetVersion()
    found = []
    for device in range(count):
        status, properties = runtime.cudaGetDeviceProperties(device)
        if status.value:
            return {"problem": f"cudaGetDeviceProperties({device}): {status.name}"}
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": name, "compute_capability": capability, "bytes": properties.totalGlobalMem})
    return {"devices": found, "driver_cuda": f"{version // 1000}.{version % 1000 // 10}" if not driver.value else None}
