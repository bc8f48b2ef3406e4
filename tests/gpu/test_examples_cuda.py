# SPDX-License-Identifier: Apache-2.0
"""The GPU examples run, and check their own answers."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "gpu"


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_example(name):
    pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}_transpose.py"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "over 1 ranks" in done.stdout
