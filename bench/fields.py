# SPDX-License-Identifier: Apache-2.0
"""Times several fields in one exchange against as many transposes one after the other; knows plans from outside.

    mpiexec -n 2 python bench/fields.py --sizes 64 128 192 256 384

Without options: three fields of float64, transposes 0 to 1 and 1 to 2 on every process grid that exchanges data there,
in default and contiguous orders, by every transport. Plans of which a graph holds the whole operation are also
replayed. docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from cudecomp import TransposePlan, Workspace
from cudecomp.transports import BACKENDS

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from ranks import MpiRanks, course
from transpose import Case, cases, ways


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[64, 128, 192, 256, 384], help="of cubes")
    add("--fields", type=int, default=3)
    add("--grid", type=int, nargs="+", action="append", help="process grid; may be repeated (default: all of them)")
    add("--axes", nargs="+", default=["0:1", "1:2"], help="transposes, as in 0:1 1:2")
    add("--orders", nargs="+", default=["default", "contiguous"], help="as for transpose.py")
    add("--dtype", default="float64")
    add("--transports", nargs="+", help="default: all that the device has")
    add("--launches", nargs="+", default=["fused", "fused+graph"],
        help="on a GPU: a launch of TransposePlan, with +graph for automatic captures")  # fmt: skip
    measure.add_options(parser)
    options = parser.parse_args()
    options.transports = options.transports or list(BACKENDS[options.device])
    options.halo = 0
    return options


def sized_cases(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the exchanges asked for, in all sizes."""
    for size in options.sizes:
        options.shape = [size]
        for case in cases(options, MPI.COMM_WORLD.size):
            yield f"{size}^3, {case.name}", case


def measured(case: Case, options: argparse.Namespace, device: Any, comm: Any, workspace: Workspace) -> dict[str, Any]:
    """Time one exchange with all fields at once, and field by field; collective."""
    dtype, count = np.dtype(options.dtype), options.fields
    with ExitStack() as stack:
        nbytes = prod(case.src.shape(comm.rank)) * dtype.itemsize * count
        copy_from, copy_to = device.empty(nbytes), device.empty(nbytes)
        actions: dict[str, Callable[[], Any]] = {"copy": lambda: device.copy(copy_to, copy_from)}
        for name, way in ways(options).items():
            common = {"device": device.name, "workspace": workspace, **way}
            one = stack.enter_context(TransposePlan(*case, dtype, comm, **common))
            together = stack.enter_context(TransposePlan(*case, dtype, comm, fields=count, **common))
            pairs = [(one.empty_src(), one.empty_dst()) for _ in range(count)]
            for array in (array for pair in pairs for array in pair):
                device.touch(array)
            fields = [list(arrays) for arrays in zip(*pairs, strict=True)]
            actions[f"{name}, one by one"] = one_by_one([one.bind(*pair).run for pair in pairs])
            actions[f"{name}, at once"] = together.bind(*fields).run
            if one.capturable:
                actions[f"{name} replay, one by one"] = one_by_one([one.capture(*pair).replay for pair in pairs])
                actions[f"{name} replay, at once"] = together.capture(*fields).replay
        times = measure.rounds(device, MpiRanks(comm), actions, options.seconds)
    return {
        "case": case.name,
        "size": case.src.global_shape[0],
        "seconds": measure.statistics_of(times),
    }


def one_by_one(runs: list[Callable[[], Any]]) -> Callable[[], None]:
    """Return a function that calls others one after the other."""

    def run() -> None:
        for one in runs:
            one()

    return run


def row(result: dict[str, Any], names: list[str], statistic: str) -> list[str]:
    """Return a line of the table: per way, the ratios to copy, and that of all at once to one by one."""
    seconds = result["seconds"]
    ratio = measure.ratios(seconds, statistic)
    cells = []
    for name in names:
        apart, together = ratio[f"{name}, one by one"], ratio[f"{name}, at once"]
        cells += [f"{apart:.2f}", f"{together:.2f}", f"{together / apart:.2f}"]
    return [f"{result['size']}^3, {result['case']}", f"{1e3 * seconds['copy'][statistic]:.3f}", *cells]


def report(results: list[dict[str, Any]], options: argparse.Namespace, hardware: str, ranks: int) -> None:
    """Print the table."""
    timed = (name for result in results for name in result["seconds"] if name != "copy")
    names = list(dict.fromkeys(name.rpartition(", ")[0] for name in timed))
    print(f"{options.fields} fields of {options.dtype}, {ranks} ranks on {hardware}.")
    print("Copy of all in milliseconds; fields one by one and at once as multiples of it, and at once over one by one;")
    print(f"{options.statistic} over the rounds, of the slowest rank each.\n")
    head = [title for name in names for title in (f"{name}: apart", "at once", "ratio")]
    rows = [row(result, names, options.statistic) for result in results]
    print(measure.table(["size, grid, axes, orders", "copy", *head], rows))


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    course(options, sized_cases(options), measured, report)


if __name__ == "__main__":
    main()
