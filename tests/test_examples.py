# SPDX-License-Identifier: Apache-2.0
"""The examples, and the Python code of the documentation, run as they are; on more ranks in tests/mpi/test_demo.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"field_io": "h5py"}  # beyond what cudecomp needs
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def program_of(page):
    """The Python code blocks of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


PAGES_WITH_CODE = [page for page in PAGES if program_of(page)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_example(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda path: path.stem)
def test_page(page):
    result = subprocess.run([sys.executable, "-W", "error", "-c", program_of(page)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_is_something_to_run():
    assert len(PROGRAMS) == 3
    assert {page.stem for page in PAGES_WITH_CODE} >= {"README", "tutorial"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
