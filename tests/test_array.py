# SPDX-License-Identifier: Apache-2.0
"""Users' arrays as the package sees them: what counts as one, as contiguous, as a dtype."""

import numpy as np
import pytest
from exporting import DLPack

from cudecomp.array import aligned_empty, host_view, plan_dtype


class Exporter:
    """An array of another library, which exports one protocol."""

    def __init__(self, **protocols):
        self.__dict__.update(protocols)


def test_numpy_arrays():
    array = np.zeros((3, 4), "f4")
    view = host_view(array, "a")
    assert view.address == array.ctypes.data
    assert (view.shape, view.strides, view.dtype, view.readonly) == ((3, 4), (16, 4), np.dtype("f4"), False)
    assert view.nbytes == 48
    assert view.contiguous
    assert view.owner is array


def test_other_libraries():
    array = np.arange(6.0).reshape(2, 3)
    for other in (Exporter(__array_interface__=array.__array_interface__), DLPack(array)):
        view = host_view(other, "a")
        assert (view.address, view.shape, view.dtype) == (array.ctypes.data, (2, 3), array.dtype)
        assert not view.readonly


def test_read_only_arrays():
    array = np.zeros(3)
    array.flags.writeable = False
    assert host_view(array, "a").readonly
    assert host_view(Exporter(__array_interface__=array.__array_interface__), "a").readonly


@pytest.mark.parametrize("thing", [None, 1.5, "text", b"bytes", [1.0], {}, object(), bytearray(8)], ids=repr)
def test_what_is_no_array(thing):
    with pytest.raises(TypeError, match="the label is a"):
        host_view(thing, "the label")


def test_device_arrays():
    with pytest.raises(TypeError, match="device memory"):
        host_view(Exporter(__cuda_array_interface__={}), "a")


def test_dlpack_of_another_device():
    class Elsewhere(DLPack):
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **options):
            raise BufferError("in device memory")

    with pytest.raises(TypeError, match="a is a Elsewhere"):
        host_view(Elsewhere(np.zeros(3)), "a")


@pytest.mark.parametrize(
    ("array", "contiguous"),
    [
        (np.zeros((3, 4)), True),
        (np.zeros((3, 4)).T, False),
        (np.zeros((3, 4))[:, :2], False),
        (np.zeros((3, 4))[:2], True),
        (np.zeros((3, 4))[::-1], False),
        (np.zeros((3, 1, 4)).transpose(1, 0, 2), True),
        (np.zeros((8, 4))[::2][:1], True),
        (np.zeros((3, 4))[:, :1][:1], True),
        (np.zeros((0, 4)).T, True),
        (np.zeros(()), True),
        (np.broadcast_to(np.zeros(1), (3,)), False),
        (np.broadcast_to(np.zeros(1), (1, 1)), True),
    ],
)
def test_contiguous(array, contiguous):
    assert host_view(array, "a").contiguous == contiguous


@pytest.mark.parametrize(
    "dtype", ["i1", "f4", ">f8", "c16", "V3", "S5", "M8[s]", float, np.float16, [("a", "i4"), ("b", "f8")]]
)
def test_dtypes(dtype):
    assert plan_dtype(dtype) == np.dtype(dtype)


@pytest.mark.parametrize(
    "dtype", [None, object, "O", [("a", "O")], "S0", "V0", str, "nonsense", 3.5, ("f8", 3)], ids=str
)
def test_unsupported_dtypes(dtype):
    """The last one is no item type: NumPy turns it into another axis."""
    with pytest.raises(TypeError, match="dtype is"):
        plan_dtype(dtype)


@pytest.mark.parametrize("dtype", ["i1", "c16", "V3", [("a", "i4"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5), (0, 3), (1, 1)])
@pytest.mark.parametrize("alignment", [64, 4096])
def test_aligned_empty(dtype, shape, alignment):
    array = aligned_empty(shape, np.dtype(dtype), alignment)
    assert array.size == 0 or array.ctypes.data % alignment == 0
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = np.zeros(shape, dtype)
