# SPDX-License-Identifier: Apache-2.0
"""Owns the demonstration: a Poisson equation solved by FFTs over pencils, its answer checked, its transposes timed.

An application of the package: it uses the public calls and knows nothing of how they work.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import pi, prod
from statistics import median
from typing import Any

import numpy as np

from . import Exchange, Pencil, ProcessGrid, TransposePlan, Workspace, __version__, empty
from .comm import Communicator, attempt
from .launcher import launched_size
from .plot import check_picture, picture
from .text import indented, shape_text, size_text, span_text, table, time_text

SHAPE = (128, 128, 128)
TIMEOUT = 120.0  # seconds without any message: another rank has died
WRONG = 1  # exit status
# Plane waves (amplitude, wave numbers, phase) whose sum is the known answer. No two axes are alike, so that a mix-up of
# axes or ranks shows.
WAVES = ((1.0, (1, 2, 3), 0.3), (0.7, (2, -1, 1), 1.1), (0.5, (-3, 1, 2), 2.0))

Array = np.ndarray[Any, Any]


class Team:
    """The ranks that run the demonstration, or this process alone."""

    def __init__(self, comm: Any):
        self.comm = comm
        self.group = Communicator.of(comm)
        self.rank, self.size = self.group.rank, self.group.size

    def agreed(self, action: Callable[[], Any]) -> Any:
        """Return what a local action returns; if it fails on any rank, all ranks raise the same."""
        result, error = attempt(action)
        if isinstance(error, OSError):
            error = OSError(str(error))  # its subclasses do not travel between ranks
        self.group.agree("demo", error)
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def largest(self, value: float) -> float:
        """Return the largest value of any rank."""
        return float(np.max(self.gather(value)))  # NaN if any value is

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.comm is not None:
            self.comm.Barrier()

    @contextmanager
    def risking(self) -> Iterator[None]:
        """End all ranks if one of them fails within: the others would wait for it for ever."""
        try:
            yield
        except Exception:
            if self.size == 1:
                raise
            traceback.print_exc()
            self.comm.Abort(WRONG)

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)


class Steps:
    """What has been done so far: seconds by kind of work, and a progress bar where somebody is watching."""

    def __init__(self, team: Team, total: int):
        self.seconds: dict[str, float] = {}
        self._bar = _bar(total) if total and team.rank == 0 and sys.stderr.isatty() else None

    @contextmanager
    def step(self, kind: str, what: str) -> Iterator[None]:
        """Time a step."""
        if self._bar is not None:
            self._bar.set_description(what)
        start = time.perf_counter()
        yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Take the progress bar away."""
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    """Return a tqdm bar, or None where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, leave=False)


class Poisson:
    """Solver of laplace(u) = f in a periodic box of side 2 pi, on all ranks of a team; collective.

    Fields lie in the pencil of axis 0. Each FFT runs along the whole axis of one pencil; transposes go from pencil to
    pencil in between. All of them share one workspace.
    """

    def __init__(self, team: Team, shape: tuple[int, ...], grid: ProcessGrid, dtype: np.dtype[Any], backend: str):
        self.rank, self.dtype = team.rank, dtype
        self.field = Pencil(shape, grid, axis=0)
        # The transform of a real field along axis 0 is half as long: the other half is its conjugate.
        real = dtype.kind == "f"
        self.first: Any = np.fft.rfft if real else np.fft.fft
        self.last: Any = np.fft.irfft if real else np.fft.ifft
        spectrum = Pencil((shape[0] // 2 + 1, *shape[1:]) if real else shape, grid, axis=0)
        self.pencils = (spectrum, spectrum.pencil(1), spectrum.pencil(2))
        complex_dtype = np.result_type(dtype, np.complex64)
        self.arrays = [empty(pencil, complex_dtype, self.rank) for pencil in self.pencils]
        self.views = [
            pencil.interior(array, self.rank) for pencil, array in zip(self.pencils, self.arrays, strict=True)
        ]
        with ExitStack() as plans:
            workspace = Workspace(team.comm)
            self.plans = {}
            for src, dst in ((0, 1), (1, 2), (2, 1), (1, 0)):
                plan = TransposePlan(
                    self.pencils[src],
                    self.pencils[dst],
                    complex_dtype,
                    team.comm,
                    backend=backend,
                    workspace=workspace,
                    timeout=TIMEOUT,
                )
                self.plans[src, dst] = plans.enter_context(plan)
            self._open = plans.pop_all()

    def close(self) -> None:
        """Close the plans."""
        self._open.close()

    def wave_numbers(self) -> Array:
        """Return -|k|^2 for the rank's part of the spectrum, in the pencil of axis 2."""
        total = np.zeros((1, 1, 1), self.dtype.char.lower())
        for axis, part in enumerate(self.pencils[2].slices(self.rank)):
            n = self.field.global_shape[axis]
            # The half spectrum of a real field has wave numbers 0 ... n // 2; their signs do not matter here.
            k = np.fft.fftfreq(n, 1 / n)[part].astype(total.dtype)
            total = total - (k**2).reshape([-1 if a == axis else 1 for a in range(3)])
        return total

    def inverse_laplace(self, f: Array, steps: Steps) -> Array:
        """Return the u of mean 0 with laplace(u) = f - mean(f), in the pencil of axis 0."""
        numbers = self.wave_numbers()
        factor = np.divide(1, numbers, out=np.zeros_like(numbers), where=numbers != 0)
        return self._multiplied(f, factor, steps)

    def laplace(self, u: Array, steps: Steps) -> Array:
        """Return laplace(u), in the pencil of axis 0."""
        return self._multiplied(u, self.wave_numbers(), steps)

    def _multiplied(self, f: Array, factor: Array, steps: Steps) -> Array:
        """Return a field whose transform is that of `f` times `factor`: 0 -> 1 -> 2 and back."""
        views, arrays = self.views, self.arrays
        with steps.step("FFTs", "FFT along axis 0"):
            views[0][...] = self.first(f, axis=0)
        for axis in (1, 2):
            with steps.step("transposes", f"transpose {axis - 1} -> {axis}"):
                self.plans[axis - 1, axis].run(arrays[axis - 1], arrays[axis])
            with steps.step("FFTs", f"FFT along axis {axis}"):
                views[axis][...] = np.fft.fft(views[axis], axis=axis)
        with steps.step("multiplication", "multiplication"):
            views[2][...] *= factor
        for axis in (2, 1):
            with steps.step("FFTs", f"inverse FFT along axis {axis}"):
                views[axis][...] = np.fft.ifft(views[axis], axis=axis)
            with steps.step("transposes", f"transpose {axis} -> {axis - 1}"):
                self.plans[axis, axis - 1].run(arrays[axis], arrays[axis - 1])
        with steps.step("FFTs", "inverse FFT along axis 0"):
            return self.last(views[0], n=self.field.global_shape[0], axis=0).astype(self.dtype)


