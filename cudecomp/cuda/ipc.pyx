# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns device memory that processes of one host share by CUDA IPC; knows nothing of what is in it.

Handles belong to whole allocations. One allocation is mapped once per process, however many arrays in it are shared,
and a mapping is known by the exporting process, the allocation's place and its identity: another allocation at the same
address is another one.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from cuda.bindings cimport cyruntime as rt

from cudecomp.cuda.runtime cimport check, Stream
from cudecomp.cuda.signals cimport cudecomp_signal_table, signal_table
from cudecomp.pack cimport abandon

import os
import weakref

from cudecomp.cuda.memory import DeviceMemory, free_abandoned
from cudecomp.cuda.runtime import copy, synchronize

# Smaller allocations share one of the driver's blocks, which is what would be exported.
BLOCK = 2 << 20  # bytes

_mapped = weakref.WeakValueDictionary()  # Mapped by key
_ending = []  # keys of what nobody uses, but is still mapped


def export(uintptr_t address):
    """Return what another process needs to address this memory: (key, offset in the allocation, handle).

    OSError if it cannot be shared: memory of cudaMallocAsync, managed memory, and memory mapped piece by piece.
    """
    cdef rt.cudaIpcMemHandle_t handle
    cdef uint64_t base = 0, nbytes = 0, identity = 0
    cdef const cudecomp_signal_table *functions = signal_table()
    check(<rt.cudaError_t> functions.allocation(address, &base, &nbytes, &identity), "cuPointerGetAttribute")
    cdef rt.cudaError_t status = rt.cudaIpcGetMemHandle(&handle, <void *> base)
    if status != rt.cudaSuccess:
        rt.cudaGetLastError()
        raise OSError(
            f"device memory at {address:#x} cannot be shared with other processes "
            f"({rt.cudaGetErrorName(status).decode()}): it must come from cudaMalloc, not from cudaMallocAsync, "
            "managed or virtual memory"
        )
    return (os.getpid(), base, nbytes, identity), address - base, (<char *> &handle)[:sizeof(handle)]


cdef class Mapped:
    """Another process's allocation in this process's address space, as long as this object lives."""

    cdef void *start
    cdef object __weakref__

    def __cinit__(self, bytes handle):
        cdef rt.cudaIpcMemHandle_t opened
        memcpy(&opened, <char *> handle, sizeof(opened))
        cdef rt.cudaError_t status = rt.cudaIpcOpenMemHandle(&self.start, opened, rt.cudaIpcMemLazyEnablePeerAccess)
        if status != rt.cudaSuccess:
            self.start = NULL
            rt.cudaGetLastError()
            name = rt.cudaGetErrorName(status).decode()
            raise OSError(f"cudaIpcOpenMemHandle: {name}: a peer's device memory cannot be mapped")

    def __dealloc__(self):
        # Closing may wait for the device, as freeing does.
        if self.start != NULL:
            abandon(&_close, self.start)

    @property
    def address(self):
        """Where the allocation starts here."""
        return <uintptr_t> self.start


cdef int _close(void *start) noexcept nogil:
    return rt.cudaIpcCloseMemHandle(start)


def _map(key, handle):
    """Return the mapping of an allocation, made at its first use.

    The driver does not tell an allocation from an earlier one in the same place as long as that one is mapped.
    """
    found = _mapped.get(key)
    if found is None:
        if free_abandoned():
            _ending.clear()
        process, base, *_ = key
        if any((process, base) == other[:2] for other in (*_mapped, *_ending)):
            raise OSError(f"the device memory of process {process} at {base:#x} was freed while it is still in use")
        found = _mapped[key] = Mapped(handle)
        weakref.finalize(found, _ending.append, key)
    return found


class Segment:
    """Device memory that processes of one host share.

    Made by `create` or `of` in one process and by `attach` in others.

    Attributes
    ----------
    address, nbytes : int
        Where it lies in this process.
    offer : object
        What `attach` takes, in another process.
    memory : object
        What must live as long as another process maps it.
    """

    def __init__(self, address, nbytes, memory, offer=None):
        self.address = address
        self.nbytes = nbytes
        self.memory = memory
        self.offer = offer

    @classmethod
    def create(cls, nbytes):
        """Make a segment of zeros; CudaError if the memory is not there."""
        memory = DeviceMemory(-(-max(nbytes, 1) // BLOCK) * BLOCK)
        cdef uintptr_t address = memory.address
        cdef Stream stream = Stream()  # the default one may be waiting for peers
        check(rt.cudaMemsetAsync(<void *> address, 0, memory.nbytes, stream.handle), "cudaMemsetAsync")
        synchronize(stream.address)
        return cls(address, nbytes, memory, export(address))

    @classmethod
    def of(cls, uintptr_t address, nbytes, owner):
        """Share memory that somebody else has allocated; `owner` keeps it alive."""
        return cls(address, nbytes, owner, export(address))

    @classmethod
    def attach(cls, offer, nbytes):
        """Map a segment that another process of this host has made."""
        key, offset, handle = offer
        mapped = _map(key, handle)
        return cls(mapped.address + offset, nbytes, mapped)

    @property
    def device(self):
        """The ordinal of the device it lies on."""
        return self.memory.device

    def withdraw(self):
        """Nothing to do: a handle serves those who have been given it."""

    def store(self, Py_ssize_t index, int64_t value):
        """Write a 64-bit word of it; blocks."""
        write_words(self.address + 8 * index, [value])

    def load(self, Py_ssize_t index):
        """Read a 64-bit word of it; blocks."""
        cdef int64_t value = 0
        cdef Stream stream = Stream()
        copy(<uintptr_t> &value, self.address + 8 * index, 8, stream.address)
        synchronize(stream.address)
        return value


def write_words(uintptr_t address, values):
    """Write 64-bit words to device memory, ordered after nothing; blocks."""
    cdef bytearray host = bytearray(b"".join(int(value).to_bytes(8, "little", signed=True) for value in values))
    cdef char *start = host
    cdef Stream stream = Stream()
    copy(address, <uintptr_t> start, len(host), stream.address)
    synchronize(stream.address)
