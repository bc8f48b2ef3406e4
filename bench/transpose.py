# SPDX-License-Identifier: Apache-2.0
"""Times transposes between processes against a copy of the same local bytes by all ranks; knows plans from outside.

    mpiexec -n 2 python bench/transpose.py --shape 256 --dtype complex128

Without options: every transpose between neighbouring axes that moves data between ranks, on every process grid, in
default and contiguous orders, by every transport. Beside them stand Alltoallw over subarrays, and mpi4py-fft where it
is installed. `--orders all` takes all pairs of orders; docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from cudecomp import Exchange, Pencil, ProcessGrid, TransposePlan, Workspace
from cudecomp.transports import BACKENDS

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from baselines import BASELINES
from ranks import MpiRanks, course

QUEUE = 100  # replays one behind the other


class Case(NamedTuple):
    """One exchange."""

    src: Pencil
    dst: Pencil

    @property
    def name(self) -> str:
        """Grid, axes and orders in short."""
        src, dst = self.src, self.dst
        grid = "x".join(map(str, src.grid.shape))
        return f"{grid} {src.axis}-{dst.axis} {measure.digits(src.order)}-{measure.digits(dst.order)}"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=int, nargs="+", default=[256], help="global shape; one number is a cube")
    add("--grid", type=int, nargs="+", action="append", help="process grid; may be repeated (default: all of them)")
    add("--axes", nargs="+", help="transposes, as in 0:1 1:2 0:2 (default: all between neighbours)")
    add("--orders", nargs="+", default=["default", "contiguous"],
        help="default, contiguous, all, or pairs as in 012:201")  # fmt: skip
    add("--dtype", default="complex128")
    add("--halo", type=int, default=0)
    add("--fields", type=int, default=1)
    add("--inplace", action="store_true")
    add("--transports", nargs="+", help="default: all that the device has")
    add("--launches", nargs="+", default=["fused", "fused+graph", "per_peer", "per_peer+graph"],
        help="on a GPU: a launch of TransposePlan, with +graph for automatic captures, +replay for explicit ones, "
             "+queue for many replays one behind the other, of which the time of one is given")  # fmt: skip
    add("--baselines", nargs="*", default=list(BASELINES), help=f"of {', '.join(BASELINES)}; nothing for none")
    measure.add_options(parser)
    options = parser.parse_args()
    options.transports = options.transports or list(BACKENDS[options.device])
    return options


def layout(options: argparse.Namespace, size: int) -> tuple[tuple[int, ...], list[Any]]:
    """Return the global shape and the process grids asked for."""
    shape = tuple(options.shape * 3 if len(options.shape) == 1 else options.shape)
    every = itertools.product(range(1, size + 1), repeat=len(shape) - 1)
    return shape, options.grid or [grid for grid in every if prod(grid) == size]


def cases(options: argparse.Namespace, size: int) -> Iterator[Case]:
    """Yield the exchanges asked for, without those in which no rank needs another one."""
    shape, grids = layout(options, size)
    ndim = len(shape)
    if options.axes:
        pairs = [tuple(map(int, pair.split(":"))) for pair in options.axes]
    else:
        steps = [(axis, axis + 1) for axis in range(ndim - 1)]
        pairs = steps + [(b, a) for a, b in reversed(steps)]
    for grid, (a, b) in itertools.product(grids, pairs):
        for orders in order_pairs(options.orders, ndim):
            src, dst = (
                Pencil(shape, ProcessGrid(tuple(grid), size), axis, order=order, halo=options.halo)
                for axis, order in zip((a, b), orders, strict=True)
            )
            if size == 1 or any(message.peer != 0 for message in Exchange(src, dst, 0).sends):
                yield Case(src, dst)


def order_pairs(names: list[str], ndim: int) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of orders behind the names."""
    for name in names:
        if name == "all":
            yield from itertools.product(itertools.permutations(range(ndim)), repeat=2)
        elif name in ("default", "contiguous"):
            yield (None, None) if name == "default" else (name, name)
        else:
            yield tuple(tuple(map(int, order)) for order in name.split(":"))


