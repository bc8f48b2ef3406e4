# SPDX-License-Identifier: Apache-2.0
"""Times the ways of launching the packs of one rank, from the call to the last message started; one process, one GPU.

    python bench/launch.py --ranks 4 64 1024 --json launch.json --plot launch.png

The rank is number 0 of P in a grid (1, P) and sends to the P - 1 others. P = 4 is the transpose from axis 1 to axis 2
of the array that a geometry is named after. With more ranks the rank's own array keeps its size: axis 2 grows with P,
axis 1 is at least 8 P, and axis 0 shrinks by as much as axis 1 has grown. "fixed" keeps the global array instead and
takes a square grid. Nothing is skipped where a message could leave from the array itself.

Real persistent requests of 1 KiB to this process itself stand for the messages, so that only starting them counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from cudecomp import Pencil, ProcessGrid
from cudecomp.boxes import compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Copy

# Also where PYTHONSAFEPATH keeps the folder of the program out.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from ways import DEVICES, Messages, Packing, Way, fill, verify

clock = time.perf_counter_ns

LEAST_PART = 8  # extent along axis 1 of a message
POLLS = 1 << 16  # between two looks at whether the device has failed
FEWEST, MOST = 9, 500  # rounds


class Case(NamedTuple):
    """An item and the memory orders of the two pencils; None is the identity."""

    dtype: str
    src_order: Any
    dst_order: Any


# A message of "whole" is one contiguous piece of the source, one of "runs" many; "permuted" changes the fastest axis.
CASES = {
    "f8 whole": Case("f8", (1, 0, 2), (1, 0, 2)),
    "f8 runs": Case("f8", None, None),
    "c16 permuted": Case("c16", "contiguous", "contiguous"),
}

GEOMETRIES = {"512^3": (512, 512, 512), "2048 x 512 x 512": (2048, 512, 512), "fixed 512^3": (512, 512, 512)}


def pencils(geometry: str, ranks: int, case: Case, shrink: int = 1) -> tuple[Pencil, Pencil]:
    """Return the source and destination pencils of a geometry for this many ranks, its extents divided by `shrink`."""
    n0, n1, n2 = (n // shrink for n in GEOMETRIES[geometry])
    grid = (1, ranks)
    if geometry.startswith("fixed"):
        grid = (isqrt(ranks), ranks // isqrt(ranks))
    else:
        wide = max(n1, LEAST_PART * ranks)
        n0, n1, n2 = max(1, n0 * n1 // wide), wide, max(1, n2 // 4) * ranks
    src = Pencil((n0, n1, n2), ProcessGrid(grid), 1, order=case.src_order)
    return src, src.pencil(2, order=case.dst_order)


# --- times -----------------------------------------------------------------------------------------------------------
# All in nanoseconds from before the call, by name.


def time_end(device: Any, way: Way) -> dict[str, int]:
    """Launch and wait for the stream: `host`, until the call returns, and `done`."""
    way.begin()
    device.synchronize()
    start = clock()
    way.launch()
    returned = clock()
    device.synchronize()
    return {"host": returned - start, "done": clock() - start}


def time_watched(device: Any, way: Way, count: int) -> dict[str, int]:
    """Launch and watch: `first` and `last`, when the host has seen the first segments complete, and all of them."""
    way.begin()
    device.synchronize()
    start = clock()
    way.launch()
    watch(device, way.signal.any)
    first = clock()
    done = 0
    while done < count:
        done = way.signal.ready(done)
    last = clock()
    device.synchronize()
    return {"first": first - start, "last": last - start}


def time_messages(device: Any, way: Way, messages: Messages) -> dict[str, int]:
    """Launch and start each message once it is packed: `started`, when the last one is."""
    messages.start(messages.recvs)
    way.begin()
    device.synchronize()
    sent, count, sends = 0, len(messages.sends), messages.sends
    start = clock()
    way.launch()
    while sent < count:
        done = way.signal.ready(sent)
        if done > sent:
            messages.start(sends[sent:done])
            sent = done
    started = clock()
    messages.wait()
    device.synchronize()
    return {"started": started - start}


def watch(device: Any, complete: Callable[[], bool]) -> None:
    """Wait until something is complete; raise if it never will be."""
    polls = 0
    while not complete():
        polls += 1
        if polls % POLLS == 0:
            device.check()


def rounds(
    device: Any, ways: dict[str, Way], pack: Packing, messages: Messages | None, seconds: float
) -> dict[str, dict[str, list[int]]]:
    """Take all times in turn, round after round, after one round that does not count.

    The first launch of a way in a round comes after a lot of other work, with cold caches of the CPU: `cold` is how
    long it keeps the host busy. All other times are those of launches that follow another one of the same way.
    """
    move = Way(partial(device.move, pack.dst, pack.src, pack.nbytes))
    taken: dict[str, dict[str, list[int]]] = {name: {} for name in ("copy", *ways)}
    deadline = 0.0
    for number in range(MOST + 1):
        for name, way in {"copy": move, **ways}.items():
            cold = time_end(device, way)["host"]
            found = {"cold": cold, **time_end(device, way)}
            if way.signal:
                found |= time_watched(device, way, pack.messages)
            if way.signal and messages:
                found |= time_messages(device, way, messages)
            for what, value in found.items():
                taken[name].setdefault(what, []).append(value)
        deadline = deadline or time.monotonic() + seconds
        if number >= FEWEST and time.monotonic() > deadline:
            break
    return {name: {what: values[1:] for what, values in found.items()} for name, found in taken.items()}


@contextmanager
def prepared(device: Any, src: Pencil, dst: Pencil, case: Case, mpi: bool) -> Iterator[Any]:
    """Give the packing, the ways and the messages of a case; free them afterwards."""
    with ExitStack() as stack:
        pack = Packing(device, src, dst, case.dtype)
        stack.callback(pack.close)
        messages = Messages(pack.messages) if mpi else None
        if messages:
            stack.callback(messages.close)
        yield pack, device.ways(pack), messages


def measured(device: Any, geometry: str, ranks: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time all ways of one case."""
    case = CASES[name]
    src, dst = pencils(geometry, ranks, case, options.shrink)
    with prepared(device, src, dst, case, not options.without_mpi) as (pack, ways, messages):
        pattern = fill(device, pack)
        wrong = [label for label, way in ways.items() if not verify(device, pack, way, pattern)]
        if wrong:
            raise SystemExit(f"bench/launch.py: {geometry}, {ranks} ranks, {name}: wrong bytes by {', '.join(wrong)}")
        times = rounds(device, ways, pack, messages, options.seconds)
        return {
            "geometry": geometry,
            "ranks": ranks,
            "case": name,
            "local_shape": src.shape(0),
            "message_shape": pack.schedule.pack[0][0].shape,
            "messages": pack.messages,
            "bytes": pack.nbytes,
            "rounds": len(times["copy"]["done"]),
            "microseconds": {
                way: {what: statistics.median(values) / 1e3 for what, values in found.items()}
                for way, found in times.items()
            },
        }


