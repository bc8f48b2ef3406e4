# SPDX-License-Identifier: Apache-2.0
"""Times local permutations against a copy of the same bytes; one process, no MPI.

    python bench/pack.py --shape 256 --items 4 8 16

Without options: all 36 pairs of memory orders of a cube, for items of 4, 8 and 16 bytes. The plan moves an array from
one memory order to another one on one rank, which is what the kernels do to every message. `--numpy` puts NumPy's
assignment of the transposed view beside it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cudecomp import Pencil, ProcessGrid, TransposePlan

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure

# Items of these sizes; what is in them does not matter.
DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16", 12: "V12", 32: "V32"}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=int, nargs="+", default=[256], help="one number is a cube")
    add("--orders", nargs="+", help="pairs as in 012:201 (default: all)")
    add("--items", type=int, nargs="+", default=[4, 8, 16], choices=sorted(DTYPES), help="bytes of an item")
    add("--halo", type=int, default=0)
    add("--numpy", action="store_true", help="measure NumPy's own transposed copy as well")
    measure.add_options(parser)
    return parser.parse_args()


def pairs(options: argparse.Namespace, ndim: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the pairs of orders."""
    if options.orders:
        return [tuple(tuple(map(int, order)) for order in pair.split(":")) for pair in options.orders]
    return list(itertools.product(itertools.permutations(range(ndim)), repeat=2))


def measured(shape: tuple[int, ...], orders: Any, options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Time one pair of orders for all item sizes."""
    grid = ProcessGrid((1,) * (len(shape) - 1))
    src, dst = (Pencil(shape, grid, 0, order=order, halo=options.halo) for order in orders)
    seconds = {}
    for item in options.items:
        with TransposePlan(src, dst, DTYPES[item], device=device.name) as plan:
            a, b = plan.empty_src(), plan.empty_dst()
            for array in (a, b):
                device.touch(array)
            copy_from, copy_to = device.empty(prod(shape) * item), device.empty(prod(shape) * item)
            actions: dict[str, Callable[[], Any]] = {
                "copy": partial(device.copy, copy_to, copy_from),
                "plan": plan.bind(a, b).run,
            }
            if options.numpy:
                actions["numpy"] = partial(np.copyto, dst.interior(b, 0), src.interior(a, 0))
            budget = options.seconds / len(options.items)
            times = measure.rounds(device, measure.Alone(), actions, budget)
        seconds[str(item)] = measure.statistics_of(times)
    return {"orders": orders, "seconds": seconds}


def row(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return a line of the table."""
    ratios = [measure.ratios(one, options.statistic) for one in result["seconds"].values()]
    names = ["plan", "numpy"] if options.numpy else ["plan"]
    cells = [f"{ratio[name]:.2f}" for name in names for ratio in ratios]
    return [" to ".join(map(measure.digits, result["orders"])), *cells]


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    device = measure.DEVICES[options.device]()
    shape = tuple(options.shape * 3 if len(options.shape) == 1 else options.shape)
    results = []
    for orders in pairs(options, len(shape)):
        measure.progress(f"{len(results)} measured")
        results.append(measured(shape, orders, options, device))
    measure.progress("")
    print(f"Shape {shape} on {device.description()}: time of a local permutation over that of a copy of the same")
    print(f"bytes; {options.statistic} over the rounds.\n")
    head = [f"{item} bytes" for item in options.items] + [f"numpy, {i}" for i in options.items if options.numpy]
    print(measure.table(["orders", *head], [row(result, options) for result in results]))
    if options.json:
        measure.record(options.json, device, vars(options), results)


if __name__ == "__main__":
    main()
