# SPDX-License-Identifier: Apache-2.0
"""Owns how the benchmarks take times, print and record them; knows nothing of what is measured.

Cases that are compared run in turn, round after round, so that a disturbance of the machine hits all of them. A round
of a case begins with a barrier and counts until the last rank is done. A copy of the same bytes is one of the cases.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Rounds end after so many, or sooner when their time is up, but not before FEWEST.
MOST_ROUNDS, FEWEST_ROUNDS = 1000, 3
PACKAGES = ("cudecomp", "numpy", "mpi4py", "mpi4py-fft")


class Host:
    """Memory and time on the host device: all that a benchmark needs to know of a device."""

    name = "host"

    def empty(self, nbytes: int) -> Any:
        """Return `nbytes` of memory whose pages are there."""
        return np.zeros(nbytes, np.uint8) + np.uint8(1)

    def touch(self, array: Any) -> None:
        """Write all of an array, so that its pages are there."""
        array.reshape(-1).view(np.uint8)[...] = 1

    def copy(self, dst: Any, src: Any) -> None:
        """Copy an array to another one, without gaps: what everything is compared with."""
        np.copyto(dst, src)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the time from the call of `action` until its work is done."""
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def description(self) -> str:
        """Return the hardware in words."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else platform.machine()}"


class Cuda:
    """The same on the GPU that is current. Times are the host's, until the stream is done."""

    name = "cuda"

    def __init__(self) -> None:
        from cudecomp.cuda import runtime
        from cudecomp.cuda.memory import DeviceArray

        self._runtime, self._array = runtime, DeviceArray
        # Constant data can be faster than any other.
        self._noise = np.random.default_rng(1).integers(0, 256, 16 << 20, np.uint8)

    def empty(self, nbytes: int) -> Any:
        """Return `nbytes` of device memory full of noise."""
        array = self._array((nbytes,), np.uint8)
        self.touch(array)
        return array

    def touch(self, array: Any) -> None:
        """Write noise all over an array."""
        address, done = array.memory.address, min(array.nbytes, self._noise.nbytes)
        self._runtime.copy(address, self._noise.__array_interface__["data"][0], done)
        while done < array.nbytes:  # what is there is written once more behind it
            n = min(done, array.nbytes - done)
            self._runtime.copy(address + done, address, n)
            done += n
        self._runtime.synchronize()

    def copy(self, dst: Any, src: Any) -> None:
        """Copy an array to another one on the device."""
        self._runtime.copy(dst.memory.address, src.memory.address, src.nbytes)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return the time from the call of `action` until the default stream is done."""
        start = time.perf_counter()
        action()
        self._runtime.synchronize()
        return time.perf_counter() - start

    def description(self) -> str:
        """Return the hardware in words."""
        driver, runtime = self._runtime.versions()
        return f"{self._runtime.device_name(self._runtime.current_device())}, CUDA driver {driver}, runtime {runtime}"


DEVICES = {Host.name: Host, Cuda.name: Cuda}


class Alone:
    """Stands in for a communicator where this process is alone, without MPI."""

    rank, size = 0, 1

    def barrier(self) -> None:
        """Wait for nobody."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return [value]


def rounds(device: Any, comm: Any, cases: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Run the cases in turn for about `seconds`, after one round that does not count; collective.

    Returns
    -------
    dict
        For each case its times in seconds, one per round: that of the slowest rank.
    """
    taken: dict[str, list[float]] = {name: [] for name in cases}
    deadline = None
    for number in range(MOST_ROUNDS + 1):
        for name, action in cases.items():
            comm.barrier()
            taken[name].append(device.seconds(action))
        deadline = deadline or time.monotonic() + seconds
        # Rank 0 decides; the others follow.
        if number >= FEWEST_ROUNDS and comm.allgather(time.monotonic() > deadline)[0]:
            break
    everywhere = comm.allgather({name: times[1:] for name, times in taken.items()})
    return {name: [max(times) for times in zip(*(one[name] for one in everywhere), strict=True)] for name in cases}


def statistics_of(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return per case the median, smallest and largest time in seconds, and the number of rounds."""
    return {
        name: {"median": statistics.median(t), "min": min(t), "max": max(t), "rounds": len(t)}
        for name, t in times.items()
    }


def ratios(seconds: Mapping[str, Mapping[str, float]], statistic: str, reference: str = "copy") -> dict[str, float]:
    """Return the time of each case over that of the reference: of medians, or of the smallest times."""
    return {name: values[statistic] / seconds[reference][statistic] for name, values in seconds.items()}


def progress(text: str) -> None:
    """Show a line that the next one overwrites, to someone who watches."""
    if sys.stderr.isatty():
        print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as a Markdown table with even columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part."""
    found = {"python": platform.python_version(), "system": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def record(path: str, device: Any, options: Mapping[str, Any], results: Sequence[Any], **more: str) -> None:
    """Write a JSON file: the results and all that is needed to understand them later."""
    text = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": device.description(),
        "versions": {**versions(), **more},
        "options": dict(options),
        "results": list(results),
    }
    Path(path).write_text(json.dumps(text, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have."""
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), default="host")
    add("--seconds", type=float, default=1.0, help="for each line of the table")
    add("--statistic", choices=("median", "min"), default="median", help="min: for machines that others use as well")
    add("--json", metavar="FILE", help="write everything to a file")


def digits(order: Sequence[int]) -> str:
    """Return an order of axes as digits: "201"."""
    return "".join(map(str, order))