def measured(case: Case, options: argparse.Namespace, device: Any, comm: Any, workspace: Workspace) -> dict[str, Any]:
    """Time one exchange by all transports and baselines; collective."""
    dtype = np.dtype(options.dtype)
    with ExitStack() as stack:
        keywords = {"fields": options.fields, "inplace": options.inplace, "workspace": workspace}
        plans = {
            name: stack.enter_context(TransposePlan(*case, dtype, comm, device=device.name, **way, **keywords))
            for name, way in ways(options).items()
        }
        # Any transport takes the arrays of the direct one, which needs its own.
        plan = next((plan for plan in plans.values() if plan.backend == "direct"), next(iter(plans.values())))
        src = plan.empty_src()
        arrays = (src,) if options.inplace else (src, plan.empty_dst())
        for array in arrays:
            device.touch(array)
        copy_from = device.empty(prod(case.src.shape(comm.rank)) * dtype.itemsize * options.fields)
        copy_to = device.empty(copy_from.nbytes)
        actions = {"copy": lambda: device.copy(copy_to, copy_from)}
        # Calls on bound arrays: what a solver's loop does. With graphs they are captured at the first one.
        actions |= {name: action_of(name, plan, arrays) for name, plan in plans.items()}
        for name in baselines_of(case, options):
            baseline = BASELINES[name](*case, dtype, comm, *arrays)
            stack.callback(baseline.close)
            actions[name] = baseline.run
        times = measure.rounds(device, MpiRanks(comm), actions, options.seconds)
        times |= {name: [t / QUEUE for t in found] for name, found in times.items() if name.endswith("+queue")}
        said = [line for plan in plans.values() for line in plan.explain().splitlines()]
    return {
        "transports": [line for line in said if line.startswith("transport ")],
        "case": case.name,
        "grid": case.src.grid.shape,
        "axes": (case.src.axis, case.dst.axis),
        "orders": (case.src.order, case.dst.order),
        "seconds": measure.statistics_of(times),
    }


def action_of(name: str, plan: TransposePlan, arrays: tuple[Any, ...]) -> Callable[[], None]:
    """Return what is timed."""
    if name.endswith("+replay"):
        return plan.capture(*arrays).replay
    if name.endswith("+queue"):
        call = plan.capture(*arrays)
        return lambda: [call.replay() for _ in range(QUEUE)] and None
    return plan.bind(*arrays).run


def ways(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what is compared, by name: transports, on a GPU each with all launches asked for."""
    if options.device == "host":
        return {name: {"backend": name} for name in options.transports}
    found = {}
    for backend, launch in itertools.product(options.transports, options.launches):
        name, _, graph = launch.partition("+")
        found[f"{backend} {launch}"] = {"backend": backend, "launch": name, "graphs": graph == "graph"}
    return found


def baselines_of(case: Case, options: argparse.Namespace) -> list[str]:
    """Return the baselines that can do this."""
    if options.inplace or options.fields > 1 or options.device != "host":
        return []
    return [name for name in options.baselines if BASELINES[name].can(*case)]


def row(result: dict[str, Any], names: list[str], statistic: str) -> list[str]:
    """Return a line of the table."""
    seconds = result["seconds"]
    ratio = measure.ratios(seconds, statistic)
    return [
        result["case"],
        f"{1e3 * seconds['copy'][statistic]:.2f}",
        *(f"{ratio[name]:.2f}" if name in ratio else "" for name in names),
    ]


def report(results: list[dict[str, Any]], options: argparse.Namespace, hardware: str, ranks: int) -> None:
    """Print the table."""
    names = [*ways(options), *(n for n in options.baselines if any(n in r["seconds"] for r in results))]
    print(f"{options.dtype}, shape {options.shape}, {ranks} ranks on {hardware}. Copy in milliseconds,")
    print(f"transposes as multiples of it; {options.statistic} over the rounds, of the slowest rank each.\n")
    rows = [row(result, names, options.statistic) for result in results]
    print(measure.table(["grid, axes, orders", "copy", *names], rows))
    print("", *dict.fromkeys(line for result in results for line in result["transports"]), sep="\n")


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    course(options, ((case.name, case) for case in cases(options, MPI.COMM_WORLD.size)), measured, report)


if __name__ == "__main__":
    main()
