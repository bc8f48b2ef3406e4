# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns CUDA graphs of pack programs: recording, launching, and a bounded cache; knows nothing of peers or messages."""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from collections import OrderedDict

from cuda.bindings cimport cyruntime as rt

from cudecomp.cuda.runtime cimport check, Event, Stream
from cudecomp.pack cimport AddressTable, PackProgram


cdef rt.cudaError_t _pack(PackProgram program, void **bases, int64_t first, int64_t last, rt.cudaEvent_t *events,
                          Py_ssize_t event_count, rt.cudaStream_t stream, int *kernel_status) noexcept nogil:
    """Launch the segments first <= s < last one by one, each followed by its event, then the rest at once."""
    cdef rt.cudaError_t status
    cdef int64_t s
    for s in range(first, last):
        kernel_status[0] = program.kernels.run(program.program, <void *const *> bases, s, s + 1, stream)
        if kernel_status[0] != 0:
            return rt.cudaSuccess
        if s - first < event_count:
            status = rt.cudaEventRecordWithFlags(events[s - first], stream, rt.cudaEventRecordExternal)
            if status != rt.cudaSuccess:
                return status
    if last < program.segments:
        kernel_status[0] = program.kernels.run(program.program, <void *const *> bases, last, program.segments, stream)
    return rt.cudaSuccess


cdef rt.cudaError_t _record(PackProgram program, void **bases, int64_t first, int64_t last, rt.cudaEvent_t *events,
                            Py_ssize_t event_count, rt.cudaStream_t stream, rt.cudaGraph_t *graph,
                            int *kernel_status) noexcept nogil:
    """Capture the launches of a program; a capture that was begun is ended, whatever happens in between."""
    cdef rt.cudaError_t status, ended
    status = rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureModeThreadLocal)
    if status != rt.cudaSuccess:
        return status
    status = _pack(program, bases, first, last, events, event_count, stream, kernel_status)
    ended = rt.cudaStreamEndCapture(stream, graph)
    return status if status != rt.cudaSuccess else ended


cdef class Graph:
    """The executable graph of a pack program with given addresses.

    Parameters
    ----------
    program : PackProgram
        On the CUDA device.
    table : AddressTable
        The addresses, fixed at recording.
    singles : int
        The segments s < singles are recorded one launch each, all others in one more launch.
    events : sequence of Event
        Recorded after each of the single launches, visible outside the graph; or empty.

    Notes
    -----
    Local. The graph keeps program and events alive. Recording takes a stream of its own, in thread-local mode and
    within one section without the GIL, so that no other library's calls get into it, or break it, from this thread.
    """

    cdef rt.cudaGraphExec_t handle
    cdef object _kept

    def __cinit__(self, PackProgram program, AddressTable table, Py_ssize_t singles, events=()):
        cdef Stream stream = Stream()
        cdef rt.cudaGraph_t graph = NULL
        cdef Py_ssize_t i, count = len(events)
        cdef Event event
        cdef rt.cudaEvent_t *handles = <rt.cudaEvent_t *> malloc(max(count, 1) * sizeof(rt.cudaEvent_t))
        cdef rt.cudaError_t status
        cdef int kernel_status = 0
        if handles == NULL:
            raise MemoryError
        try:
            for i in range(count):
                event = events[i]
                handles[i] = event.handle
            with nogil:
                status = _record(program, table.address, 0, singles, handles, count, stream.handle, &graph,
                                 &kernel_status)
            program.check("run", kernel_status)
            check(status, "stream capture of a pack program")
            check(rt.cudaGraphInstantiate(&self.handle, graph, 0), "cudaGraphInstantiate")
            check(rt.cudaGraphUpload(self.handle, stream.handle), "cudaGraphUpload")
            check(rt.cudaStreamSynchronize(stream.handle), "cudaStreamSynchronize")
        finally:
            free(handles)
            if graph != NULL:
                rt.cudaGraphDestroy(graph)
        self._kept = (program, table, tuple(events))

    def __dealloc__(self):
        # Destroying a graph that still runs is allowed: CUDA frees it afterwards.
        if self.handle != NULL:
            rt.cudaGraphExecDestroy(self.handle)

    def launch(self, uintptr_t stream):
        """Launch everything as one unit, ordered on `stream`."""
        check(rt.cudaGraphLaunch(self.handle, <rt.cudaStream_t> stream), "cudaGraphLaunch")


class GraphCache:
    """A bounded cache of graphs by the addresses they were recorded for; the least recently used one goes first.

    A plan has one exchange and one dtype, so that nothing but addresses can differ between its graphs.
    """

    def __init__(self, most):
        self.most = most
        self.evictions = 0
        self._graphs = OrderedDict()

    def get(self, key, record):
        """Return the graph of `key`, made by `record()` where there is none."""
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = record()
            if len(self._graphs) > self.most:
                self._graphs.popitem(last=False)
                self.evictions += 1
        else:
            self._graphs.move_to_end(key)
        return found

    def clear(self):
        """Forget all graphs; they are destroyed."""
        self._graphs.clear()

    def __len__(self):
        return len(self._graphs)


def launch_singles(PackProgram program, AddressTable table, Py_ssize_t singles, events, uintptr_t stream):
    """Launch the segments s < singles one by one, each followed by its event where there are events, then the rest."""
    cdef Py_ssize_t s
    cdef Event event
    for s in range(singles):
        program.launch(table, s, s + 1, <void *> stream)
        if events:
            event = events[s]
            check(rt.cudaEventRecord(event.handle, <rt.cudaStream_t> stream), "cudaEventRecord")
    if singles < program.segments:
        program.launch(table, singles, program.segments, <void *> stream)
