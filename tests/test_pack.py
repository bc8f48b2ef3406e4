# SPDX-License-Identifier: Apache-2.0
"""Pack programs on the host against naive copies, and what they do about segments, flags and wrong arguments."""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from cudecomp import KernelError
from cudecomp.boxes import KernelBox, compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Copy, packed_strides

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names since 3.13
FEW = settings(deadline=None, max_examples=200)
EXTENTS = st.one_of(st.integers(1, 5), st.sampled_from([7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 100]))


def spans(extent, stride):
    """The distance from the first to the last unit of a box."""
    return sum((n - 1) * s for n, s in zip(extent, stride, strict=True))


def naive(box, source, target):
    """Copy a box between flat arrays of bytes."""
    shape = (*box.extent, box.unit)
    src = as_strided(source[box.src_offset :], shape, (*box.src_stride, 1))
    as_strided(target[box.dst_offset :], shape, (*box.dst_stride, 1))[...] = src


def strides_of(extent, gaps, order, unit):
    padded = tuple(n + gap for n, gap in zip(extent, gaps, strict=True))
    return tuple(s * unit for s in packed_strides(padded, order))


@st.composite
def boxes(draw, segment=0):
    """Boxes of any unit, with gaps, permuted on the source side, that start anywhere."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    extent = list(draw(st.tuples(*[EXTENTS] * 4)))
    while np.prod(extent) * unit > 1 << 17:
        longest = extent.index(max(extent))
        extent[longest] = extent[longest] // 2 or 1
    gaps = st.lists(st.integers(0, 3), min_size=4, max_size=4)
    src = strides_of(extent, draw(gaps), tuple(draw(st.permutations(range(4)))), unit)
    dst = strides_of(extent, draw(gaps), (0, 1, 2, 3), unit)
    live = [n > 1 for n in extent]
    offsets = (draw(st.integers(0, 70)) * unit, draw(st.integers(0, 70)) * unit)
    return KernelBox(
        tuple(extent),
        tuple(s if keep else 0 for s, keep in zip(src, live, strict=True)),
        tuple(s if keep else 0 for s, keep in zip(dst, live, strict=True)),
        *offsets,
        0,
        1,
        unit,
        segment,
    )


def table_of(*arrays):
    table = AddressTable(len(arrays))
    for base, array in enumerate(arrays):
        table[base] = array.ctypes.data
    return table


def memory(nbytes, values=None):
    """Bytes that start on a multiple of 64, numbered or zero."""
    room = np.zeros(nbytes + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][:nbytes]
    if values is not None:
        room[...] = np.random.default_rng(values).integers(0, 256, nbytes)
    return room


@FEW
@given(boxes())
def test_a_box_is_copied_and_nothing_else(box):
    source = memory(box.src_offset + spans(box.extent, box.src_stride) + box.unit, values=1)
    target = memory(box.dst_offset + spans(box.extent, box.dst_stride) + box.unit + 64, values=2)
    expected = target.copy()
    naive(box, source, expected)
    program = PackProgram("host", [box], 1, 2)
    program.run(table_of(source, target))
    assert (target == expected).all()


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (33, 65, 7), (64, 32, 32), (7, 100, 31), (1, 300, 2), (2, 1, 257), (40, 40, 1)]
)
def test_all_permutations(unit, shape):
    source = memory(int(np.prod(shape)) * unit, values=3)
    array = source.view(f"V{unit}").reshape(shape)
    for order in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]:
        target = memory(source.size)
        copy = Copy(shape, 0, 0, packed_strides(shape, (0, 1, 2)), 1, 0, packed_strides(shape, order))
        PackProgram("host", compile_copies([[copy]], unit), 1, 2).run(table_of(source, target))
        assert target.tobytes() == np.ascontiguousarray(array.transpose(order)).tobytes()


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("gathered", [False, True])
def test_offsets_and_strides_beyond_32_bits(unit, gathered):
    """Memory that is reserved alone: a box whose items lie 2^32 bytes apart, behind an offset of as many."""
    far, extent = 1 << 32, (3, 2, 5, 7)
    try:
        room = mmap.mmap(-1, 4 * far + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError as error:
        pytest.skip(f"16 GiB of addresses: {error}")
    apart = np.frombuffer(room, np.uint8)
    near = memory(210 * unit, values=6)
    wide = (far, 70 * unit, *((unit, 5 * unit) if gathered else (7 * unit, unit)))
    there = KernelBox(extent, strides_of(extent, (0,) * 4, range(4), unit), wide, 0, far - 64, 0, 1, unit, 0)
    back = KernelBox(extent, wide, strides_of(extent, (0,) * 4, range(4), unit), far - 64, 0, 1, 0, unit, 0)
    table = table_of(near, apart)
    PackProgram("host", [there], 1, 2).run(table)
    placed = as_strided(apart[far - 64 :].view(f"V{unit}"), extent, wide, writeable=False)
    assert placed.tobytes() == near.tobytes()
    wanted, near[...] = near.copy(), 0
    PackProgram("host", [back], 1, 2).run(table)
    assert (near == wanted).all()


@pytest.mark.parametrize("shift", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("itemsize", [1, 3, 4, 8, 12, 16, 24])
def test_bases_at_any_address(itemsize, shift):
    """NumPy arrays may start anywhere; complex128 on multiples of 8 is common."""
    shape = (9, 34, 5)
    source, target = memory(9 * 34 * 5 * itemsize + shift, values=4), memory(9 * 34 * 5 * itemsize + shift)
    copy = Copy(shape, 0, 0, packed_strides(shape, (0, 1, 2)), 1, 0, packed_strides(shape, (2, 1, 0)))
    table = AddressTable(2)
    table[0], table[1] = source.ctypes.data + shift, target.ctypes.data + shift
    PackProgram("host", compile_copies([[copy]], itemsize), 1, 2).run(table)
    wanted = source[shift:].view(f"V{itemsize}").reshape(shape).transpose(2, 1, 0)
    assert target[shift:].tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 12, 16, 24])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("rows", [(3, 300), (300, 3), (1, 129), (70, 131), (1, 1)])
def test_faces_go_abreast(rows, width, itemsize):
    """Narrow boxes in one segment that differ in place alone: out of an array, into it, and within it."""
    shape = (*rows, 70 + 4 * width)
    last, n = shape[-1], rows[0] * rows[1] * width
    strides, face = packed_strides(shape, (0, 1, 2)), (*rows, width)
    packed = packed_strides(face, (0, 1, 2))
    array, wire = memory(int(np.prod(shape)) * itemsize, values=6), memory(2 * n * itemsize)
    items = array.view(f"V{itemsize}").reshape(shape)
    ends = [(width, last - width), (last - 2 * width, 0)]  # of the interior, and the ghosts that they fill
    table, before = table_of(array, wire), items.copy()

    def run(copies):
        PackProgram("host", compile_copies([copies], itemsize), 1, 2).run(table)

    run([Copy(face, 0, inside, strides, 1, i * n, packed) for i, (inside, _) in enumerate(ends)])
    wanted = np.stack([before[..., inside : inside + width] for inside, _ in ends])
    assert wire.tobytes() == wanted.tobytes()
    expected = before.copy()
    for inside, ghost in ends:
        expected[..., ghost : ghost + width] = before[..., inside : inside + width]
    run([Copy(face, 1, i * n, packed, 0, ghost, strides) for i, (_, ghost) in enumerate(ends)])
    assert items.tobytes() == expected.tobytes()
    items[...] = before
    run([Copy(face, 0, inside, strides, 0, ghost, strides) for inside, ghost in ends])
    assert items.tobytes() == expected.tobytes()


def byte(segment, number):
    """A box that copies byte `number`."""
    return KernelBox((1,) * 4, (0,) * 4, (0,) * 4, number, number, 0, 1, 1, segment)


def flagged():
    """A program of four segments, the third without boxes, all but the last with a counter; its arrays and table."""
    source, target, flags = memory(8, values=5), memory(8), memory(64).view(np.uint64)
    source |= 1
    where = [(2, 0), (2, 8), (2, 16), (-1, 0)]
    program = PackProgram("host", [byte(0, 0), byte(1, 1), byte(1, 2), byte(3, 3)], 4, 3, where)
    return program, source, target, flags, table_of(source, target, flags)


def test_segments_and_their_flags():
    program, source, target, flags, table = flagged()
    program.run(table, 0, 2)
    assert (target[:3] == source[:3]).all()
    assert not target[3]
    assert flags.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    program.run(table)
    assert flags.tolist() == [2, 2, 1, 0, 0, 0, 0, 0]
    assert (target[:4] == source[:4]).all()
    program.run(table, 2, 2)
    assert flags.tolist() == [2, 2, 1, 0, 0, 0, 0, 0]


def test_segments_by_list():
    program, source, target, flags, table = flagged()
    program.run_list(table, [3, 1])
    assert (target[1:4] == source[1:4]).all()
    assert not target[0]
    program.run_list(table, [1, 2, 1])
    assert flags.tolist() == [0, 3, 1, 0, 0, 0, 0, 0]
    program.run_list(table, [])
    assert flags.tolist() == [0, 3, 1, 0, 0, 0, 0, 0]


def test_segments_run_in_the_order_given():
    """The later segment overwrites the earlier one."""
    target = memory(4)
    source = np.arange(1, 5, dtype=np.uint8)
    onto = [KernelBox((1,) * 4, (0,) * 4, (0,) * 4, number, 0, 0, 1, 1, number) for number in range(3)]
    program = PackProgram("host", onto, 3, 2)
    program.run(table_of(source, target))
    assert target[0] == 3
    program.run_list(table_of(source, target), [2, 0, 1])
    assert target[0] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"unit": 3},
        {"unit": 0},
        {"unit": 32},
        {"extent": (1, 1, 1, 0)},
        {"extent": (-1, 1, 1, 1)},
        {"src_base": 2},
        {"src_base": -1},
        {"dst_base": 2},
        {"segment": 1},
        {"segment": -1},
        {"unit": 8, "src_offset": 4},
        {"unit": 8, "dst_stride": (0, 0, 0, 4), "extent": (1, 1, 1, 2)},
    ],
    ids=str,
)
def test_wrong_boxes_are_refused(change):
    with pytest.raises(KernelError, match="create: status -1"):
        PackProgram("host", [byte(0, 0)._replace(**change)], 1, 2)


def test_wrong_programs_are_refused():
    with pytest.raises(KernelError, match="create"):
        PackProgram("host", [byte(1, 0), byte(0, 1)], 2, 2)
    with pytest.raises(KernelError, match="create"):
        PackProgram("host", [], 1, 1, [(1, 0)])
    with pytest.raises(KernelError, match="create"):
        PackProgram("host", [], 1, 1, [(0, 4)])
    with pytest.raises(ValueError, match="2 flags for 1 segments"):
        PackProgram("host", [], 1, 1, [(0, 0), (0, 8)])
    with pytest.raises(ValueError, match="abacus"):
        PackProgram("abacus", [], 0, 0)


def test_wrong_runs_are_refused():
    program, *_, table = flagged()
    for first, last in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(KernelError, match="run: status -1"):
            program.run(table, first, last)
    for listed in ([4], [-1], [0, 9]):
        with pytest.raises(KernelError, match="run_list"):
            program.run_list(table, listed)
    with pytest.raises(ValueError, match="5 segments listed"):
        program.run_list(table, [0] * 5)
    with pytest.raises(ValueError, match="got 2 base addresses, expected 3"):
        program.run(AddressTable(2))
    with pytest.raises(KernelError):
        program.run(table, 0, 1, stream=1)
    with pytest.raises(TypeError):
        program.run(None)


def test_a_closed_program():
    program, *_, table = flagged()
    program.close()
    program.close()
    with pytest.raises(RuntimeError, match="closed"):
        program.run(table)
    with pytest.raises(RuntimeError, match="closed"):
        program.run_list(table, [0])


def test_address_tables():
    table = AddressTable(2)
    assert len(table) == 2
    assert list(table) == [0, 0]
    table[1] = 2**63 + 1
    assert table[1] == 2**63 + 1
    for index in (-1, 2):
        with pytest.raises(IndexError):
            table[index]
        with pytest.raises(IndexError):
            table[index] = 1
    with pytest.raises(OverflowError):
        table[0] = -1


def test_an_empty_program():
    PackProgram("host", [], 0, 0).run(AddressTable(0))
    program = PackProgram("host", [], 3, 1)
    program.run(AddressTable(1))
    assert (program.segments, program.bases, program.device) == (3, 1, "host")
