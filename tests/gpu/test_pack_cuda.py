# SPDX-License-Identifier: Apache-2.0
"""Pack programs on the GPU against the same programs on the host: copies, flags, ranges, lists, graphs."""

import numpy as np
import pytest

from cudecomp.boxes import compile_copies
from cudecomp.pack import AddressTable, PackProgram
from cudecomp.schedule import Copy, packed_strides

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

SIZE = 1 << 20


def random_copies(rng, itemsize, count):
    """Copies between two buffers of SIZE bytes that do not overlap in the destination, any order on either side."""
    room = SIZE // itemsize // count
    copies = []
    for i in range(count):
        ndim = rng.integers(1, 5)
        shape = tuple(int(n) for n in rng.integers(1, 2 + int((room / 2) ** (1 / ndim)), ndim))
        outer = tuple(n + int(rng.integers(0, 3)) for n in shape)
        while np.prod(outer) > room - 4:
            shape = tuple(max(1, n // 2) for n in shape)
            outer = tuple(n + 1 for n in shape)
        sides = []
        for _ in range(2):
            order = tuple(int(a) for a in rng.permutation(ndim))
            sides.append((i * room + int(rng.integers(0, 4)), packed_strides(outer, order)))
        copies.append(Copy(shape, 0, *sides[0], 1, *sides[1]))
    return copies


def run_both(itemsize, segments, action):
    """Run `action(program, table)` on both devices from the same random bytes; return the two destinations."""
    boxes = compile_copies(segments, itemsize)
    rng = np.random.default_rng(1)
    data, poison = rng.integers(0, 256, SIZE, np.uint8), rng.integers(0, 256, SIZE, np.uint8)
    results = []
    for device, module in (("host", np), ("cuda", cupy)):
        src, dst = module.asarray(data), module.asarray(poison.copy())
        table = AddressTable(2)
        for i, array in enumerate((src, dst)):
            table[i] = array.data.ptr if device == "cuda" else array.__array_interface__["data"][0]
        program = PackProgram(device, boxes, len(segments), 2)
        action(program, table)
        results.append(cupy.asnumpy(dst))
        program.close()
    return results


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 12, 16, 24, 32, 40])
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_equal_the_host(itemsize, seed):
    rng = np.random.default_rng(seed)
    for count in (1, 2, 7, 40):
        copies = random_copies(rng, itemsize, count)
        cut = sorted(rng.integers(0, count + 1, 3))
        segments = [copies[a:b] for a, b in zip([0, *cut], [*cut, count], strict=True)]
        host, device = run_both(itemsize, segments, lambda program, table: program.run(table))
        assert np.array_equal(host, device)


def test_sanitize_small_programs_of_every_kind():
    """Small enough for compute-sanitizer, with every item size and many shapes."""
    for itemsize in (1, 2, 4, 8, 16, 12):
        rng = np.random.default_rng(itemsize)
        copies = random_copies(rng, itemsize, 12)
        host, device = run_both(itemsize, [copies[:5], [], copies[5:]], lambda program, table: program.run(table))
        assert np.array_equal(host, device)


def test_lists_and_ranges_copy_what_they_name():
    copies = random_copies(np.random.default_rng(5), 8, 20)
    segments = [[copy] for copy in copies]

    def some(program, table):
        program.run(table, 3, 5)
        program.run_list(table, [17, 0, 9])
        program.run_list(table, [])
        program.run(table, 4, 4)

    host, device = run_both(8, segments, some)
    assert np.array_equal(host, device)
    full, _ = run_both(8, segments, lambda program, table: program.run(table))
    assert not np.array_equal(host, full)


@pytest.mark.parametrize("count", [1, 5, 300, 4096])
def test_flags_count_completed_runs_however_segments_are_launched(count):
    from cudecomp.cuda.graph import Graph, PackStep, Work
    from cudecomp.cuda.memory import PinnedMemory
    from cudecomp.cuda.runtime import Flags, synchronize

    items = 300
    segments = [[Copy((items,), 0, i * items, (1,), 1, i * items, (1,))] for i in range(count)]
    segments[count // 2] = []
    flags = Flags(PinnedMemory(8 * count), count)
    program = PackProgram("cuda", compile_copies(segments, 4), count, 3, [(2, 8 * i) for i in range(count)])
    src, dst = cupy.arange(count * items, dtype="i4"), cupy.zeros(count * items, "i4")
    table = AddressTable(3)
    table[0], table[1], table[2] = src.data.ptr, dst.data.ptr, flags.memory.address
    graphs = [Graph(Work([PackStep(program, table, singles=singles)])) for singles in (0, count)]
    launches = [
        lambda: program.run(table),
        lambda: [program.run(table, i, i + 1) for i in range(count)],
        lambda: graphs[0].launch(0),
        lambda: program.run_list(table, list(reversed(range(count)))),
        lambda: graphs[1].launch(0),
        lambda: (program.run(table, 0, count // 3), program.run(table, count // 3)),
    ]
    for launch in launches:
        flags.begin()
        assert flags.ready(0) == 0
        launch()
        synchronize()
        assert flags.ready(0) == count


def test_what_a_flag_announces_is_there():
    """The host looks at a segment in pinned memory as soon as its flag is up, while the kernel goes on."""
    from cudecomp.cuda.memory import PinnedMemory
    from cudecomp.cuda.runtime import Flags, synchronize

    count, items = 256, 4096
    flags, target = Flags(PinnedMemory(8 * count), count), PinnedMemory(count * items * 4)
    seen = np.frombuffer(target, "i4").reshape(count, items)
    segments = [[Copy((items,), 0, i * items, (1,), 1, i * items, (1,))] for i in range(count)]
    program = PackProgram("cuda", compile_copies(segments, 4), count, 3, [(2, 8 * i) for i in range(count)])
    src = cupy.empty(count * items, "i4")
    table = AddressTable(3)
    table[0], table[1], table[2] = src.data.ptr, target.address, flags.memory.address
    for stamp in range(200):
        src[...] = stamp
        synchronize()
        flags.begin()
        program.run(table)
        first = 0
        while first < count:
            last = flags.ready(first)
            assert (seen[first:last] == stamp).all()
            first = last
        synchronize()
