# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns pack programs: loads the kernel libraries and runs lists of strided copies; knows nothing of messages."""

from libc.stdint cimport intptr_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

import logging
import os

from cudecomp.errors import KernelError

from cudecomp.library cimport open_symbol

ctypedef const cudecomp_kernel_table *(*kernels_function)() noexcept nogil

cdef const cudecomp_kernel_table *_host = NULL
cdef const cudecomp_kernel_table *_cuda = NULL

# What nobody uses any more, to be freed: freeing device memory waits for the whole device, so destructors only queue.
# In C, since destructors run when the interpreter ends too, after Python's objects are gone.
cdef struct Abandoned:
    release_function release
    void *thing
    Abandoned *next

cdef Abandoned *_abandoned = NULL


cdef void abandon(release_function release, void *thing) noexcept:
    """Queue something for `free_abandoned`; the GIL is held."""
    global _abandoned
    cdef Abandoned *entry = <Abandoned *> malloc(sizeof(Abandoned))
    if entry != NULL:  # else it lives as long as the process
        entry.release, entry.thing, entry.next = release, thing, _abandoned
        _abandoned = entry


def free_abandoned():
    """Free what destructors have queued; may wait for the device."""
    global _abandoned
    cdef Abandoned *entry
    cdef int status = 0, found
    while _abandoned != NULL:
        entry = _abandoned
        _abandoned = entry.next
        found = entry.release(entry.thing)
        status = status or found
        free(entry)
    if status != 0:  # in the middle of something else, which has nothing to do with it
        logging.getLogger("cudecomp").warning("freeing device memory failed with status %d", status)


cdef const cudecomp_kernel_table *_open(str device) except NULL:
    """Load the kernel library of a device from the package's folder."""
    path = os.path.join(os.path.dirname(__file__), f"libcudecomp_{device}.so")
    cdef void *symbol = open_symbol(path, "cudecomp_kernels")
    cdef const cudecomp_kernel_table *table = (<kernels_function> symbol)()
    if table.abi != CUDECOMP_ABI:
        raise ImportError(f"{path} has kernel ABI {table.abi}, this package needs {CUDECOMP_ABI}: reinstall cudecomp")
    return table


cdef const cudecomp_kernel_table *kernel_table(str device) except NULL:
    """Return the kernels of a device, loaded at their first use."""
    global _host, _cuda
    if device == "host":
        if _host == NULL:
            _host = _open(device)
        return _host
    if device == "cuda":
        if _cuda == NULL:
            _cuda = _open(device)
        return _cuda
    raise ValueError(f"pack program: device is {device!r}, expected 'host' or 'cuda'")


