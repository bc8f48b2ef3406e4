# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns device work as lists of steps: launched at once, or recorded as a CUDA graph; knows nothing of peers.

A step is a C function and its argument, so that a whole list is issued in one section without the GIL: no other code of
this thread gets in between, which could break a capture.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from collections import OrderedDict

from cuda.bindings cimport cyruntime as rt

from cudecomp.cuda.runtime cimport check, Event, Stream
from cudecomp.pack cimport AddressTable, PackProgram


cdef class Step:
    """Something that can be put onto a stream. Subclasses set `issue` and `argument`, and name failures in `fail`."""

    cdef int fail(self, int status) except -1:
        raise NotImplementedError


cdef int _issue_pack(void *argument, void *stream, bint capturing) noexcept nogil:
    """Launch the segments first <= s < singles one by one, each followed by its event, then the rest at once."""
    cdef PackArguments *pack = <PackArguments *> argument
    cdef int status
    cdef int64_t s
    cdef unsigned int flags = rt.cudaEventRecordExternal if capturing else rt.cudaEventRecordDefault
    for s in range(pack.first, pack.singles):
        status = pack.kernels.run(pack.program, <void *const *> pack.bases, s, s + 1, stream)
        if status == 0 and s - pack.first < pack.event_count:
            status = rt.cudaEventRecordWithFlags(pack.events[s - pack.first], <rt.cudaStream_t> stream, flags)
        if status != 0:
            return status
    if pack.singles < pack.last:
        return pack.kernels.run(pack.program, <void *const *> pack.bases, pack.singles, pack.last, stream)
    return 0


cdef class PackStep(Step):
    """Launches of a pack program's segments first <= s < last.

    Parameters
    ----------
    program : PackProgram
        On the CUDA device.
    table : AddressTable
        The addresses, read when the step is issued.
    first, last : int
        The segments; last < 0 means to the end.
    singles : int
        How many leading segments are launched one by one; the others in one launch.
    events : sequence of Event
        Recorded after each of the single launches; within a graph, visible outside of it.
    """

    def __cinit__(self, PackProgram program, AddressTable table, Py_ssize_t first=0, Py_ssize_t last=-1,
                  Py_ssize_t singles=0, events=()):
        cdef Event event
        program.usable(table)
        self.program = program
        self.kept = (program, table, tuple(events))
        self.pack.kernels = program.kernels
        self.pack.program = program.program
        self.pack.bases = table.address
        self.pack.first = first
        self.pack.singles = first + singles
        self.pack.last = program.segments if last < 0 else last
        self.pack.event_count = len(events)
        self.pack.events = <rt.cudaEvent_t *> malloc(max(len(events), 1) * sizeof(rt.cudaEvent_t))
        if self.pack.events == NULL:
            raise MemoryError
        for i in range(self.pack.event_count):
            event = events[i]
            self.pack.events[i] = event.handle
        self.issue = &_issue_pack
        self.argument = &self.pack

    def __dealloc__(self):
        free(self.pack.events)

    cdef int fail(self, int status) except -1:
        return self.program.check("run", status)


cdef class Work:
    """A list of steps, in order; they are kept alive. Local.

    `lands` notes that peers write into the workspace, from where one of the steps takes it to the destination; `kept`
    is kept alive, too.
    """

    def __cinit__(self, steps, bint lands=False, kept=None):
        cdef Step step
        self.lands, self.kept = lands, kept
        self.steps = tuple(steps)
        self.count = len(self.steps)
        self.issues = <issue_function *> malloc(max(self.count, 1) * sizeof(issue_function))
        self.arguments = <void **> malloc(max(self.count, 1) * sizeof(void *))
        if self.issues == NULL or self.arguments == NULL:
            raise MemoryError
        for i in range(self.count):
            step = self.steps[i]
            self.issues[i] = step.issue
            self.arguments[i] = step.argument

    def __dealloc__(self):
        free(self.issues)
        free(self.arguments)

    cdef int put(self, void *stream, bint capturing, Py_ssize_t *reached) noexcept nogil:
        """Issue the steps up to the first that fails: its status, and its number in `reached`."""
        cdef int status
        for reached[0] in range(self.count):
            status = self.issues[reached[0]](self.arguments[reached[0]], stream, capturing)
            if status != 0:
                return status
        return 0

    cdef int fail(self, Py_ssize_t reached, int status) except -1:
        """Raise what the status of a step means."""
        cdef Step step = self.steps[reached]
        return step.fail(status)

    def launch(self, uintptr_t stream):
        """Put all steps onto a stream, without the GIL; within a capture they become part of it."""
        cdef int status
        cdef Py_ssize_t reached = 0
        with nogil:
            status = self.put(<void *> stream, False, &reached)
        if status != 0:
            self.fail(reached, status)


