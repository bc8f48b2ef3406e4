# SPDX-License-Identifier: Apache-2.0
"""The C level: its signatures are those of the committed file, and modules of others build against it and work.

They are built with Cython and a C compiler alone, against the installed package.
"""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

import cudecomp
import cudecomp.plan
from cudecomp import testing as reference

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "cython"
INSTALLED = Path(cudecomp.__file__).parent
PUBLIC = ("__init__.pxd", "plan.pxd")
COMPILERS = {"c": "gcc", "cpp": "g++"}


# --- signatures -------------------------------------------------------------------------------------------------------


def declarations(text):
    """The declarations of a .pxd file, one a line, without comments and spacing that means nothing."""
    text = re.sub(r"#.*", "", text)
    text = re.sub(r":\s*\n\s+", ": ", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def exports(module):
    """The C functions that other modules find when they import this one, with their C types."""
    types = {name: re.search('"(.*)"', repr(capsule))[1] for name, capsule in module.__pyx_capi__.items()}
    return [f"{name}: {types[name]}" for name in sorted(types)]


def test_signatures():
    """A change here breaks compiled modules of others: it belongs into the changelog, under C API."""
    lines = (HERE / "c_api.txt").read_text().splitlines()
    committed = [line for line in lines if line and not line.startswith("#")]
    found = [f"{name}: {line}" for name in PUBLIC for line in declarations((INSTALLED / name).read_text())]
    found += [f"cudecomp.plan exports {line}" for line in exports(cudecomp.plan)]
    assert found == committed


def test_public_pxd_files_are_plain():
    """No extern blocks, typedefs or cimports: what breaks binaries silently, or needs headers, stays private."""
    for path in sorted(INSTALLED.glob("*.pxd")):
        text = path.read_text()
        if path.name in PUBLIC:
            assert not re.search(r"\b(extern|ctypedef|cimport|struct|inline)\b", text.partition("\n\n")[2]), path.name
        else:
            assert "# Private:" in text, f"{path.name} is installed and does not say whether it is public"


# --- stubs ------------------------------------------------------------------------------------------------------------


def stub_members(node, prefix=""):
    """Yield (dotted name, node) of the functions and classes of a stub."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from stub_members(child, f"{prefix}{child.name}.")


def module_members(module):
    """Return the dotted names of what a compiled module defines for its users."""
    names = set()
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        names.add(name)
        if inspect.isclass(value):
            names |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
    return names


def parameters(node):
    """The parameters of a stub's function as inspect sees those of the module: names, kinds and defaults."""
    code = f"def f({ast.unparse(node.args)}): ..."
    scope = {"annotations": None}
    exec("from __future__ import annotations\n" + code, scope)
    return [(p.name, p.kind, p.default) for p in inspect.signature(scope["f"]).parameters.values()]


def test_stubs():
    stubs = dict(stub_members(ast.parse((INSTALLED / "plan.pyi").read_text())))
    public = {name for name in stubs if not name.rpartition(".")[2].startswith("_")}
    assert public == module_members(cudecomp.plan)
    for name, node in stubs.items():
        value = cudecomp.plan
        for part in name.split("."):
            value = inspect.getattr_static(value, part)
        if isinstance(node, ast.ClassDef):
            continue
        decorators = {ast.unparse(one) for one in node.decorator_list}
        assert ("property" in decorators) == inspect.isdatadescriptor(value), name
        if "property" not in decorators and hasattr(value, "__code__"):
            found = [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
            assert parameters(node) == found, name


@pytest.mark.slow
def test_stubs_by_mypy(tmp_path):
    pytest.importorskip("mypy", reason="mypy comes with the extra `lint`")
    # A copy, since mypy does not take stubs from everything that Python imports from.
    shutil.copytree(INSTALLED, tmp_path / "stubs" / "cudecomp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "mypy.ini").write_text("[mypy]\nmypy_path = stubs\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy.stubtest", "cudecomp.plan", "--mypy-config-file", "mypy.ini"]
    # What Cython adds to every module and class, and the constructors that only raise.
    allowed = r"cudecomp\.plan\.(.*\.)?(__pyx_capi__|__test__|__reduce_cython__|__setstate_cython__|__reduce__)"
    allowed += "\n" + r"cudecomp\.plan\.(Plan|Call)\.__init__"
    (tmp_path / "allowed").write_text(allowed + "\n")
    command += ["--allowlist", "allowed", "--ignore-unused-allowlist"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# --- a module of somebody else ----------------------------------------------------------------------------------------


def build(source, folder, language="c", name=None):
    """Build a Cython module outside the project, and import it."""
    compiler = shutil.which(COMPILERS[language])
    if compiler is None:
        pytest.skip(f"there is no {COMPILERS[language]} to build a downstream module with")
    name = name or source.stem
    shutil.copy(source, folder / f"{name}.pyx")
    plus = ["--cplus"] if language == "cpp" else []
    binary = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    include = ["-I", sysconfig.get_path("include")]
    for command in (
        [sys.executable, "-m", "cython", *plus, f"{name}.pyx"],
        [compiler, "-shared", "-fPIC", "-O1", *include, f"{name}.{language}", "-o", binary.name],
    ):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    spec = importlib.util.spec_from_file_location(name, binary)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=COMPILERS)
def downstream(request, tmp_path_factory):
    """The module, compiled as C and as C++."""
    language = request.param
    folder = tmp_path_factory.mktemp(language)
    return build(HERE / "downstream" / "downstream.pyx", folder, language, f"downstream_{language}")


SRC = cudecomp.Pencil((5, 6, 7), cudecomp.ProcessGrid((1, 1)), 0, halo=(1, 0, 2))
DST = cudecomp.Pencil((5, 6, 7), cudecomp.ProcessGrid((1, 1)), 1, order=(2, 0, 1))


@pytest.fixture
def arrays():
    return reference.fill(SRC, 0, np.float64), reference.poisoned(DST, 0, np.float64)


@pytest.fixture
def loop(downstream, arrays):
    """A Loop of the downstream module over a plan and its reverse, both captured."""
    with cudecomp.TransposePlan(SRC, DST, np.float64) as plan, plan.reverse() as back:
        yield downstream.Loop(plan, plan.capture(*arrays), back.capture(*arrays[::-1]))


@pytest.mark.parametrize("method", ["there_and_back", "replay"])
def test_calls(loop, arrays, method):
    source, target = arrays
    getattr(loop, method)(3)
    reference.check(DST, 0, target)
    reference.check(SRC, 0, source)


def test_plan_run(loop, arrays):
    source, target = arrays
    loop.run_addresses(source.ctypes.data, target.ctypes.data)
    reference.check(DST, 0, target)


def test_errors(loop, arrays, downstream):
    source, target = arrays
    with pytest.raises(ValueError, match="stream"):
        loop.run_addresses(source.ctypes.data, target.ctypes.data, 7)
    with cudecomp.TransposePlan(SRC, DST, np.float64) as plan:
        call = plan.bind(source, target)
        uncaptured = downstream.Loop(plan, call, call)
        with pytest.raises(RuntimeError, match="capture"):
            uncaptured.replay(1)
    with pytest.raises(RuntimeError, match="closed"):
        uncaptured.there_and_back(1)
    with pytest.raises(RuntimeError, match="closed"):
        uncaptured.run_addresses(source.ctypes.data, target.ctypes.data)
    with pytest.raises(TypeError):
        downstream.Loop(plan, None, None)


def test_other_threads(downstream):
    """Threads with plans of their own run them at the same time."""
    problems = []

    def work():
        source, target = reference.fill(SRC, 0, np.float64), reference.poisoned(DST, 0, np.float64)
        with cudecomp.TransposePlan(SRC, DST, np.float64) as plan, plan.reverse() as back:
            downstream.Loop(plan, plan.bind(source, target), back.bind(target, source)).there_and_back(200)
        problems.append(reference.mismatch(DST, 0, target) or reference.mismatch(SRC, 0, source))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [None] * 3


def test_calls_keep_their_arrays(downstream):
    """The arrays of a call live as long as the call, whoever else forgets them."""
    with cudecomp.TransposePlan(SRC, DST, np.float64) as plan, plan.reverse() as back:
        source, target = reference.fill(SRC, 0, np.float64), reference.poisoned(DST, 0, np.float64)
        held = downstream.Loop(plan, plan.bind(source, target), back.bind(target, source))
        views = [memoryview(source), memoryview(target)]
        del source, target
        held.there_and_back(1)
        reference.check(DST, 0, np.asarray(views[1]))


def test_example(tmp_path):
    """The example builds with the commands of docs/cython.md; here it runs on one rank."""
    build(EXAMPLE / "smooth.pyx", tmp_path)
    shutil.copy(EXAMPLE / "main.py", tmp_path)
    command = [sys.executable, str(tmp_path / "main.py")]
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest error" in result.stdout
