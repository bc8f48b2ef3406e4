# SPDX-License-Identifier: Apache-2.0
"""Whole arrays of one process: scatter and gather without a communicator, and what they refuse."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from exercise import DTYPES, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, pencils

from cudecomp import Pencil, ProcessGrid, gather, scatter, testing
from cudecomp import whole as whole_module
from cudecomp.array import host_view

SHAPE = (5, 6, 7)
ALONE = ProcessGrid((1, 1))
WIDE = Pencil(SHAPE, ALONE, 1, order=(2, 0, 1), halo=((1, 2), 0, 1), padding=(0, 3, 1))


def whole(shape, dtype="f8", fields=None):
    """An array of the global shape whose items are its linear indices, plus a thousand per field."""
    linear = np.arange(np.prod(shape)).reshape(shape)
    return testing.items(linear if fields is None else linear + 1000 * np.arange(fields).reshape(-1, 1, 1, 1), dtype)


def array_with_canaries(field, dtype="f8"):
    """What a part of `whole` with fields looks like in WIDE, with canaries."""
    return testing.VirtualRanks(1).scatter(whole(SHAPE, dtype, field + 1)[field], WIDE)[0]


@PROPERTY
@given(st.data(), st.sampled_from(list(DTYPES.values())))
def test_there_and_back(data, dtype):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    pencil = data.draw(pencils(shape, ProcessGrid((1,) * (len(shape) - 1))))
    out = testing.poisoned(pencil, 0, dtype)
    assert scatter(whole(shape, dtype), pencil, out=out) is out
    testing.check(pencil, 0, out)
    assert same_bytes(gather(out, pencil), whole(shape, dtype))


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype("M8[s]"), np.dtype(">i4"), np.dtype("?"), np.dtype("U3")])
def test_new_arrays(dtype):
    array = whole(SHAPE, dtype)
    part = scatter(array, WIDE)
    assert (part.shape, part.dtype) == (WIDE.memory_shape(0), dtype)
    outside = testing.fill(WIDE, 0) < 0
    assert not part[outside].tobytes().strip(b"\0")
    back = gather(part, WIDE)
    assert (back.shape, back.dtype) == (SHAPE, dtype)
    assert same_bytes(back, array)


@pytest.mark.parametrize("form", ["array", "sequence", "flat"])
def test_fields(form):
    array = whole(SHAPE, "f8", 3)
    expected = [array_with_canaries(field) for field in range(3)]
    out = np.stack([testing.poisoned(WIDE, 0, "f8")] * 3)
    if form == "sequence":
        out = list(out)
    elif form == "flat":
        out = np.concatenate([out.reshape(3, -1), np.full((3, 4), 77.0)], axis=1)
    assert scatter(array, WIDE, out=out, fields=3) is out
    for field in range(3):
        testing.check(WIDE, 0, out[field], expected[field])
        assert form != "flat" or (out[field][-4:] == 77).all()
    assert same_bytes(gather(out, WIDE, fields=3), array)
    assert same_bytes(gather(scatter(array, WIDE, fields=3), WIDE, fields=3), array)


def test_whole_arrays_of_any_strides(tmp_path):
    """Transposed, reversed, with gaps, and mapped from a file."""
    array = whole(SHAPE)
    part = scatter(array, WIDE)
    for strided in (np.asfortranarray(array), array[::-1].copy()[::-1], np.repeat(array, 2, axis=2)[:, :, ::2]):
        assert same_bytes(scatter(strided, WIDE), part)
    room = np.full((7, 6, 10), -1.0)
    out = room.transpose(2, 1, 0)[::-2]
    assert gather(part, WIDE, out=out) is out
    assert same_bytes(out, array)
    assert (room[:, :, ::2] == -1).all()
    mapped = np.memmap(tmp_path / "whole", "f8", "w+", shape=SHAPE)
    assert gather(part, WIDE, out=mapped) is mapped
    mapped.flush()
    assert same_bytes(np.fromfile(tmp_path / "whole").reshape(SHAPE), array)
    read_only = np.memmap(tmp_path / "whole", "f8", "r", shape=SHAPE)
    assert same_bytes(scatter(read_only, WIDE), part)


def test_arrays_that_export_the_array_interface():
    class Exporter:
        def __init__(self, array):
            self.__array_interface__ = array.__array_interface__
            self.keep = array

    part = testing.fill(WIDE, 0, "f8")
    assert same_bytes(gather(Exporter(part), WIDE), whole(SHAPE))


GOOD = np.zeros(SHAPE)
PART = np.zeros(WIDE.memory_shape(0))
LOCKED = PART.copy()
LOCKED.flags.writeable = False
BAD_SCATTERS = {
    "no pencil": ((GOOD, "x"), {}, TypeError, "scatter: pencil is a str, expected a Pencil"),
    "ranks": ((GOOD, Pencil(SHAPE, ProcessGrid((1, 2)), 0)), {}, ValueError, r"a grid of 2 ranks .* expected 1"),
    "root": ((GOOD, WIDE), {"root": 1}, ValueError, "scatter: root is 1, expected 0 <= root < 1"),
    "half a root": ((GOOD, WIDE), {"root": 0.5}, TypeError, "scatter: root must be an integer"),
    "no fields": ((GOOD, WIDE), {"fields": 0}, ValueError, "scatter: fields is 0, expected at least 1"),
    "half a field": ((GOOD, WIDE), {"fields": 0.5}, TypeError, "scatter: fields must be an integer"),
    "nothing": ((None, WIDE), {}, TypeError, "scatter: array is a NoneType"),
    "memory order": ((PART, WIDE), {}, ValueError, r"scatter: array has shape \(10, 8, 9\), expected \(5, 6, 7\)"),
    "fields": ((GOOD, WIDE), {"fields": 2}, ValueError, r"expected \(2, 5, 6, 7\), 2 fields of the global shape"),
    "objects": ((GOOD.astype(object), WIDE), {}, TypeError, "without Python objects"),
    "device": ((GOOD, WIDE), {"device": "abacus"}, ValueError, "scatter: device is 'abacus'"),
    "dtype": ((GOOD, WIDE), {"out": PART.astype("f4")}, TypeError, "scatter: out has dtype float32, expected float64"),
    "shape": ((GOOD, WIDE), {"out": GOOD}, ValueError, r"scatter: out has shape \(5, 6, 7\)"),
    "read-only": ((GOOD, WIDE), {"out": LOCKED}, ValueError, "scatter: out is read-only"),
    "gaps": ((GOOD, WIDE), {"out": np.zeros((10, 8, 18))[:, :, ::2]}, ValueError, "expected C order without gaps"),
    "a list": ((GOOD, WIDE), {"out": [PART, PART]}, ValueError, "scatter: out has 2 arrays, expected 1"),
}
BAD_GATHERS = {
    "no pencil": ((PART, None), {}, TypeError, "gather: pencil is a NoneType, expected a Pencil"),
    "nothing": ((None, WIDE), {}, TypeError, "gather: array is a NoneType"),
    "axis order": ((GOOD, WIDE), {}, ValueError, r"gather: array has shape \(5, 6, 7\)"),
    "no arrays": (([], WIDE), {}, TypeError, "gather: array is a list"),
    "objects": ((PART.astype(object), WIDE), {}, TypeError, "without Python objects"),
    "mixed dtypes": (([PART, PART.astype("f4")], WIDE), {"fields": 2}, TypeError, "float32, expected float64"),
    "out shape": ((PART, WIDE), {"out": PART}, ValueError, r"gather: out has shape \(10, 8, 9\), expected \(5, 6, 7\)"),
    "out dtype": ((PART, WIDE), {"out": GOOD.astype(int)}, TypeError, "gather: out has dtype int64, expected float64"),
    "out read-only": ((PART, WIDE), {"out": np.broadcast_to(0.0, SHAPE)}, ValueError, "gather: out is read-only"),
}


@pytest.mark.parametrize("name", BAD_SCATTERS)
def test_bad_arguments_of_scatter(name):
    arguments, options, kind, text = BAD_SCATTERS[name]
    with pytest.raises(kind, match=text):
        scatter(*arguments, **options)


@pytest.mark.parametrize("name", BAD_GATHERS)
def test_bad_arguments_of_gather(name):
    arguments, options, kind, text = BAD_GATHERS[name]
    with pytest.raises(kind, match=text):
        gather(*arguments, **options)


class Device:
    """Stands for an array in device memory: the host may look at `cells` through copies only."""

    def __init__(self, cells):
        self.cells = cells


@pytest.fixture
def devices(monkeypatch):
    """Arrays of the class Device are taken for device memory; returns the list of copies, "up" and "down"."""
    copies = []

    def view(array, what):
        if not isinstance(array, Device):
            return host_view(array, what)
        return host_view(array.cells, what)._replace(owner=array)

    def to_host(view):
        copies.append("down")
        return view.owner.cells.copy()

    def to_device(host, view):
        copies.append("up")
        view.owner.cells[...] = host

    monkeypatch.setattr(whole_module, "_view", view)
    transfer = SimpleNamespace(to_host=to_host, to_device=to_device)
    monkeypatch.setitem(sys.modules, "cudecomp.cuda.transfer", transfer)
    return copies


@pytest.mark.parametrize("form", ["array", "sequence"])
def test_device_arrays_pass_through_copies(devices, form):
    """One copy each way for `out`, so that its halo stays, and one down for what is only read."""
    array = whole(SHAPE, "f8", 2)
    cells = np.stack([testing.poisoned(WIDE, 0, "f8")] * 2)
    out = Device(cells) if form == "array" else [Device(cells[0]), Device(cells[1])]
    assert scatter(array, WIDE, out=out, fields=2) is out
    arrays = 1 if form == "array" else 2
    assert devices == ["down"] * arrays + ["up"] * arrays
    for field in range(2):
        testing.check(WIDE, 0, cells[field], array_with_canaries(field))
    devices.clear()
    assert same_bytes(gather(out, WIDE, fields=2), array)
    assert devices == ["down"] * arrays


def test_device_memory_in_a_build_without_kernels():
    from cudecomp import _build

    if _build.CUDA:
        pytest.skip("this build has them")

    class Device:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (0, False), "version": 3}  # noqa: RUF012

    with pytest.raises(RuntimeError, match="gather: array: got device memory, but this build"):
        gather(Device(), WIDE)
    with pytest.raises(RuntimeError, match="scatter: got device memory, but this build"):
        scatter(GOOD, WIDE, device="cuda")


def test_no_mpi_without_a_communicator():
    code = """
import sys, numpy
from cudecomp import Pencil, ProcessGrid, gather, scatter
x = Pencil((2, 3, 4), ProcessGrid((1, 1)), 0, halo=1)
assert (gather(scatter(numpy.ones((2, 3, 4)), x), x) == 1).all()
assert "mpi4py.MPI" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