cdef class AddressTable:
    """The base addresses of one run of a program: a fixed number of addresses, all 0 at first."""

    def __cinit__(self, Py_ssize_t count):
        self.count = count
        self.address = <void **> calloc(max(count, 1), sizeof(void *))
        if self.address == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.address)

    def __len__(self):
        return self.count

    def __getitem__(self, Py_ssize_t index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return <uintptr_t> self.address[index]

    def __setitem__(self, Py_ssize_t index, uintptr_t address):
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.address[index] = <void *> address


cdef class PackProgram:
    """A list of strided copies in numbered segments, compiled for one device.

    Parameters
    ----------
    device : {"host", "cuda"}
        Whose kernels run it; CUDA programs belong to the device that is current now.
    boxes : list of cudecomp.boxes.KernelBox
        The copies, by rising segment.
    segments : int
        The number of segments; a segment may be empty.
    bases : int
        The length of the address tables given to `run`.
    flags : list of (int, int), optional
        Per segment the base and byte offset of its completion counter; a base of -1 means none.
    max_blocks : int
        Bound on the thread blocks of a launch; 0 fills the device.
    slots : int
        How many bases follow those of the table that are looked up in device memory while the program runs, in the
        array of addresses at the last base of the table; what has a null address is left out. CUDA only.

    Notes
    -----
    Local. One thread at a time, on CUDA one stream at a time, may run a program. `segments`, `bases` and `device` can
    be read.
    """

    def __cinit__(self, str device, list boxes, Py_ssize_t segments, Py_ssize_t bases, flags=None,
                  int max_blocks=0, Py_ssize_t slots=0):
        self.kernels = kernel_table(device)
        self.device = device
        self.segments = segments
        self.bases = bases
        self.listed = <int64_t *> malloc(max(segments, 1) * sizeof(int64_t))
        cdef cudecomp_box *table = <cudecomp_box *> calloc(max(len(boxes), 1), sizeof(cudecomp_box))
        cdef cudecomp_flag *marks = NULL
        cdef int status
        try:
            if self.listed == NULL or table == NULL:
                raise MemoryError
            for number, box in enumerate(boxes):
                _fill(&table[number], box)
            if flags is not None:
                marks = _flag_table(flags, segments)
            status = self.kernels.create(table, len(boxes), marks, segments, bases, slots, max_blocks, &self.program)
            self.check("create", status)
        finally:
            free(table)
            free(marks)

    def __dealloc__(self):
        if self.program != NULL:
            if self.device == "host":
                self.kernels.destroy(self.program)
            else:
                abandon(<release_function> self.kernels.destroy, self.program)
        free(self.listed)

    def close(self):
        """Free the program; idempotent. On CUDA this may wait for the device."""
        cdef cudecomp_program *program = self.program
        self.program = NULL
        if program != NULL:
            self.check("destroy", self.kernels.destroy(program))

    def run(self, AddressTable table not None, Py_ssize_t first=0, Py_ssize_t last=-1, intptr_t stream=0):
        """Copy the segments first <= s < last in order (last < 0: to the end).

        Host: blocking, without the GIL. CUDA: ordered on `stream`, nothing is allocated.
        """
        self.launch(table, first, self.segments if last < 0 else last, <void *> stream)

    def run_list(self, AddressTable table not None, segments, intptr_t stream=0):
        """Copy the listed segments in the order given; otherwise as `run`."""
        cdef Py_ssize_t count = 0
        cdef int status
        self.usable(table)
        if len(segments) > self.segments:
            raise ValueError(f"pack program: {len(segments)} segments listed of a program with {self.segments}")
        for segment in segments:
            self.listed[count] = segment
            count += 1
        with nogil:
            status = self.kernels.run_list(self.program, <void *const *> table.address, self.listed, count,
                                           <void *> stream)
        self.check("run_list", status)

    cdef int usable(self, AddressTable table) except -1:
        """Raise unless the program can be run with a table."""
        if self.program == NULL:
            raise RuntimeError("pack program: it is closed")
        if table.count != self.bases:
            raise ValueError(f"pack program: got {table.count} base addresses, expected {self.bases}")
        return 0

    cdef int launch(self, AddressTable table, int64_t first, int64_t last, void *stream) except -1:
        cdef int status
        self.usable(table)
        with nogil:
            status = self.kernels.run(self.program, <void *const *> table.address, first, last, stream)
        return self.check("run", status)

    cdef int check(self, str call, int status) except -1:
        """Turn a status of a kernel library into an exception."""
        if status == 0:
            return 0
        if status == -2:
            raise MemoryError(f"{self.device} kernels, {call}: out of host memory")
        text = self.kernels.error_string(status).decode()
        raise KernelError(f"{self.device} kernels, {call}: status {status} ({text})")


cdef int _fill(cudecomp_box *target, box) except -1:
    cdef int d
    for d in range(4):
        target.extent[d] = box.extent[d]
        target.src_stride[d] = box.src_stride[d]
        target.dst_stride[d] = box.dst_stride[d]
    target.src_offset = box.src_offset
    target.dst_offset = box.dst_offset
    target.src_base = box.src_base
    target.dst_base = box.dst_base
    target.unit = box.unit
    target.segment = box.segment
    return 0


cdef cudecomp_flag *_flag_table(flags, Py_ssize_t segments) except NULL:
    if len(flags) != segments:
        raise ValueError(f"pack program: {len(flags)} flags for {segments} segments")
    cdef cudecomp_flag *marks = <cudecomp_flag *> calloc(max(segments, 1), sizeof(cudecomp_flag))
    if marks == NULL:
        raise MemoryError
    for number, (base, offset) in enumerate(flags):
        marks[number].base = base
        marks[number].offset = offset
    return marks
