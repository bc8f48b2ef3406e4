# SPDX-License-Identifier: Apache-2.0
"""Find a CUDA compiler that works, and say what it is to be called with.

Called with a list of architectures ("90,100f", "native" or "default"), prints, one a line: nvcc, its version, the
folder of its headers, the architectures, and nvcc's flags for a library of these. Exits with 1 and one sentence on
stderr where CUDA modules cannot be built here. Called with "nvcc", prints just the version of the nvcc that is found.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

OLDEST = (12, 0)
# Machine code for the data centre and current desktop parts; the PTX of the newest serves what comes after.
DEFAULT = {"80": (12, 0), "90": (12, 0), "100": (12, 8), "120": (12, 8)}


class NoCudaError(Exception):
    """Why CUDA modules cannot be built here."""


def candidates() -> Iterator[tuple[str, Path]]:
    """Where nvcc may be, and who says so, the most explicit first."""
    if nvcc := os.environ.get("NVCC"):
        yield "NVCC", Path(shutil.which(nvcc) or nvcc)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield variable, Path(home, "bin", "nvcc")
    if nvcc := shutil.which("nvcc"):
        yield "PATH", Path(nvcc)
    for folder in filter(None, sys.path):
        yield "the nvidia-cuda-nvcc wheel", Path(folder, "nvidia", "cu13", "bin", "nvcc")
    yield "the usual place", Path("/usr/local/cuda/bin/nvcc")


def find_nvcc() -> Path:
    """The first nvcc that is there. One named by a variable must be."""
    for origin, path in candidates():
        if os.access(path, os.X_OK) and path.is_file():
            return path
        if origin.isupper() and origin != "PATH":
            raise NoCudaError(f"{origin}={os.environ[origin]} names no CUDA compiler: {path} is not an executable")
    raise NoCudaError(
        "no nvcc found; looked at NVCC, CUDA_HOME, CUDA_PATH, PATH, the nvidia-cuda-nvcc wheel and /usr/local/cuda"
    )


def ask(*command: str | Path) -> str:
    """What a command prints, both streams; NoCudaError where it fails."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise NoCudaError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode:
        raise NoCudaError(f"`{shlex.join(map(str, command))}` failed:\n{result.stdout.strip()}")
    return result.stdout


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    text = ask(nvcc, "--version")
    match = re.search(r"release (\d+)\.(\d+)", text)
    if not match:
        raise NoCudaError(f"`{nvcc} --version` names no release: {text.strip()}")
    version = int(match[1]), int(match[2])
    if version < OLDEST:
        raise NoCudaError(f"{nvcc} is of CUDA {match[1]}.{match[2]}, older than {OLDEST[0]}.{OLDEST[1]}")
    return version


def header_folder(nvcc: Path) -> Path:
    """The folder of cuda_runtime.h as nvcc itself sees it: the nvcc on PATH is often a link or a script."""
    plan = ask(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull)
    for line in plan.splitlines():
        if "INCLUDES=" in line:
            for word in shlex.split(line.partition("INCLUDES=")[2].replace('"', " ")):
                folder = Path(word.removeprefix("-I").removeprefix("-isystem")).resolve()
                if (folder / "cuda_runtime.h").is_file():
                    return folder
    raise NoCudaError(f"{nvcc} finds no cuda_runtime.h (with the PyPI wheels: install nvidia-cuda-runtime)")


def check_bindings(major: int) -> None:
    """The Cython modules cimport cuda.bindings; its headers must be of the toolkit's major version."""
    try:
        if importlib.util.find_spec("cuda.bindings") is None:
            raise ModuleNotFoundError
        version = importlib.metadata.version("cuda-bindings")
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        raise NoCudaError("there is nvcc but no Python package cuda-bindings; install it, then build again") from None
    if int(version.split(".")[0]) != major:
        raise NoCudaError(f"cuda-bindings {version} does not fit the toolkit, which is CUDA {major}")


def architectures(wanted: str, version: tuple[int, int]) -> list[str]:
    if wanted == "default":
        return [name for name, since in DEFAULT.items() if version >= since]
    if wanted == "native":
        names = ask("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
        return sorted({name.replace(".", "") for name in names}, key=int)
    names = [name for name in re.split(r"[,; ]+", wanted) if name]
    for name in names:
        if not re.fullmatch(r"\d{2,3}[af]?", name):
            raise NoCudaError(f"-Dgpu_arch={wanted}: {name!r} is not an architecture such as 90 or 100f")
    return names


def architecture_flags(names: list[str]) -> list[str]:
    """Machine code for each architecture, and the PTX of the newest one that later parts can run."""
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    portable = [name for name in names if name.isdigit()]
    if portable:
        newest = max(portable, key=int)
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return flags


def library_flags(headers: Path) -> list[str]:
    """A shared library with the CUDA runtime inside, so that it meets no other one in the process."""
    flags = ["--threads=0", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "-cudart=static", "-cudadevrt=none"]
    # nvcc looks into lib64, which the wheels do not have.
    libraries = headers.parent / "lib"
    return [*flags, f"-L{libraries}"] if (libraries / "libcudart_static.a").is_file() else flags


def try_compile(nvcc: Path, flags: list[str]) -> None:
    """A toolkit may refuse the host compiler or an architecture, or lack its static runtime library."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cu")
        source.write_text('__global__ void f() {}\nextern "C" int g() { f<<<1, 1>>>(); return cudaGetLastError(); }\n')
        ask(nvcc, *flags, "-o", Path(folder, "try.so"), source)


def main(wanted: str) -> None:
    nvcc = find_nvcc()
    version = nvcc_version(nvcc)
    if wanted == "nvcc":
        print("{}.{}".format(*version))
        return
    headers = header_folder(nvcc)
    check_bindings(version[0])
    names = architectures(wanted, version)
    flags = [*architecture_flags(names), *library_flags(headers)]
    try_compile(nvcc, flags)
    print(nvcc, "{}.{}".format(*version), headers, ",".join(names), "\t".join(flags), sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except NoCudaError as error:
        sys.exit(str(error))
