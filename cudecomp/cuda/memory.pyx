# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns device and pinned memory and the arrays made of it; knows nothing of plans.

Freeing device or pinned memory waits for the whole device, kernels that wait for peers included. Destructors therefore
only queue memory; it is freed by `free_abandoned`, when a plan is closed or memory is asked for.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from cuda.bindings cimport cyruntime as rt

from cudecomp.cuda.runtime cimport check
from cudecomp.pack cimport abandon

import weakref
from math import prod

import numpy as np

from cudecomp.cuda.runtime import copy as copy_bytes
from cudecomp.cuda.runtime import current_device, synchronize
from cudecomp.pack import free_abandoned as free_queued

# Work on the device that may wait for peers: an event after it, by whoever put it onto a stream and is still open, and
# after the last work of those that were closed, with what that work uses.
open_work = weakref.WeakKeyDictionary()
closed_work = []


def free_abandoned():
    """Free the memory and programs whose last owner is gone; may wait for the device.

    Does nothing, and returns False, while work on the device may be waiting for peers: it would wait as long.
    """
    closed_work[:] = [(event, kept) for event, kept in closed_work if not event.done()]
    if closed_work or not all(event.done() for event in list(open_work.values())):
        return False
    free_queued()
    return True


cdef int _free_device(void *pointer) noexcept nogil:
    return rt.cudaFree(pointer)


cdef int _free_pinned(void *pointer) noexcept nogil:
    return rt.cudaFreeHost(pointer)


cdef class DeviceMemory:
    """A block of device memory, aligned to 256 bytes at least; freed some time after its last owner is gone."""

    cdef void *pointer
    cdef readonly size_t nbytes
    cdef readonly int device

    def __cinit__(self, size_t nbytes):
        free_abandoned()
        self.nbytes = nbytes
        self.device = current_device()
        check(rt.cudaMalloc(&self.pointer, max(nbytes, 1)), f"cudaMalloc of {nbytes} bytes")

    def __dealloc__(self):
        if self.pointer != NULL:
            abandon(&_free_device, self.pointer)

    @property
    def address(self):
        """Where it starts."""
        return <uintptr_t> self.pointer


cdef class PinnedMemory:
    """A block of page-locked host memory that all devices can address under the host's address."""

    cdef void *pointer
    cdef readonly size_t nbytes

    def __cinit__(self, size_t nbytes):
        free_abandoned()
        self.nbytes = nbytes
        check(rt.cudaHostAlloc(&self.pointer, max(nbytes, 1), rt.cudaHostAllocMapped | rt.cudaHostAllocPortable),
              f"cudaHostAlloc of {nbytes} bytes")

    def __dealloc__(self):
        if self.pointer != NULL:
            abandon(&_free_pinned, self.pointer)

    @property
    def address(self):
        """Where it starts, for the host and for devices."""
        return <uintptr_t> self.pointer

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.pointer, self.nbytes, 0, flags)


# --- DLPack: the parts of its stable ABI that an exporter needs -------------------------------------------------------

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void *owner
    void (*deleter)(DLManagedTensor *) noexcept with gil

DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
DEVICE_CUDA = 2


cdef void _delete(DLManagedTensor *managed) noexcept with gil:
    Py_DECREF(<object> managed.owner)
    free(managed.tensor.shape)
    free(managed)


cdef void _destroy_capsule(object capsule) noexcept:
    # A consumer renames the capsule and calls the deleter itself.
    if PyCapsule_IsValid(capsule, "dltensor"):
        _delete(<DLManagedTensor *> PyCapsule_GetPointer(capsule, "dltensor"))


class DeviceArray:
    """An array in device memory, in C order, that other libraries take without a copy.

    CuPy (`cupy.asarray`), PyTorch (`torch.as_tensor`), JAX and others read it through `__cuda_array_interface__` or
    DLPack; `numpy.asarray` makes a copy on the host. The memory belongs to the array and to all views of it.

    Attributes
    ----------
    shape : tuple of int
        In memory order.
    dtype : numpy.dtype
        Of the items.
    memory : object
        The block that holds it; its `address` is where the array starts.
    """

    def __init__(self, shape, dtype, memory=None):
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.memory = DeviceMemory(self.nbytes) if memory is None else memory

    @property
    def ndim(self):
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self):
        """The number of items."""
        return prod(self.shape)

    @property
    def nbytes(self):
        """The number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr,
                "data": (self.memory.address, False), "strides": None, "version": 3, "stream": None}

    def __dlpack_device__(self):
        return DEVICE_CUDA, self.memory.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export as DLPack. The array has no stream of its own, so there is nothing to order."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("DeviceArray exports its own memory only, without a copy")
        if self.dtype.kind not in DLPACK_CODES or not self.dtype.isnative:
            raise BufferError(f"DLPack has no dtype for {self.dtype}")
        cdef Py_ssize_t ndim = len(self.shape), d
        cdef DLManagedTensor *managed = <DLManagedTensor *> malloc(sizeof(DLManagedTensor))
        cdef int64_t *shape = <int64_t *> malloc(max(2 * ndim, 1) * sizeof(int64_t))
        if managed == NULL or shape == NULL:
            free(managed)
            free(shape)
            raise MemoryError
        cdef int64_t step = 1
        for d in range(ndim - 1, -1, -1):
            shape[d] = self.shape[d]
            shape[ndim + d] = step
            step *= shape[d]
        cdef uintptr_t address = self.memory.address
        managed.tensor = DLTensor(<void *> address, DEVICE_CUDA, self.memory.device, <int32_t> ndim,
                                  DLPACK_CODES[self.dtype.kind], 8 * self.dtype.itemsize, 1, shape, shape + ndim, 0)
        Py_INCREF(self.memory)
        memory = self.memory
        managed.owner = <void *> memory
        managed.deleter = _delete
        return PyCapsule_New(managed, "dltensor", &_destroy_capsule)

    def __array__(self, dtype=None, copy=None):
        """Return a copy on the host; blocks until all earlier work on the device's default stream is done."""
        if copy is False:
            raise ValueError("DeviceArray: its items are in device memory, a copy cannot be avoided")
        host = np.empty(self.shape, self.dtype)
        _transfer(host, self.memory.address, to_device=False)
        return host if dtype is None else host.astype(dtype)

    def set(self, values):
        """Copy host values of the same shape into the array; blocks until it is done."""
        values = np.ascontiguousarray(values, self.dtype)
        if values.shape != self.shape:
            raise ValueError(f"DeviceArray.set: got shape {values.shape}, expected {self.shape}")
        _transfer(values, self.memory.address, to_device=True)

    def __repr__(self):
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.memory.device})"


def _transfer(host, uintptr_t address, bint to_device):
    """Copy between a C ordered host array and the device, ordered after the legacy default stream; blocks."""
    cdef uintptr_t near = host.__array_interface__["data"][0]
    if host.nbytes:
        copy_bytes(address if to_device else near, near if to_device else address, host.nbytes)
        synchronize()