# --- the problem -----------------------------------------------------------------------------------------------------


def known(pencil: Pencil, rank: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return (f, u) with laplace(u) = f on the rank's part of a pencil: a sum of plane waves that the grid resolves."""
    shape = pencil.global_shape
    points = [2 * pi / n * np.arange(part.start, part.stop) for n, part in zip(shape, pencil.slices(rank), strict=True)]
    f, u = (np.zeros(pencil.shape(rank), dtype) for _ in range(2))
    wave = np.cos if dtype.kind == "f" else lambda phase: np.exp(1j * phase)
    for amplitude, numbers, phase in WAVES:
        k = [max(-((n - 1) // 2), min((n - 1) // 2, number)) for n, number in zip(shape, numbers, strict=True)]
        if any(k):  # a constant has no part in the answer
            along = [number * x for number, x in zip(k, points, strict=True)]
            term = amplitude * wave(along[0][:, None, None] + along[1][:, None] + along[2] + phase)
            u += term.astype(dtype)
            f -= (sum(number**2 for number in k) * term).astype(dtype)
    return f, u


def open_field(path: str) -> Array:
    """Return the array in a .npy file as a memory map: nothing is read yet."""
    try:
        found = np.lib.format.open_memmap(path, "r")
    except ValueError as error:
        raise ValueError(f"--rhs {path}: expected a .npy file with an array of numbers: {error}") from None
    if found.ndim != 3 or found.dtype.kind not in "iufc":
        raise ValueError(f"--rhs {path}: got {found.dtype} of shape {found.shape}, expected numbers in three axes")
    return found


def field_dtype(given: str | None, found: Array | None) -> np.dtype[Any]:
    """Return the dtype of the field: the one asked for, else the one nearest to that of the file."""
    if found is None or given:
        dtype = np.dtype(given or "float64")
        if found is not None and found.dtype.kind == "c" and dtype.kind == "f":
            raise ValueError(f"--dtype {given}: the right-hand side is {found.dtype}, expected complex64 or complex128")
        return dtype
    single = found.dtype.kind in "fc" and found.dtype.itemsize <= (8 if found.dtype.kind == "c" else 4)
    return np.dtype(("c8" if single else "c16") if found.dtype.kind == "c" else ("f4" if single else "f8"))


def box_shape(given: tuple[int, ...] | None, found: Array | None) -> tuple[int, ...]:
    """Return the points of the box, from the arguments or the file."""
    if found is not None and given not in (None, found.shape):
        raise ValueError(f"--shape {given}: the right-hand side has shape {found.shape}")
    shape = given or (SHAPE if found is None else found.shape)
    if len(shape) != 3:
        raise ValueError(f"--shape {shape}: expected three extents")
    return shape


# --- results ---------------------------------------------------------------------------------------------------------


def time_transposes(team: Team, solver: Poisson, repeats: int, steps: Steps) -> list[tuple[str, ...]]:
    """Return a row on each transpose: what it moves, its time, and the time relative to a copy of the same bytes.

    Times are those of the slowest rank, the median of the repeats; copies and transposes take turns.
    """
    rows: list[tuple[str, ...]] = []
    for (axis, target), plan in solver.plans.items():
        src, dst = solver.arrays[axis], solver.arrays[target]
        scratch = src.copy()
        moved, copied = [], []
        for _ in range(repeats):
            with steps.step("timing", f"timing {axis} -> {target}"):
                copied.append(_timed(team, np.copyto, scratch, src))
                moved.append(_timed(team, plan.run, src, dst))
        plain, whole = (median(map(max, zip(*team.gather(times), strict=True))) for times in (copied, moved))
        rows.append((f"{axis} -> {target}", *_sent(team, plan), time_text(whole), f"{whole / plain:.1f}"))
    return rows


def _timed(team: Team, action: Callable[..., Any], *arguments: Any) -> float:
    team.barrier()
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def _sent(team: Team, plan: TransposePlan) -> tuple[str, str]:
    """Return the messages and the bytes that a rank sends to others, from the least to the most."""
    mine = [message.items for message in Exchange(plan.src, plan.dst, team.rank) if message.peer != team.rank]
    counts, items = zip(*team.gather((len(mine), sum(mine))), strict=True)
    sizes = [size_text(some * plan.dtype.itemsize) for some in (min(items), max(items))]
    return span_text(str(min(counts)), str(max(counts))), span_text(*sizes)


def relative_error(team: Team, found: Array, wanted: Array) -> float:
    """Return the largest difference, relative to the largest wanted value; over all ranks."""
    size = team.largest(float(np.abs(wanted).max(initial=0)))
    return team.largest(float(np.abs(found - wanted).max(initial=0))) / (size or 1.0)


def write_field(team: Team, path: str, pencil: Pencil, field: Array) -> None:
    """Write a field to a .npy file; each rank writes its own slices through a memory map. Collective."""

    def create() -> None:
        if team.rank == 0:
            np.lib.format.open_memmap(path, "w+", field.dtype, pencil.global_shape).flush()

    def fill() -> None:
        if field.size:
            mapped = np.lib.format.open_memmap(path, "r+")
            mapped[pencil.slices(team.rank)] = field
            mapped.flush()

    team.agreed(create)
    team.agreed(fill)


def draw(team: Team, path: str, pencil: Pencil, field: Array) -> None:
    """Draw the three pencils and the middle plane of a field, on rank 0. Collective."""
    middle = pencil.global_shape[2] // 2
    box = pencil.box(team.rank)
    mine = field[:, :, middle - box.start[2]].real if box.start[2] <= middle < box.stop[2] else field[:, :0, 0].real
    blocks = [block for _, block in sorted(team.gather((box.start[1], mine)), key=lambda one: one[0]) if block.size]
    pencils = [pencil.pencil(axis) for axis in range(3)]
    title = f"u at index {middle} of axis 2"
    team.agreed(lambda: picture(pencils, path, np.concatenate(blocks, 1), title) if team.rank == 0 else None)


# --- the command -----------------------------------------------------------------------------------------------------


def world() -> Any:
    """Return MPI.COMM_WORLD; None where MPI cannot be used and this process was not started by mpiexec.

    Raises
    ------
    ImportError
        A launcher started several processes, but MPI does not work or does not know of them.
    """
    started = launched_size()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if started > 1:
            raise ImportError(f"mpi4py cannot be used: {error}") from None
        return None
    if started > 1 and MPI.COMM_WORLD.size == 1:
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise ImportError(
            f"mpiexec started {started} processes, but it is not the mpiexec of the MPI in use: {library}"
        )
    return MPI.COMM_WORLD


def demo(arguments: argparse.Namespace) -> int:
    """Run the demonstration with the arguments of the command line; return the exit status. Collective."""
    team = Team(world())
    file = team.agreed(lambda: open_field(arguments.rhs) if arguments.rhs else None)
    shape = box_shape(arguments.shape, file)
    dtype = field_dtype(arguments.dtype, file)
    grid = ProcessGrid(arguments.grid, team.size) if arguments.grid else ProcessGrid.choose(team.size, shape)
    team.agreed(lambda: _check_files(arguments, Pencil(shape, grid, axis=0)))
    solver = Poisson(team, shape, grid, dtype, arguments.backend)
    try:
        _introduce(team, solver, arguments)
        f, exact = team.agreed(lambda: _right_hand_side(solver, file))
        steps = Steps(team, total=11 + 4 * arguments.repeats)
        with team.risking():
            u, error = _solve(team, solver, f, exact, steps)
            rows = time_transposes(team, solver, arguments.repeats, steps)
        steps.close()
        tolerance = arguments.tolerance or (1e-10 if dtype.char in "dD" else 1e-4)
        _conclude(team, steps, exact is not None, error, tolerance, rows)
        if arguments.out:
            write_field(team, arguments.out, solver.field, u)
            team.say("", f"u is in {arguments.out}")
        if arguments.plot:
            draw(team, arguments.plot, solver.field, u)
            team.say("", f"The pencils and a plane of u are drawn in {arguments.plot}")
    finally:
        solver.close()
    return 0 if error <= tolerance else WRONG


def _check_files(arguments: argparse.Namespace, pencil: Pencil) -> None:
    """Find out before the work whether its results can be kept."""
    if arguments.plot:
        check_picture(pencil, arguments.plot)
    for path in filter(None, (arguments.out, arguments.plot)):
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{path}: there is no folder {folder}")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise PermissionError(f"{path}: may not be written")
        if arguments.rhs and os.path.exists(path) and os.path.samefile(path, arguments.rhs):
            raise ValueError(f"{path}: would overwrite the right-hand side")


def _right_hand_side(solver: Poisson, file: Array | None) -> tuple[Array, Array | None]:
    """Return (f, u) on this rank; u is None where nobody knows it."""
    if file is None:
        return known(solver.field, solver.rank, solver.dtype)
    return np.array(file[solver.field.slices(solver.rank)], solver.dtype), None


def _solve(team: Team, solver: Poisson, f: Array, exact: Array | None, steps: Steps) -> tuple[Array, float]:
    """Return u, and its error, or where the answer is not known that of laplace(u)."""
    u = solver.inverse_laplace(f, steps)
    if exact is not None:
        return u, relative_error(team, u, exact)
    mean = sum(team.gather(f.sum(dtype=np.result_type(f, np.float64)))) / prod(solver.field.global_shape)
    # The seconds of the check are not those of the solution.
    return u, relative_error(team, solver.laplace(u, Steps(team, 0)), f - solver.dtype.type(mean))


def _introduce(team: Team, solver: Poisson, arguments: argparse.Namespace) -> None:
    shape, grid = solver.field.global_shape, solver.field.grid
    where = f"on {team.size} ranks" if team.size > 1 else "on this process alone"
    source = f"f is in {arguments.rhs}" if arguments.rhs else "f is a sum of plane waves, so that u is known"
    real = "; u is real: half of its transform is kept" if solver.dtype.kind == "f" else ""
    shown = sorted({0, grid.size - 1})
    rows = [
        (f"axis {axis}", *(shape_text(solver.field.pencil(axis).shape(rank)) for rank in shown)) for axis in range(3)
    ]
    header = ("pencil", *(f"rank {rank} holds" for rank in shown))
    alone = [] if team.size > 1 else ["", "On four ranks: mpiexec -n 4 python -m cudecomp demo"]
    team.say(
        f"cudecomp {__version__} solves laplace(u) = f in a periodic box of {shape_text(shape)} points {where}",
        f"  {source}{real}; {solver.dtype}; transport {solver.plans[0, 1].backend}",
        *alone,
        "",
        "An FFT needs all points along its axis. So a rank holds a pencil of the box, whole along one axis, the others",
        f"cut by a {shape_text(grid.shape)} grid of ranks. Transposes turn pencils of one axis into those of the next.",
        *indented(table(header, rows)),
        "",
    )


def _conclude(team: Team, steps: Steps, is_known: bool, error: float, tolerance: float, rows: list[Any]) -> None:
    seconds = {kind: team.largest(spent) for kind, spent in steps.seconds.items() if kind != "timing"}
    neighbours, cores = team.group.nodes.count(team.group.nodes[team.rank]), os.cpu_count() or 1
    crowded = [f"  {neighbours} ranks share {cores} cores, which makes transposes slower"] if neighbours > cores else []
    verdict = "right" if error <= tolerance else "WRONG"
    what = "u differs from the exact solution by" if is_known else "laplace(u) differs from f - mean(f) by"
    team.say(
        "FFT along axis 0, transpose, FFT along 1, transpose, FFT along 2, divide by -|k|^2, and all the way back",
        "  " + ", ".join(f"{kind} {time_text(spent)}" for kind, spent in seconds.items()),
        f"  {what} {error:.1e} of the largest value (tolerance {tolerance:.0e}): {verdict}",
        "",
        "The transposes again, timed; x copy: relative to a plain copy of the same bytes by all ranks at once",
        *indented(table(("transpose", "messages or writes", "bytes sent", "time", "x copy"), rows, right=(3, 4))),
        *crowded,
    )
