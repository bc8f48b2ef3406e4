# SPDX-License-Identifier: Apache-2.0
"""Owns the command line: its arguments, its one-line errors and exit statuses; what is done lies in other modules.

Nothing here imports MPI: only the demo does, when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from . import _build
from .array import plan_dtype
from .grid import ProcessGrid
from .launcher import launched_rank
from .memory import BUILD_WITH_CUDA
from .pencil import Pencil
from .report import MOST
from .text import indented, size_text, table
from .transports import BACKENDS

BAD_INPUT = 2
EXPECTED = (ValueError, TypeError, OSError, ImportError, MemoryError)


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process: under mpiexec one rank speaks for all."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with the message."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, without the name of the program; None takes those of this process.

    Returns
    -------
    int
        The exit status: 0, 1 if a result is wrong, 2 on bad input, which is told in one line.
    """
    launched = launched_rank()
    try:
        with _silence(bool(launched)):
            arguments = _parser().parse_args(argv)
        if arguments.command == "demo":
            from .demo import demo

            return demo(arguments)
        return 0 if launched else _COMMANDS[arguments.command](arguments)
    except SystemExit as done:  # argparse has printed its help
        return int(done.code or 0)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except EXPECTED as error:
        return _refused(error, launched)


def _refused(error: BaseException, launched: int | None) -> int:
    """Say once why nothing was done; return the exit status."""
    comm = None
    if launched is not None or "mpi4py.MPI" in sys.modules:
        from .demo import world

        with contextlib.suppress(ImportError):
            comm = world()
    if not (launched if comm is None else comm.rank):
        print(f"cudecomp: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr, flush=True)
    if comm is not None:
        comm.Barrier()  # some launchers end all ranks when one fails, which must not be before rank 0 has spoken
    return BAD_INPUT


@contextlib.contextmanager
def _silence(wanted: bool) -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if wanted else sys.stdout):
        yield


# --- arguments -------------------------------------------------------------------------------------------------------


