# SPDX-License-Identifier: Apache-2.0
"""Owns the course of a benchmark that runs on all ranks: measure cases, report on rank 0; knows nothing of cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import measure
from mpi4py import MPI

from cudecomp import Workspace


class MpiRanks:
    """A communicator as `measure` uses it."""

    def __init__(self, comm: MPI.Intracomm):
        self.rank, self.size = comm.rank, comm.size
        self.barrier, self.allgather = comm.barrier, comm.allgather


def course(
    options: argparse.Namespace,
    cases: Iterable[tuple[str, Any]],
    measured: Callable[[Any, argparse.Namespace, Any, MPI.Intracomm, Workspace], dict[str, Any]],
    report: Callable[[list[dict[str, Any]], argparse.Namespace, str, int], None],
) -> None:
    """Measure all cases (name, case), print the report and write the file; collective over COMM_WORLD.

    `report` gets the results, the options, the hardware in words, and the number of ranks.
    """
    comm = MPI.COMM_WORLD
    device = measure.DEVICES[options.device]()
    workspace = Workspace(comm, device.name)
    results = []
    for name, case in cases:
        if comm.rank == 0:
            measure.progress(f"{len(results)} measured, now {name}")
        results.append(measured(case, options, device, comm, workspace))
    if comm.rank != 0:
        return
    measure.progress("")
    if not results:
        print("no exchange to measure: no rank needs data of another one")
        return
    report(results, options, device.description(), comm.size)
    if options.json:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        measure.record(options.json, device, {**vars(options), "ranks": comm.size}, results, mpi=library)
