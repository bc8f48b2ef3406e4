# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns streams, events and completion flags, and the one checker of CUDA statuses; knows nothing of plans."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from cuda.bindings cimport cyruntime as rt

from cudecomp.pack cimport cudecomp_kernel_table, kernel_table

from cudecomp.errors import CudaError

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) noexcept, void *argument) nogil

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t cudecomp_load_acquire(const uint64_t *flag) {
        return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    }
    """
    uint64_t cudecomp_load_acquire(const uint64_t *flag) noexcept nogil


cdef int check(rt.cudaError_t status, str call) except -1:
    """Turn a CUDA status into an exception that names the call, the code and the text."""
    if status == rt.cudaSuccess:
        return 0
    rt.cudaGetLastError()
    name, text = rt.cudaGetErrorName(status).decode(), rt.cudaGetErrorString(status).decode()
    raise CudaError(f"{call}: {name} ({<int> status}): {text}")


def device_count():
    """Return the number of CUDA devices; CudaError without a driver."""
    cdef int count = 0
    check(rt.cudaGetDeviceCount(&count), "cudaGetDeviceCount")
    return count


def current_device():
    """Return the ordinal of the device that is current in this thread."""
    cdef int device = 0
    check(rt.cudaGetDevice(&device), "cudaGetDevice")
    return device


def set_device(int device):
    """Make a device current in this thread."""
    check(rt.cudaSetDevice(device), "cudaSetDevice")


def device_name(int device):
    """Return what a device is called."""
    cdef rt.cudaDeviceProp properties
    check(rt.cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties")
    return properties.name.decode()


def versions():
    """Return the CUDA versions (driver, runtime), as 1000 * major + 10 * minor; a driver version of 0 means none."""
    cdef int driver = 0, runtime = 0
    check(rt.cudaDriverGetVersion(&driver), "cudaDriverGetVersion")
    check(rt.cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion")
    return driver, runtime


def location(uintptr_t address):
    """Return where an address lies: ("device", ordinal), ("managed", ordinal), ("pinned", ordinal) or ("host", -1)."""
    cdef rt.cudaPointerAttributes found
    check(rt.cudaPointerGetAttributes(&found, <void *> address), "cudaPointerGetAttributes")
    if found.type == rt.cudaMemoryTypeDevice:
        return "device", found.device
    if found.type == rt.cudaMemoryTypeManaged:
        return "managed", found.device
    if found.type == rt.cudaMemoryTypeHost:
        return "pinned", found.device
    return "host", -1


def is_capturing(uintptr_t stream):
    """Tell whether a stream is being captured; the only call that never disturbs a capture."""
    cdef rt.cudaStreamCaptureStatus status = rt.cudaStreamCaptureStatusNone
    check(rt.cudaStreamIsCapturing(<rt.cudaStream_t> stream, &status), "cudaStreamIsCapturing")
    return status != rt.cudaStreamCaptureStatusNone


cdef int _drop(void *kept) noexcept with gil:
    Py_DECREF(<object> kept)
    return 0


cdef void _drop_later(void *kept) noexcept nogil:
    # CUDA calls this on a thread of its own, where no CUDA call is allowed. If the interpreter's queue is full, the
    # objects live as long as the process.
    Py_AddPendingCall(&_drop, kept)


def keep_for_graph(uintptr_t stream, kept):
    """Keep an object alive as long as the graph that a stream is captured into, and all that is made of it."""
    cdef const cudecomp_kernel_table *kernels = kernel_table("cuda")
    Py_INCREF(kept)
    cdef int status = kernels.retain(<void *> stream, <void *> kept, &_drop_later)
    if status != 0:
        Py_DECREF(kept)
    check(<rt.cudaError_t> status, "cudaGraphRetainUserObject")


def copy(uintptr_t target, uintptr_t source, size_t nbytes, uintptr_t stream=0):
    """Copy bytes between any two places, ordered on `stream`."""
    check(rt.cudaMemcpyAsync(<void *> target, <const void *> source, nbytes, rt.cudaMemcpyDefault,
                             <rt.cudaStream_t> stream), "cudaMemcpyAsync")


def synchronize(uintptr_t stream=0):
    """Block until a stream is done, without the GIL."""
    cdef rt.cudaError_t status
    with nogil:
        status = rt.cudaStreamSynchronize(<rt.cudaStream_t> stream)
    check(status, "cudaStreamSynchronize")


cdef class Event:
    """A CUDA event without timing; it belongs to the device that is current when it is made."""

    def __cinit__(self):
        check(rt.cudaEventCreateWithFlags(&self.handle, rt.cudaEventDisableTiming), "cudaEventCreateWithFlags")

    def __dealloc__(self):
        if self.handle != NULL:
            rt.cudaEventDestroy(self.handle)

    def record(self, uintptr_t stream):
        """Mark what a stream holds now."""
        check(rt.cudaEventRecord(self.handle, <rt.cudaStream_t> stream), "cudaEventRecord")

    def order(self, uintptr_t stream):
        """Make later work of a stream wait for the mark."""
        check(rt.cudaStreamWaitEvent(<rt.cudaStream_t> stream, self.handle, 0), "cudaStreamWaitEvent")

    def done(self):
        """Tell whether what was marked is complete."""
        cdef rt.cudaError_t status = rt.cudaEventQuery(self.handle)
        if status == rt.cudaErrorNotReady:
            rt.cudaGetLastError()  # no error that anybody should find
            return False
        check(status, "cudaEventQuery")
        return True

    def synchronize(self):
        """Block until what was marked is complete, without the GIL."""
        cdef rt.cudaError_t status
        with nogil:
            status = rt.cudaEventSynchronize(self.handle)
        check(status, "cudaEventSynchronize")


cdef class Stream:
    """A non-blocking stream of this package's own."""

    def __cinit__(self):
        check(rt.cudaStreamCreateWithFlags(&self.handle, rt.cudaStreamNonBlocking), "cudaStreamCreateWithFlags")

    def __dealloc__(self):
        if self.handle != NULL:
            rt.cudaStreamDestroy(self.handle)

    @property
    def address(self):
        """The cudaStream_t as an integer."""
        return <uintptr_t> self.handle

    def failed(self):
        """Raise CudaError if work on the stream has failed; does not block."""
        cdef rt.cudaError_t status = rt.cudaStreamQuery(self.handle)
        if status != rt.cudaErrorNotReady:
            check(status, "cudaStreamQuery")


cdef class Flags:
    """Completion counters in host memory that kernels raise, one per segment, all 0 at first.

    Parameters
    ----------
    memory : PinnedMemory
        At least 8 bytes per flag.
    count : int
        How many.

    Attributes
    ----------
    epoch : int
        The value that a flag has once its segment is complete in the current run.
    """

    def __cinit__(self, memory, Py_ssize_t count):
        cdef uintptr_t address = memory.address
        if memory.nbytes < 8 * count:
            raise ValueError(f"Flags: {memory.nbytes} bytes for {count} flags, expected 8 each")
        self.memory = memory
        self.value = <uint64_t *> address
        self.count = count
        for i in range(count):
            self.value[i] = 0

    def begin(self):
        """Note that every segment is launched once more."""
        self.epoch += 1

    def ready(self, Py_ssize_t first):
        """Return the first segment from `first` on that is not complete in the current run; does not block."""
        while first < self.count and cudecomp_load_acquire(&self.value[first]) >= self.epoch:
            first += 1
        return first
