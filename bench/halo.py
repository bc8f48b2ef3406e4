# SPDX-License-Identifier: Apache-2.0
"""Times halo updates between processes against a copy of the bytes that they fill; knows plans from outside.

    mpiexec -n 2 python bench/halo.py --shape 256 --widths 1 2 3

Without options: periodic updates of each axis by itself and of all axes in one step, with halos of one to three cells
on all axes, on every process grid, for pencils of the first and the last axis, by every transport. On a GPU, plans of
which a graph holds the whole operation are also replayed. docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from cudecomp import HaloPlan, Pencil, ProcessGrid, Workspace
from cudecomp.halo import halo_exchange
from cudecomp.transports import BACKENDS

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from ranks import MpiRanks, course
from transpose import layout, ways


class Case(NamedTuple):
    """One update: the halos of `axes` of a pencil."""

    pencil: Pencil
    axes: tuple[int, ...]

    def name(self) -> str:
        """Grid, order, width and axes in short; an axis that no rank shares with another one is in brackets."""
        pencil = self.pencil
        grid = "x".join(map(str, pencil.grid.shape))
        axes = " ".join(f"{axis}" if pencil.parts(axis) > 1 else f"({axis})" for axis in self.axes)
        return f"{grid} {measure.digits(pencil.order)} width {pencil.halo[0][0]}: {axes}"

    def items(self, rank: int) -> int:
        """Return how many cells the update fills on a rank."""
        exchange = halo_exchange(self.pencil, rank, (True,) * self.pencil.ndim, self.axes)
        return sum(message.items for message in exchange.recvs)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=int, nargs="+", default=[256], help="global shape; one number is a cube")
    add("--grid", type=int, nargs="+", action="append", help="process grid; may be repeated (default: all of them)")
    add("--pencils", type=int, nargs="+", help="axes of the pencils (default: the first and the last)")
    add("--axes", nargs="+", help='what is updated, as in 0 1 012 (default: each axis, and "all")')
    add("--widths", type=int, nargs="+", default=[1, 2, 3])
    add("--order", nargs="+", default=["default"], help="default, contiguous, or orders as in 201")
    add("--dtype", default="float64")
    add("--fields", type=int, default=1)
    add("--transports", nargs="+", help="default: all that the device has")
    add("--launches", nargs="+", default=["fused", "fused+graph", "per_peer", "per_peer+graph"],
        help="on a GPU: a launch of HaloPlan, with +graph for automatic captures")  # fmt: skip
    measure.add_options(parser)
    options = parser.parse_args()
    options.transports = options.transports or list(BACKENDS[options.device])
    return options


def cases(options: argparse.Namespace, size: int) -> Iterator[Case]:
    """Yield the updates asked for."""
    shape, grids = layout(options, size)
    ndim = len(shape)
    everything = tuple(range(ndim))
    names = options.axes or [*map(str, everything), "all"]
    updates = [everything if name == "all" else tuple(map(int, name)) for name in names]
    for grid, axis, order in itertools.product(grids, options.pencils or (0, ndim - 1), options.order):
        named = {"default": None, "contiguous": "contiguous"}
        memory = named[order] if order in named else tuple(map(int, order))
        for width, axes in itertools.product(options.widths, updates):
            yield Case(Pencil(shape, ProcessGrid(tuple(grid), size), axis, order=memory, halo=width), axes)


def measured(case: Case, options: argparse.Namespace, device: Any, comm: Any, workspace: Workspace) -> dict[str, Any]:
    """Time one update by all transports; collective."""
    dtype = np.dtype(options.dtype)
    keywords = {"periods": True, "axes": case.axes, "fields": options.fields, "workspace": workspace}
    with ExitStack() as stack:
        plans = {
            name: stack.enter_context(HaloPlan(case.pencil, dtype, comm, device=device.name, **way, **keywords))
            for name, way in ways(options).items()
        }
        # An array for each: writes of peers would move the lines of a common one to other cores.
        arrays = {name: plan.empty_src() for name, plan in plans.items()}
        for array in arrays.values():
            device.touch(array)
        nbytes = case.items(comm.rank) * dtype.itemsize * options.fields
        copy_from, copy_to = device.empty(nbytes), device.empty(nbytes)
        actions: dict[str, Callable[[], Any]] = {"copy": lambda: device.copy(copy_to, copy_from)}
        for name, plan in plans.items():
            actions[name] = plan.bind(arrays[name]).run
            if plan.capturable:
                actions[f"{name} replay"] = plan.capture(arrays[name]).replay
        times = measure.rounds(device, MpiRanks(comm), actions, options.seconds)
        said = [line for plan in plans.values() for line in plan.explain().splitlines()]
    return {
        "transports": [line for line in said if line.startswith(("transport ", "rewrites: "))],
        "case": case.name(),
        "grid": case.pencil.grid.shape,
        "order": case.pencil.order,
        "width": case.pencil.halo[0][0],
        "axes": case.axes,
        "bytes": nbytes,
        "seconds": measure.statistics_of(times),
    }


def row(result: dict[str, Any], names: list[str], statistic: str) -> list[str]:
    """Return a line of the table."""
    seconds = result["seconds"]
    ratio = measure.ratios(seconds, statistic)
    return [
        result["case"],
        f"{result['bytes'] / 1024:.0f}",
        f"{1e6 * seconds['copy'][statistic]:.0f}",
        *(f"{ratio[name]:.1f} ({1e6 * seconds[name][statistic]:.0f})" if name in ratio else "" for name in names),
    ]


def report(results: list[dict[str, Any]], options: argparse.Namespace, hardware: str, ranks: int) -> None:
    """Print the table."""
    names = list(dict.fromkeys(name for r in results for name in r["seconds"] if name != "copy"))
    print(f"{options.dtype}, shape {options.shape}, {options.fields} fields, {ranks} ranks on", end=" ")
    print(f"{hardware}. Bytes filled in KiB, a copy of")
    print("as many in microseconds; updates as multiples of it, and in microseconds in brackets;")
    print(f"{options.statistic} over the rounds, of the slowest rank each. Axes in brackets are not cut.\n")
    rows = [row(result, names, options.statistic) for result in results]
    print(measure.table(["grid, order, width: axes", "KiB", "copy", *names], rows))
    lines = (line for result in results for line in result["transports"] if line.startswith("transport "))
    print("", *dict.fromkeys(lines), sep="\n")


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    course(options, ((case.name(), case) for case in cases(options, MPI.COMM_WORLD.size)), measured, report)


if __name__ == "__main__":
    main()
