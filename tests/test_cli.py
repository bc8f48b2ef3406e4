# SPDX-License-Identifier: Apache-2.0
"""The command line in one process: what it says, its exit statuses, and that MPI is left alone where it must be."""

import importlib.util
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from cudecomp import Pencil, ProcessGrid, _build, cli, demo, dryrun, memory, probe
from cudecomp.text import ranges_text, span_text, table, time_text

FAKES = {
    "missing": ("raise ImportError('libmpi.so: no such file')", "libmpi.so: no such file"),
    "broken": ("raise RuntimeError('cannot load MPI library')", "cannot load MPI library"),
    "crashing": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    "exiting": ("import os; os._exit(3)", "exit status 3"),
    "hanging": ("import time; time.sleep(600)", "no answer within 2 s"),
}


@pytest.fixture
def fake_mpi(tmp_path, monkeypatch):
    """A function that replaces mpi4py.MPI, for processes started from here, by a module of the given text."""

    def replace(text):
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").touch()
        (tmp_path / "mpi4py" / "MPI.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return replace


@pytest.fixture
def solved(monkeypatch, capsys):
    """A function that runs the demo on this process alone and returns (exit status, output)."""
    monkeypatch.setattr(demo, "world", lambda: None)

    def run(*arguments):
        status = cli.main(["demo", "--repeats", "1", *map(str, arguments)])
        return status, capsys.readouterr().out

    return run


def said(capsys, *arguments):
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


# --- info ------------------------------------------------------------------------------------------------------------


def test_info(capsys):
    text = said(capsys, "info")
    for word in ("cudecomp", "numpy", "Devices", "host", "MPI", "CUDA-aware", "Transports", "mpi_p2p_pl"):
        assert word in text


def test_info_json(capsys):
    found = json.loads(said(capsys, "info", "--json"))
    assert found["versions"]["numpy"] == np.__version__
    assert {row["transport"] for row in found["transports"]} >= {"local", "mpi_p2p", "mpi_p2p_pl", "mpi_a2a"}
    assert found["mpi"]["problem"] is None
    assert "mpi4py.MPI" not in sys.modules


@pytest.mark.parametrize("fault", FAKES)
def test_info_survives_mpi(capsys, fake_mpi, fault):
    text, reason = FAKES[fault]
    fake_mpi(text)
    start = time.monotonic()
    found = json.loads(said(capsys, "info", "--json", "--timeout", "2" if fault == "hanging" else "30"))
    assert reason in found["mpi"]["problem"]
    works = {row["transport"]: row["works"] for row in found["transports"] if row["device"] == "host"}
    assert works == {"local": "yes", "direct": "no", "mpi_p2p": "no", "mpi_p2p_pl": "no", "mpi_a2a": "no"}
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("kernels", [False, True])
def test_info_says_how_to_get_cuda(capsys, monkeypatch, kernels):
    """How to build the kernels where there are none, and which extra to install where there are."""
    found = {**probe.facts(30), "cuda": {"problem": bindings_problem_of(monkeypatch, kernels)}}
    found["build"] |= {"cuda": kernels, "cuda_version": "13.0", "cuda_architectures": ["90"]}
    monkeypatch.setattr(probe, "facts", lambda timeout: found)
    text = said(capsys, "info")
    assert ("in the source tree: pip install '.[cu13]' --config-settings=setup-args=-Dcuda=enabled" in text) != kernels
    assert ("none: the package cuda-bindings is not installed; in the source tree" in text) == kernels
    assert "cudecomp[" not in text


def bindings_problem_of(monkeypatch, kernels):
    """What is said where cuda-bindings is missing, in a build with or without kernels."""
    monkeypatch.setattr(_build, "CUDA", kernels)
    monkeypatch.setattr(_build, "CUDA_VERSION", "13.0")
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        return memory.bindings_problem()


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_never_imports_mpi(fake_mpi):
    fake_mpi("raise SystemExit('MPI was imported')")
    code = (
        "import sys; from cudecomp.cli import main; "
        "assert main(['plan', '--shape', '9,8,7', '--ranks', '6', '--rank', '3']) == 0; "
        "assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_plan_tables(capsys):
    text = said(capsys, "plan", "--shape", "100x64x64", "--grid", "3,2", "--dtype", "complex64", "--rank", "5")
    assert "on 6 ranks in a 3 x 2 grid" in text
    assert "33 x 64 x 32" in text  # the smallest pencil of axis 1
    assert "34 x 64 x 32" in text  # the largest
    for transpose in ("0 -> 1", "1 -> 2", "2 -> 1", "1 -> 0"):
        assert transpose in text
    assert "Rank 5, at (2, 1) in the grid" in text
    assert "straight from the source array" in text


@pytest.mark.parametrize("backend", ["mpi_p2p", "direct"])
def test_plan_lists_some_messages_or_all(capsys, backend):
    arguments = ["plan", "--shape", "64,64,64", "--grid", "1,40", "--axes", "1,2", "--rank", "3", "--backend", backend]
    word = "straight into" if backend == "direct" else "send to"
    some, all_of_them = said(capsys, *arguments), said(capsys, *arguments, "--all-messages")
    assert some.count(word) == 16
    assert some.count("and 23 more; --all-messages lists them") == (1 if backend == "direct" else 2)
    assert all_of_them.count(word) == 39
    assert "more; " not in all_of_them


def test_plan_says_what_is_empty(capsys):
    text = said(capsys, "plan", "--shape", "8,8,8", "--grid", "1,16")
    assert "8 of 16 ranks (8-15), since axis 2 has 8 items for 16 parts" in text


@pytest.mark.parametrize("rank_order", ["row", "column"])
@pytest.mark.parametrize("dist_shape", [None, (3, 2, 5)])
def test_empty_ranks(rank_order, dist_shape):
    grid = ProcessGrid((4, 3), rank_order=rank_order)
    for axis in range(3):
        pencil = Pencil((5, 2, 9), grid, axis, dist_shape=dist_shape)
        wanted = [rank for rank in range(12) if 0 in pencil.shape(rank)]
        assert dryrun.empty_ranks(pencil).tolist() == wanted
        shapes = [pencil.shape(rank) for rank in range(12)]
        smallest, largest = dryrun.extents(pencil)
        assert smallest == tuple(map(min, zip(*shapes, strict=True)))
        assert largest == tuple(map(max, zip(*shapes, strict=True)))


def test_plan_of_many_ranks_is_quick(capsys):
    start = time.monotonic()
    text = said(capsys, "plan", "--shape", "2048,2048,2048", "--grid", "100,100", "--rank", "9999")
    assert "of the 10000 ranks" in text
    assert time.monotonic() - start < 30


def test_plan_of_a_direct_transpose_with_options(capsys):
    arguments = "--shape 16,16,16 --ranks 4 --grid 0,2 --rank-order column --axes 0,2 --order contiguous --halo 1:2,0,1"
    more = "--padding 0,0,3 --fields 2 --inplace --backend mpi_a2a --dist-shape 15,16,16"
    text = said(capsys, "plan", *arguments.split(), *more.split())
    assert "2 fields of float64" in text
    assert "0 -> 2" in text
    assert "0 -> 1" not in text
    assert "(1,2,0)" in text
    assert "(column order)" in text


def test_plan_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    said(capsys, "plan", "--shape", "8,8,8", "--ranks", "6", "--plot", str(tmp_path / "pencils.png"))
    assert (tmp_path / "pencils.png").read_bytes()[:4] == b"\x89PNG"


# --- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", ["12,11,10", "5,3,2", "1,1,1", "1,6,4"])
def test_demo(solved, dtype, shape):
    status, text = solved("--shape", shape, "--dtype", dtype)
    assert status == 0, text
    assert "differs from the exact solution" in text
    assert "right" in text


def test_demo_tells_a_wrong_answer(solved):
    status, text = solved("--shape", "8,8,8", "--tolerance", "1e-30")
    assert status == 1
    assert "WRONG" in text


@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<c16", "<c8", ">f8", "<i2"])
def test_demo_with_a_file(solved, tmp_path, dtype):
    f = np.asfortranarray(np.random.default_rng(1).integers(-9, 9, (6, 7, 8)).astype(dtype))
    np.save(tmp_path / "f.npy", f)
    status, text = solved("--rhs", tmp_path / "f.npy", "--out", tmp_path / "u.npy")
    assert status == 0, text
    u = np.load(tmp_path / "u.npy")
    squares = np.meshgrid(*(np.fft.fftfreq(n, 1 / n) ** 2 for n in f.shape), indexing="ij")
    laplace = np.fft.ifftn(-sum(squares) * np.fft.fftn(u))
    assert np.allclose(laplace, f - f.mean(), atol=1e-3 if u.dtype.char in "fF" else 1e-10)


def test_demo_sees_nan(solved, tmp_path):
    f = np.zeros((4, 4, 4))
    f[1, 2, 3] = np.nan
    np.save(tmp_path / "f.npy", f)
    assert solved("--rhs", tmp_path / "f.npy")[0] == 1


def test_demo_draws(solved, tmp_path):
    pytest.importorskip("matplotlib")
    assert solved("--shape", "6,6,6", "--plot", tmp_path / "demo.svg")[0] == 0
    assert "<svg" in (tmp_path / "demo.svg").read_text()


def test_demo_runs_without_mpi(fake_mpi):
    fake_mpi("raise RuntimeError('no MPI here')")
    command = [sys.executable, "-m", "cudecomp", "demo", "--shape", "6,6,6"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "on this process alone" in result.stdout


def test_demo_refuses_the_launcher_of_another_mpi(monkeypatch):
    fake = type("MPI", (), {"COMM_WORLD": type("Comm", (), {"size": 1})})
    fake.Get_library_version = staticmethod(lambda: "Some MPI 1.0\nbuilt elsewhere")
    monkeypatch.setitem(sys.modules, "mpi4py", type(sys)("mpi4py"))
    sys.modules["mpi4py"].MPI = fake
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ImportError, match=r"started 4 processes, but it is not the .* Some MPI 1"):
        demo.world()


# --- bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "": "COMMAND",
    "nothing": "invalid choice: 'nothing'",
    "info --timeout 0": "expected a number above 0",
    "plan": "--shape",
    "plan --shape 8,8,8": "neither --ranks nor --grid",
    "plan --shape 8,8,b --ranks 2": "expected integers such as",
    "plan --shape 8,8,8 --ranks 0": "expected an integer of at least 1",
    "plan --shape 8,8,8 --grid 0,3 --ranks 4": "4 ranks do not divide by 3",
    "plan --shape 8,8,8 --grid 2,2 --rank 4": "expected 0 <= rank < 4",
    "plan --shape 8,8,8 --ranks 2 --axes 0,3": "expected two axes out of (0, 1, 2)",
    "plan --shape 8,8,8 --ranks 2 --order 0,1,1": "order",
    "plan --shape 8,8,8 --ranks 2 --halo 1,1": "halo",
    "plan --shape 8,8,8 --ranks 2 --halo a": "expected 1, or 1,1,0",
    "plan --shape 8,8,8 --ranks 2 --dtype object": "expected a NumPy dtype",
    "plan --shape 8,8,8 --ranks 2 --backend nothing": "invalid choice",
    "demo --shape 8,8": "expected three extents",
    "demo --shape 8,8,8 --grid 2,2": "has 4 ranks, but size is 1",
    "demo --rhs nowhere.npy": "nowhere.npy",
    "demo --shape 4,4,4 --out /nowhere/u.npy": "no folder /nowhere",
    "demo --shape 4,4,4 --backend mpi_p2p": "needs a communicator",
    "demo --dtype int8": "invalid choice: 'int8'",
    "demo --repeats 0": "expected an integer of at least 1",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(monkeypatch, capsys, line):
    monkeypatch.setattr(demo, "world", lambda: None)
    assert cli.main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("cudecomp: ")
    assert output.err.count("\n") == 1
    assert BAD[line] in output.err


BAD_FILES = {
    "empty": (b"", "expected a .npy file"),
    "text": (b"hello, this is not an array", "expected a .npy file"),
    "flat": (np.zeros(8), "expected numbers in three axes"),
    "words": (np.full((2, 2, 2), "a"), "expected numbers in three axes"),
    "objects": (np.full((2, 2, 2), None), "expected a .npy file"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(monkeypatch, capsys, tmp_path, kind):
    monkeypatch.setattr(demo, "world", lambda: None)
    content, reason = BAD_FILES[kind]
    path = tmp_path / "f.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content, allow_pickle=True)
    assert cli.main(["demo", "--rhs", str(path)]) == 2
    assert reason in capsys.readouterr().err


def test_a_result_does_not_overwrite_its_input(solved, capsys, tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((2, 2, 2)))
    assert cli.main(["demo", "--rhs", str(tmp_path / "f.npy"), "--out", str(tmp_path / "f.npy")]) == 2
    assert "would overwrite" in capsys.readouterr().err


def test_pictures_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plan", "--shape", "8,8,8", "--ranks", "2", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "info ", "plan ", "demo "])
def test_help(capsys, command):
    assert cli.main(f"{command}--help".split()) == 0
    assert "usage: cudecomp" in capsys.readouterr().out


# --- text ------------------------------------------------------------------------------------------------------------


def test_text():
    assert table(("a", "bb"), [("xyz", "1"), ("x", "22")], right=(1,)) == [
        "a    bb",
        "---  --",
        "xyz   1",
        "x    22",
    ]
    assert ranges_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges_text(range(0, 40, 2), most=2) == "0, 2, ..."
    assert ranges_text([]) == ""
    assert [time_text(t) for t in (12.345, 0.0123, 4.5e-6)] == ["12.3 s", "12.3 ms", "4.5 us"]
    assert span_text("1", "1") == "1"
    assert span_text("1", "2") == "1 to 2"
