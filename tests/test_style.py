# SPDX-License-Identifier: Apache-2.0
"""What linters do not check: lengths of functions, licence lines, module docstrings, and no ctypes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "build-aux", "cudecomp", "docs", "examples", "kernels", "tests")
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".cpp", ".cu"}
LONGEST, P95 = 80, 40


def sources():
    """The project's sources that say something; an empty __init__ does not."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(p for p in paths if p.suffix in SUFFIXES and "_build" not in p.parts and p.stat().st_size)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def python_functions(text):
    """Yield (name, lines) of each function, without its docstring: prose is not what makes a function long."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            prose = node.body[0] if ast.get_docstring(node) is not None else None
            yield node.name, node.end_lineno - node.lineno + 1 - (prose.end_lineno - prose.lineno + 1 if prose else 0)


def cython_functions(text):
    """The same for Cython, by indentation."""
    lines = re.sub(r'(?<=:\n)\s*"""(?:.|\n)*?"""', "", text).splitlines()
    for start, line in enumerate(lines):
        head = re.match(r"( *)(?:async )?(?:def|cdef|cpdef)\b[^=\n]*?(\w+)\(", line)
        if not head:
            continue
        end = last = start
        for end in range(start + 1, len(lines)):
            text_line = lines[end].strip()
            indent = len(lines[end]) - len(lines[end].lstrip())
            if text_line and indent <= len(head[1]) and not text_line.startswith(")"):
                break
            last = end if text_line else last
        yield head[2], last - start + 1


def c_functions(text):
    """The same for C++: clang-format puts the brace that ends a function into column 0."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        head = re.match(r"[^\s#/}][^;=]*?(\w+)\(", line)
        if (
            not head
            or line.startswith(("extern", "namespace", "struct", "typedef"))
            or line.rstrip().endswith((";", "}"))
        ):
            continue
        end = next((i for i in range(start, len(lines)) if lines[i].startswith(("}", "extern"))), start)
        yield head[1], end - start + 1


def functions(path):
    if path.suffix in {".py", ".pyi"}:
        return python_functions(path.read_text())
    return (cython_functions if path.suffix in {".pyx", ".pxd"} else c_functions)(path.read_text())


def test_functions_are_short():
    found = sorted((lines, name, relative(path)) for path in sources() for name, lines in functions(path))
    lengths = [lines for lines, _, _ in found]
    too_long = [entry for entry in found if entry[0] > LONGEST]
    assert not too_long
    p95 = lengths[int(0.95 * (len(lengths) - 1))]
    assert p95 <= P95, f"the longest: {found[-20:]}"


def test_lengths_are_seen():
    assert list(python_functions('def f(a):\n    """Doc\n    string."""\n    return a\n')) == [("f", 2)]
    assert list(
        cython_functions(
            "cdef class A:\n    cdef int f(self,\n               int x) except -1:\n        a\n\n    b = 1\n"
        )
    ) == [("f", 3)]
    assert list(c_functions("int f(int a,\n      int b) {\n    return a;\n}\nint g();\n")) == [("f", 4)]


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_licence_line(path):
    assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().partition("\n")[0]


@pytest.mark.parametrize("path", [p for p in sources() if p.suffix == ".py"], ids=relative)
def test_module_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [p for p in sources() if p.suffix in {".py", ".pyx", ".pxd"}], ids=relative)
def test_no_ctypes(path):
    assert not re.search(r"^\s*(from|c?import)\s+[^#\n]*\bctypes\b", path.read_text(), re.MULTILINE)