def ints(text: str) -> tuple[int, ...]:
    """Read "4,5,6" or "4x5x6"."""
    try:
        return tuple(int(word) for word in re.split("[,x]", text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected integers such as 64,64,64") from None


def order(text: str) -> str | tuple[int, ...]:
    """Read "contiguous" or a permutation."""
    return text if text == "contiguous" else ints(text)


def halo(text: str) -> int | tuple[int | tuple[int, ...], ...]:
    """Read "1", "1,1,0" or, with (low, high), "1:2,0,0"."""
    try:
        entries = [tuple(int(word) for word in entry.split(":")) for entry in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 1, or 1,1,0, or low:high as in 1:2,0,0") from None
    found = tuple(entry[0] if len(entry) == 1 else entry for entry in entries)
    return found[0] if len(found) == 1 and isinstance(found[0], int) else found


def dtype(text: str) -> np.dtype[Any]:
    """Read a dtype."""
    try:
        return plan_dtype(text)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a NumPy dtype such as float64 or complex64") from None


def count(text: str) -> int:
    """Read an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")


def _parser() -> Parser:
    parser = Parser(prog="cudecomp", description="Pencil decompositions and global transposes of distributed arrays.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_build.VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _info_arguments(commands.add_parser("info", help="versions, devices, MPI, and what each transport can do here"))
    _plan_arguments(commands.add_parser("plan", help="a dry run: what any rank of any grid would hold and send"))
    _demo_arguments(
        commands.add_parser("demo", help="solve a Poisson equation on all ranks: mpiexec -n 4 cudecomp demo")
    )
    return parser


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What is installed, which devices there are, and what each transport can do here and why not."
    parser.add_argument("--json", action="store_true", help="the same for programs")
    help_text = "seconds that MPI and CUDA have to answer (default: %(default)g)"
    parser.add_argument("--timeout", type=positive, default=30.0, metavar="SECONDS", help=help_text)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Dry run of transposes: nothing is moved, and neither MPI nor the ranks are needed."
    add = parser.add_argument
    add("--shape", type=ints, required=True, metavar="N,N,N", help="shape of the whole array, in axis order")
    add("--ranks", type=count, metavar="N", help="number of ranks; without --grid, a good grid is chosen")
    add("--grid", type=ints, metavar="P,P", help="process grid; one 0 is filled from --ranks")
    add("--rank-order", choices=("row", "column"), default="row", help="which way ranks run through the grid")
    add("--axes", type=ints, action="append", metavar="A,B", help="a transpose from the pencil of axis A to that of B; "
        "may be repeated (default: all neighbouring axes, there and back)")  # fmt: skip
    add("--order", type=order, metavar="ORDER", help="memory order of the pencils: contiguous, or axes from slowest to "
        "fastest as in 0,2,1 (default: 0,1,2)")  # fmt: skip
    add("--halo", type=halo, metavar="H", help="ghost cells of each pencil: 1, or 1,1,0, or low:high as in 1:2,0,0")
    add("--padding", type=halo, metavar="P", help="unused cells at the high end of each axis: 1, or 0,0,1")
    add("--dist-shape", type=ints, metavar="N,N,N", help="split the axes as if the array had this shape")
    add("--dtype", type=dtype, default=np.dtype("float64"), metavar="DTYPE", help="of the items (default: float64)")
    add("--fields", type=count, default=1, metavar="K", help="arrays that travel together (default: 1)")
    add("--inplace", action="store_true", help="source and destination are one buffer")
    add("--backend", choices=("auto", *BACKENDS["host"]), default="auto", help="the transport")
    add("--rank", type=int, metavar="R", help="tell about this rank in detail")
    add("--all-messages", action="store_true", help=f"with --rank: list all messages instead of {MOST}")
    add("--plot", metavar="FILE", help="draw the pencils, for arrays of three axes (needs matplotlib)")


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Solve laplace(u) = f in a periodic box by FFTs along the axes of three pencils, on all ranks of an mpiexec or "
        "on this process alone, check the answer, and time the transposes."
    )
    add = parser.add_argument
    add("--shape", type=ints, metavar="N,N,N", help="points of the box (default: 128,128,128, or those of --rhs)")
    add("--grid", type=ints, metavar="P,P", help="process grid; one 0 is filled (default: a good one)")
    add("--dtype", choices=("float32", "float64", "complex64", "complex128"), help="of the field (default: float64)")
    add("--backend", choices=("auto", *BACKENDS["host"]), default="auto", help="the transport")
    add("--rhs", metavar="FILE", help="take f from this .npy file instead of one with a known answer")
    add("--out", metavar="FILE", help="write u to this .npy file")
    add("--plot", metavar="FILE", help="draw the three pencils and a plane of u (needs matplotlib)")
    add("--repeats", type=count, default=5, metavar="N", help="timings of each transpose (default: %(default)s)")
    add("--tolerance", type=positive, metavar="X", help="largest error that is right, relative to the largest value "
        "(default: 1e-10, in single precision 1e-4)")  # fmt: skip


# --- info ------------------------------------------------------------------------------------------------------------


def _info(arguments: argparse.Namespace) -> int:
    from .probe import facts

    found = facts(arguments.timeout)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_info_lines(found)))
    return 0


def _info_lines(found: dict[str, Any]) -> Iterator[str]:
    yield "Versions"
    yield from indented(f"{name:<14}{version or 'not installed'}" for name, version in found["versions"].items())
    build, host, mpi, cuda = (found[name] for name in ("build", "host", "mpi", "cuda"))
    kernels = f"none; to build them, in the source tree: {BUILD_WITH_CUDA}"
    if build["cuda"]:
        kernels = f"CUDA {build['cuda_version']} for {', '.join(build['cuda_architectures'])}"
    yield f"  CUDA kernels  {kernels}"
    yield from ("", "Devices")
    yield f"  host          {host['cores']} cores, {host['machine']}, {host['system']}"
    if cuda["problem"]:
        yield f"  cuda          none: {cuda['problem']}"
    else:
        for number, device in enumerate(cuda["devices"]):
            capability = f"compute capability {device['compute_capability']}"
            yield f"  cuda {number:<9}{device['name']}, {size_text(device['bytes'])}, {capability}"
    yield from ("", "MPI")
    if mpi["problem"]:
        yield f"  cannot be used: {mpi['problem']}"
    else:
        yield f"  library       {mpi['library']} (MPI {mpi['standard']})"
        yield f"  CUDA-aware    {'yes' if mpi['cuda_aware'] else 'no'}: {mpi['cuda_aware_why']}"
    yield f"  mpiexec       {found['launcher'] or 'not on PATH'}"
    yield from ("", "Transports")
    rows = [(row["transport"], row["device"], row["works"], row["why"]) for row in found["transports"]]
    yield from indented(table(("transport", "device", "works", "how, or why not"), rows))


# --- plan ------------------------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    from .dryrun import DryRun

    grid = _grid(arguments)
    axes = tuple(range(len(arguments.shape)))
    pairs = _pairs(arguments.axes, axes)
    options = {"order": arguments.order, "halo": arguments.halo, "padding": arguments.padding}
    pencils = tuple(Pencil(arguments.shape, grid, axis, dist_shape=arguments.dist_shape, **options) for axis in axes)
    if arguments.rank is not None:
        grid.coords(arguments.rank)  # raises for a rank outside
    wanted = sorted({axis for pair in pairs for axis in pair})
    places = tuple((wanted.index(src), wanted.index(dst)) for src, dst in pairs)
    chosen = tuple(pencils[axis] for axis in wanted)
    dry = DryRun(
        *(chosen, places, arguments.dtype, arguments.fields, arguments.inplace, arguments.backend, arguments.rank),
        most=sys.maxsize if arguments.all_messages else MOST,
    )
    if arguments.plot:
        from .plot import picture

        picture(chosen, arguments.plot)
    print("\n".join(dry.lines()))
    if arguments.plot:
        print(f"\nThe pencils are drawn in {arguments.plot}")
    return 0


def _grid(arguments: argparse.Namespace) -> ProcessGrid:
    """Return the process grid of the arguments, chosen where none was given."""
    if arguments.grid:
        return ProcessGrid(arguments.grid, arguments.ranks, arguments.rank_order)
    if arguments.ranks is None:
        raise ValueError("plan: got neither --ranks nor --grid, expected at least one of them")
    return ProcessGrid.choose(arguments.ranks, arguments.shape, arguments.rank_order)


def _pairs(given: list[tuple[int, ...]] | None, axes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the transposes asked for, else those between neighbours, there and back."""
    if given is None:
        forward = list(pairwise(axes))
        return forward + [(b, a) for a, b in reversed(forward)]
    for pair in given:
        if len(pair) != 2 or not all(axis in axes for axis in pair):
            raise ValueError(f"--axes: got {pair}, expected two axes out of {axes}")
    return [(pair[0], pair[1]) for pair in given]


_COMMANDS = {"info": _info, "plan": _plan}