cdef int _record(Work work, Stream stream, rt.cudaGraph_t *graph, int *failed, Py_ssize_t *reached) noexcept nogil:
    """Capture work; a capture that was begun is ended, whatever happens in between."""
    cdef int status, ended
    status = rt.cudaStreamBeginCapture(stream.handle, rt.cudaStreamCaptureModeThreadLocal)
    if status != rt.cudaSuccess:
        return status
    failed[0] = work.put(<void *> stream.handle, True, reached)
    ended = rt.cudaStreamEndCapture(stream.handle, graph)
    return rt.cudaSuccess if failed[0] != 0 else ended


cdef class Graph:
    """The executable graph of some work, with the addresses that it has now.

    Notes
    -----
    Local. The graph keeps the work alive. Recording takes a stream of its own, in thread-local mode and within one
    section without the GIL, so that no other library's calls get into it, or break it, from this thread.
    """

    def __cinit__(self, Work work):
        cdef Stream stream = Stream()
        cdef rt.cudaGraph_t graph = NULL
        cdef Py_ssize_t reached = 0
        cdef int status, failed = 0
        try:
            with nogil:
                status = _record(work, stream, &graph, &failed, &reached)
            if failed != 0:
                work.fail(reached, failed)
            check(<rt.cudaError_t> status, "stream capture of device work")
            check(rt.cudaGraphInstantiate(&self.handle, graph, 0), "cudaGraphInstantiate")
            check(rt.cudaGraphUpload(self.handle, stream.handle), "cudaGraphUpload")
            with nogil:
                status = rt.cudaStreamSynchronize(stream.handle)
            check(<rt.cudaError_t> status, "cudaStreamSynchronize")
        finally:
            if graph != NULL:
                rt.cudaGraphDestroy(graph)
        self.work = work

    def __dealloc__(self):
        # Destroying a graph that still runs is allowed: CUDA frees it afterwards.
        if self.handle != NULL:
            rt.cudaGraphExecDestroy(self.handle)

    def launch(self, uintptr_t stream):
        """Launch everything as one unit, ordered on `stream`."""
        cdef rt.cudaError_t status
        with nogil:  # it waits where a thousand launches are outstanding
            status = rt.cudaGraphLaunch(self.handle, <rt.cudaStream_t> stream)
        check(status, "cudaGraphLaunch")


cdef class Replay:
    """The shortest way to launch a graph again: it takes no other step than those that each launch needs.

    Parameters
    ----------
    graph : Graph
        Holds a whole operation.
    complete, ready : Event
        Recorded after each launch, which the next one is ordered after; and for the streams.
    streams : sequence of int
        Launches are ordered after what these hold.
    device : int
        The device that must be current.
    status : int
        The address of a word that is not 0 once something has gone wrong; 0 for none.
    """

    cdef Graph graph
    cdef Event complete
    cdef Event ready
    cdef tuple streams
    cdef int device
    cdef volatile uint64_t *status

    def __cinit__(self, Graph graph, Event complete, Event ready, streams, int device, uintptr_t status):
        self.graph, self.complete, self.ready, self.device = graph, complete, ready, device
        self.streams = tuple(streams)
        self.status = <volatile uint64_t *> status

    def launch(self, uintptr_t stream):
        """Launch on a stream; False, and nothing is done, where that needs a closer look: a capture, an error."""
        cdef rt.cudaStream_t target = <rt.cudaStream_t> stream
        cdef rt.cudaStreamCaptureStatus capturing = rt.cudaStreamCaptureStatusNone
        cdef uintptr_t other
        cdef int device = -1
        if self.status != NULL and self.status[0] != 0:
            return False
        check(rt.cudaStreamIsCapturing(target, &capturing), "cudaStreamIsCapturing")
        check(rt.cudaGetDevice(&device), "cudaGetDevice")
        if capturing != rt.cudaStreamCaptureStatusNone or device != self.device:
            return False
        for other in self.streams:
            if other != stream:
                self.ready.record(other)
                self.ready.order(stream)
        check(rt.cudaStreamWaitEvent(target, self.complete.handle, 0), "cudaStreamWaitEvent")
        self.graph.launch(stream)
        check(rt.cudaEventRecord(self.complete.handle, target), "cudaEventRecord")
        return True


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