# --- the call itself -------------------------------------------------------------------------------------------------


def call_times(device: Any, launches: int = 64, repeats: int = 100) -> dict[str, float]:
    """Split the time of a launch from Python into that of the C call and the rest, in microseconds per call.

    `python` is a loop of Python over `launches` calls of PackProgram.run, each of one small segment; `compiled` is the
    same loop in compiled code, which leaves the C calls and next to nothing else. `empty` is a loop of Python over
    calls with an empty range, for which the C call returns at once: what is left is the cost of coming from Python.
    `loop` is the loop without a call. Medians over `repeats`, with an idle stream before each.
    """
    segments = [[Copy((128,), 0, 128 * i, (1,), 1, 128 * i, (1,))] for i in range(launches)]
    program = PackProgram(device.name, compile_copies(segments, 8), launches, 2)
    owners = [device.memory(1024 * launches) for _ in range(2)]
    table = AddressTable(2)
    table[0], table[1] = (address for _, address in owners)
    run, stream, numbers = program.run, device.stream, range(launches)

    def python() -> None:
        for i in numbers:
            run(table, i, i + 1, stream)

    def empty() -> None:
        for i in numbers:
            run(table, i, i, stream)

    def loop() -> None:
        for _ in numbers:
            pass

    loops = {"python": python, "empty": empty, "loop": loop, "compiled": device.launch_loop(program, table)}
    found = {
        name: statistics.median(time_end(device, Way(action))["host"] for _ in range(repeats)) / 1e3 / launches
        for name, action in loops.items()
        if action
    }
    program.close()
    return found


def python_share(calls: dict[str, float]) -> float:
    """Return the microseconds that coming from Python adds to a C call."""
    return calls["empty"] - calls["loop"]


# --- output ----------------------------------------------------------------------------------------------------------

COLUMNS = ("cold", "host", "first", "last", "started", "done")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table for one number of ranks."""
    times, lines = result["microseconds"], []
    for way, found in times.items():
        figures = [f"{found[column]:.1f}" if column in found else "-" for column in COLUMNS]
        each = "-" if way == "copy" else f"{found['host'] / result['messages']:.2f}"
        lines.append([str(result["ranks"]), way, *figures, each, f"{found['done'] / times['copy']['done']:.3f}"])
    return lines


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the results of one geometry and case."""
    one = results[0]
    sizes = sorted({result["bytes"] >> 10 for result in results})
    print(f"\n## {one['geometry']}, {one['case']}: {' to '.join(str(n) for n in {sizes[0], sizes[-1]})} KiB packed\n")
    head = ["P", "way", *COLUMNS, "host / N", "done / copy"]
    print(measure.table(head, [row for result in results for row in rows(result)]), flush=True)


