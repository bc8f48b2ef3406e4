# SPDX-License-Identifier: Apache-2.0
"""The demonstration and the examples on every rank: right answers, files written by slices, errors told once."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from cudecomp import cli

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
COMM = MPI.COMM_WORLD


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks share."""
    return Path(COMM.bcast(str(tmp_path)))


@pytest.fixture
def demo(capsys):
    """A function that runs the demo and returns the statuses and the outputs of all ranks."""

    def run(*arguments):
        status = cli.main(["demo", "--repeats", "1", *map(str, arguments)])
        output = capsys.readouterr()
        return COMM.allgather(status), COMM.allgather(output.out), COMM.allgather(output.err)

    return run


@pytest.mark.parametrize("backend", ["auto", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"])
@pytest.mark.parametrize(("shape", "dtype"), [("18,17,16", "float64"), ("5,3,2", "complex64"), ("2,9,30", "float32")])
def test_demo(demo, backend, shape, dtype):
    statuses, out, err = demo("--shape", shape, "--dtype", dtype, "--backend", backend)
    assert statuses == [0] * COMM.size
    assert "right" in out[0]
    assert out[1:] == [""] * (COMM.size - 1)
    assert err == [""] * COMM.size


def test_wrong_on_all_ranks(demo):
    assert demo("--shape", "8,8,8", "--tolerance", "1e-30")[0] == [1] * COMM.size


def test_files(demo, folder):
    f = np.random.default_rng(1).normal(size=(6, 9, 5))
    if COMM.rank == 0:
        np.save(folder / "f.npy", f)
    COMM.Barrier()
    statuses, out, _ = demo("--rhs", folder / "f.npy", "--out", folder / "u.npy", "--grid", "1,0")
    assert statuses == [0] * COMM.size, out[0]
    u = np.load(folder / "u.npy")
    squares = np.meshgrid(*(np.fft.fftfreq(n, 1 / n) ** 2 for n in f.shape), indexing="ij")
    right = np.allclose(np.fft.ifftn(-sum(squares) * np.fft.fftn(u)), f - f.mean())
    assert all(COMM.allgather(right))


def test_picture(demo, folder):
    pytest.importorskip("matplotlib")
    assert demo("--shape", "6,7,8", "--plot", folder / "demo.png")[0] == [0] * COMM.size
    assert (folder / "demo.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--shape 8,8", "expected three extents"),
        ("--rhs nowhere.npy", "nowhere.npy"),
        ("--grid 7,7 --shape 8,8,8", "49 ranks"),
        ("--plot x.nothing --shape 8,8,8", "the picture's format"),
        ("--repeats 0", "expected an integer of at least 1"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_errors_are_told_once(demo, line, reason):
    statuses, out, err = demo(*line.split())
    assert statuses == [2] * COMM.size
    assert reason in err[0]
    assert err[0].count("\n") == 1
    assert out == [""] * COMM.size
    assert err[1:] == [""] * (COMM.size - 1)


@pytest.fixture
def example(capsys, monkeypatch):
    """A function that runs an example, which must end well and speak on rank 0 alone."""

    def run(path, *arguments):
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        assert COMM.allgather(bool(end.value.code)) == [False] * COMM.size
        assert COMM.allgather(bool(capsys.readouterr().out)) == [True] + [False] * (COMM.size - 1)

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(example, path):
    if path.stem == "field_io":
        pytest.importorskip("h5py")
    example(path)


def test_field_of_the_example(example, folder):
    """The file holds the whole field, whoever wrote which part."""
    h5py = pytest.importorskip("h5py")
    example(EXAMPLES / "field_io.py", folder)
    with h5py.File(folder / "field.h5") as file:
        whole = file["u"][:]
    assert all(COMM.allgather(np.array_equal(whole, np.arange(whole.size).reshape(24, 20, 18))))


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_page(name):
    """The Python code of the documentation; a rank that fails ends by its timeout, as the others do."""
    text = (EXAMPLES.parent / name).read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)), {})
