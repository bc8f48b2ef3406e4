# SPDX-License-Identifier: Apache-2.0
"""Owns how the tests run: on the installed package, serially or on every rank; knows nothing of what they check."""

import importlib.metadata
import io
import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
RANK = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)

# The source folder has no compiled modules. Tests and the programs they start see the installed package alone.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"

# No deadline: the machine may be shared. A failing example is printed so that it can be pasted.
hypothesis.settings.register_profile("cudecomp", deadline=None, print_blob=True)
hypothesis.settings.load_profile("cudecomp")

held_back = io.StringIO()
status = 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Rank 0 reports; what the others have to say is printed at the end, where they have failed."""
    try:
        importlib.metadata.version("cudecomp")
    except importlib.metadata.PackageNotFoundError:
        pytest.exit("cudecomp is not installed in this environment: pip install '.[test]', or make test", 2)
    if any(name in os.environ for name in RANK_VARIABLES) and config.option.basetemp is None:
        # Pytest's own folders are numbered and cleaned up, and ranks that do so at once trip over each other.
        folder = tempfile.TemporaryDirectory(prefix="cudecomp-test-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = folder.name
    if RANK > 0:
        sys.stdout = held_back


def pytest_sessionfinish(exitstatus):
    global status
    status = int(exitstatus)


def pytest_unconfigure():
    sys.stdout = sys.__stdout__
    if RANK > 0 and status:
        print(f"== rank {RANK}\n{held_back.getvalue()}", flush=True)


def pytest_report_header():
    import cudecomp
    from cudecomp import _build

    cuda = f"CUDA {_build.CUDA_VERSION} ({', '.join(_build.CUDA_ARCHITECTURES)})" if _build.CUDA else "no CUDA"
    return f"cudecomp: {_build.VERSION}, {cuda}, {Path(cudecomp.__file__).parent}"


def pytest_ignore_collect(collection_path, config):
    """Modules of tests/mpi start MPI when they are imported: a serial run must not even look at them."""
    if collection_path == ROOT / "tests" / "mpi" and "not mpi" in config.option.markexpr:
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A rank that waits for another never returns to the interpreter, so that only a thread can end it."""
    for item in items:
        if ROOT / "tests" / "mpi" in item.path.parents:
            item.add_marker(pytest.mark.mpi)
        if item.get_closest_marker("mpi") and not item.get_closest_marker("timeout"):
            seconds = float(item.config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds, method="thread"))