def print_calls(calls: dict[str, float]) -> None:
    """Print what a launch consists of."""
    print("\n## One launch, microseconds per call in a loop\n")
    print(measure.table(list(calls), [[f"{value:.3f}" for value in calls.values()]]))
    more = f", {calls['python'] - calls['compiled']:.2f} (python - compiled)" if "compiled" in calls else ""
    print(f"\nComing from Python adds {python_share(calls):.2f} us to a C call (empty - loop){more}.")


def summary(results: list[dict[str, Any]], calls: dict[str, float]) -> list[list[str]]:
    """Return the figures that matter most, a line per result."""
    lines = []
    for result in results:
        times, count = result["microseconds"], result["messages"]
        fused, copy, plain = times["fused"], times["copy"]["done"], times["fused, no flags"]["done"]
        line = [f"{result['geometry']}, {result['case']}", str(result["ranks"])]
        line += [f"{fused['host'] - python_share(calls):.1f}", f"{fused['first']:.1f}", f"{fused['done'] / copy:.3f}"]
        line.append(f"{fused['done'] / plain:.3f}")
        for signal in ("events", "flags"):
            pair = [times.get(f"{way}, {signal}", {}).get("host") for way in ("per_peer", "per_peer graph")]
            line.append("-" if None in pair else f"{pair[0] / count:.2f} / {pair[1] / count:.2f}")
        lines.append(line)
    return lines


def print_summary(results: list[dict[str, Any]], calls: dict[str, float]) -> None:
    """Print a line per result."""
    print("\n## fused, and graphs beside plain launches\n")
    head = ["case", "P", "C call", "first", "done / copy", "with / without flags"]
    print(measure.table([*head, "host / N, events: plain / graph", "flags"], summary(results, calls)))


def plot(path: str, results: list[dict[str, Any]]) -> None:
    """Draw the time to the first chunk and the host's time over the number of ranks, a row per geometry."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    geometries = list(dict.fromkeys(result["geometry"] for result in results))
    titles = {"first": "first chunk seen by the host", "host": "host is busy launching"}
    figure, axes = pyplot.subplots(len(geometries), 2, figsize=(11, 4 * len(geometries)), squeeze=False)
    for geometry, pair in zip(geometries, axes, strict=True):
        found = [result for result in results if result["geometry"] == geometry]
        found = [result for result in found if result["case"] == found[0]["case"]]
        for axis, (column, title) in zip(pair, titles.items(), strict=True):
            for way in found[0]["microseconds"]:
                points = [(result["ranks"], result["microseconds"][way].get(column)) for result in found]
                if "first" in found[0]["microseconds"][way]:
                    axis.loglog(*zip(*points, strict=True), marker="o", label=way)
            axis.set(title=f"{geometry}, {found[0]['case']}: {title}", xlabel="ranks P", ylabel="microseconds")
            ranks = [result["ranks"] for result in found]
            axis.set_xticks(ranks, labels=map(str, ranks))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        pair[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="cuda", help="host only tries the program out")
    add("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096])
    add("--geometries", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES))
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add("--seconds", type=float, default=0.5, help="for each number of ranks and case")
    add("--shrink", type=int, default=1, metavar="N", help="divide the extents of all geometries by N")
    add("--quick", action="store_true", help="P = 4, 64, 1024 of 512^3 alone, for a shorter time")
    add("--without-mpi", action="store_true", help="start no messages")
    add("--json", metavar="FILE", help="write everything to a file")
    add("--plot", metavar="FILE.png", help="draw times over P (needs matplotlib)")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.geometries, options.seconds = [4, 64, 1024], ["512^3"], min(options.seconds, 0.2)
    if min(options.ranks) < 4:
        parser.error(f"--ranks: got {min(options.ranks)}, expected at least 4")
    return options


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    device = DEVICES[options.device]()
    print(f"Launching the packs of one rank of P on {device.description()}: medians, microseconds from the call.")
    print(
        "host: until the call returns (cold: after other work); first, last: completion seen by the host; started: the"
    )
    print("last of N = P - 1 messages (fixed: sqrt(P) - 1) is; done: the stream is synchronised, when nobody watches.")
    calls = call_times(device)
    print_calls(calls)
    results: list[dict[str, Any]] = []
    for geometry in options.geometries:
        for case in options.cases:
            measure.progress(f"{geometry}, {case}")
            found = [measured(device, geometry, ranks, case, options) for ranks in options.ranks]
            measure.progress("")
            print_table(found)
            results += found
    print_summary(results, calls)
    if options.json:
        measure.record(options.json, device, vars(options), [{"calls": calls}, *results])
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
