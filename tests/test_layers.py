# SPDX-License-Identifier: Apache-2.0
"""The layers of the package: imports and cimports point down, and optional packages are imported on demand."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cudecomp"

# From the lowest to the highest. A module imports from lower rows only; a folder stands for those of its modules that
# have no row of their own, and these may import each other. A new module gets its row here.
LAYERS = (
    {"_build", "errors", "flags", "forever", "launcher", "library", "mapping", "text"},
    {"shm"},
    {"aware"},
    {"array", "comm"},
    {"grid"},
    {"pencil"},
    {"exchange"},
    {"blocks"},
    {"halo", "schedule"},
    {"pack"},
    {"cuda"},
    {"boxes", "memory", "registry", "workspace"},
    {"cuda.reach"},
    {"transports"},
    {"spec"},
    {"binding", "report"},
    {"engine", "whole"},
    {"host", "cuda.engine"},
    {"cuda.chain", "cuda.direct", "host_direct"},
    {"plan"},
    {"__init__"},
    {"dryrun", "plot", "probe", "testing"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
GEOMETRY = {"grid", "pencil", "exchange", "blocks", "schedule"}
# What a module may import from outside the standard library: anything not listed here, numpy alone.
OUTSIDE = {
    "aware": {"mpi4py"},
    "comm": {"mpi4py"},
    "cuda": {"cuda"},
    "demo": {"mpi4py", "tqdm"},
    "plot": {"matplotlib", "mpl_toolkits"},
    "probe": {"cuda", "mpi4py"},
    "transports": {"mpi4py"},
}
CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<package>[\w.]+)[ \t]+c?import[ \t]+(?P<names>\([^)]*\)|[^\n#]+)"
    r"|c?import[ \t]+(?P<modules>[\w., \t]+))",
    re.MULTILINE,
)


def level(name):
    return next((index for index, names in enumerate(LAYERS) if name in names), None)


def python_imports(text):
    """Yield (level of the relative import, module, names) of each import of Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)


def cython_imports(text):
    """The same for Cython source, where cimports count as imports."""
    for match in CYTHON_IMPORT.finditer(text):
        if match["package"]:
            module = match["package"].lstrip(".")
            names = re.findall(r"(\w+)(?:\s+as\s+\w+)?", match["names"])
            yield len(match["package"]) - len(module), module, tuple(names)
        else:
            for word in match["modules"].split(","):
                yield 0, word.split()[0], ()


def absolute(path, dots, module):
    """The full name of a module as `path` imports it."""
    if not dots:
        return module
    package = path.relative_to(ROOT).parts[:-dots]
    return ".".join([*package, *filter(None, [module])])


def row_name(parts):
    """The longest beginning of a module's name that has a row in LAYERS, else the first part."""
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in prefixes if level(name) is not None), parts[0])


def row_names(target, names):
    """The names, as in LAYERS, of what `from target import names` imports of this package."""
    package, *parts = target.split(".")
    if package != "cudecomp":
        return set()
    if parts:
        return {row_name([*parts, name]) for name in names or ("",)}
    return {name if level(name) is not None else "__init__" for name in names or ("",)}


def sources():
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".pyx", ".pxd"})


def own_name(path):
    """The name, as in LAYERS, of a source file."""
    return row_name(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path):
    """Yield (full module name, names) of each import of a source file."""
    read = python_imports if path.suffix == ".py" else cython_imports
    for dots, module, names in read(path.read_text()):
        yield absolute(path, dots, module), names


def test_rows_name_what_there_is():
    names = {own_name(path) for path in sources()} | {"_build"}  # written by the build
    assert set().union(*LAYERS) == names


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_point_down(path):
    own = own_name(path)
    assert level(own) is not None, f"{relative(path)} has no row in LAYERS"
    for target, names in imports(path):
        for name in row_names(target, names) - {own}:
            assert level(name) is not None, f"{relative(path)} imports {name}, which has no row in LAYERS"
            assert level(name) < level(own), f"{relative(path)} imports {name}, which is not below it"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_outside_packages(path):
    own = own_name(path).partition(".")[0]
    allowed = {"numpy", "cudecomp", "libc", "cpython", "cython", *OUTSIDE.get(own, ()), *sys.stdlib_module_names}
    outside = {target.partition(".")[0] for target, _ in imports(path)} - allowed
    assert not outside, f"{relative(path)} imports {sorted(outside)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "transports").glob("*.py")), ids=relative)
def test_transports_know_no_geometry(path):
    known = set().union(*(row_names(target, names) for target, names in imports(path)))
    assert not known & GEOMETRY


def test_kernel_headers_need_no_cuda():
    """Both kernel libraries and the Cython modules compile them."""
    for name in ("pack.h", "tile.h"):
        included = re.findall(r'#include\s*[<"]([^>"]+)', (ROOT / "kernels" / name).read_text())
        assert not [header for header in included if "cuda" in header.replace("cudecomp", "")], name


def test_import_is_light():
    """`import cudecomp` starts no MPI and loads no optional package."""
    heavy = ("mpi4py.MPI", "cuda", "cupy", "torch", "matplotlib", "tqdm")
    code = f"import sys, cudecomp; print(*(name for name in {heavy} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_source_tree_says_that_it_is_one():
    """It has no compiled modules: the error says so, and what to do, rather than which module is missing."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    command = [sys.executable, "-c", "import cudecomp"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {PACKAGE} is the source tree of cudecomp")
    assert "pip install" in last


def test_parsers_see_every_form():
    text = (
        "cimport cudecomp.pack\nfrom cudecomp.grid cimport (a,\n    b as c)\nfrom .. import plan\nimport x.y, z  # w\n"
    )
    assert list(cython_imports(text)) == [
        (0, "cudecomp.pack", ()),
        (0, "cudecomp.grid", ("a", "b")),
        (2, "", ("plan",)),
        (0, "x.y", ()),
        (0, "z", ()),
    ]
    path = PACKAGE / "transports" / "mpi.py"
    assert absolute(path, 2, "grid") == "cudecomp.grid"
    assert row_names("cudecomp", ("grid", "Pencil")) == {"grid", "__init__"}
    assert row_names("cudecomp", ("grid",)) == {"grid"}
    assert row_names("cudecomp", ()) == {"__init__"}
    assert row_names("cudecomp.cuda", ("engine", "other")) == {"cuda.engine", "cuda"}
    assert row_names("cudecomp.cuda.engine", ("CudaEngine",)) == {"cuda.engine"}
    assert own_name(PACKAGE / "cuda" / "engine.pyx") == "cuda.engine"
    assert own_name(PACKAGE / "cuda" / "other.pyx") == "cuda"
