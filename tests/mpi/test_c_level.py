# SPDX-License-Identifier: Apache-2.0
"""The C level under MPI: a downstream module runs plans and calls on all ranks, with every transport."""

import importlib.util

import numpy as np
import pytest
from mpi4py import MPI
from test_downstream import HERE, build

import cudecomp
from cudecomp import testing as reference
from cudecomp.comm import attempt


@pytest.fixture(scope="module")
def downstream(tmp_path_factory):
    """The downstream module: rank 0 builds it, all import it."""
    comm, module, problem = MPI.COMM_WORLD, None, None
    if comm.rank == 0:
        source = HERE / "downstream" / "downstream.pyx"
        module, problem = attempt(lambda: build(source, tmp_path_factory.mktemp("c")))
    path, problem = comm.bcast((getattr(module, "__file__", None), problem and repr(problem)))
    if problem is not None:  # on all ranks, which would wait for rank 0 otherwise
        pytest.fail(problem)
    if comm.rank == 0:
        return module
    spec = importlib.util.spec_from_file_location("downstream", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
def test_there_and_back(comm, verdict, downstream, backend):
    grid = cudecomp.ProcessGrid((0, 1), comm.size)
    x = cudecomp.Pencil((9, 8, 7), grid, 0, halo=1)
    y = x.pencil(1, order=(2, 0, 1))
    a, b = reference.fill(x, comm.rank, np.float64), reference.poisoned(y, comm.rank, np.float64)
    with cudecomp.TransposePlan(x, y, np.float64, comm, backend=backend) as plan, plan.reverse() as back:
        loop = downstream.Loop(plan, plan.capture(a, b), back.capture(b, a))
        loop.there_and_back(5)
        loop.replay(5)
        loop.run_addresses(a.ctypes.data, b.ctypes.data)
    verdict([text for text in (reference.mismatch(x, comm.rank, a), reference.mismatch(y, comm.rank, b)) if text])
