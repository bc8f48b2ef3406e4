# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Owns the signals that ranks give each other from the device; knows nothing of what is written in between."""

from libc.stdint cimport int32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

import os

from cudecomp.cuda.graph cimport Step
from cudecomp.pack cimport abandon, release_function

from cudecomp.cuda.memory import PinnedMemory
from cudecomp.errors import KernelError
from cudecomp.library cimport open_symbol

cdef extern from "signal.h" nogil:
    int CUDECOMP_LINE, CUDECOMP_MAX_FIELDS
    int CUDECOMP_OFFER, CUDECOMP_ADMIT, CUDECOMP_ARRIVE, CUDECOMP_LEAVE, CUDECOMP_FAIL
    int CUDECOMP_TIMED_OUT, CUDECOMP_PEER_LEFT, CUDECOMP_LEFT

ctypedef const cudecomp_signal_table *(*functions)() noexcept nogil

cdef const cudecomp_signal_table *_functions = NULL

LINE = CUDECOMP_LINE
MOST_FIELDS = CUDECOMP_MAX_FIELDS
OFFER, ADMIT, ARRIVE, LEAVE, FAIL = CUDECOMP_OFFER, CUDECOMP_ADMIT, CUDECOMP_ARRIVE, CUDECOMP_LEAVE, CUDECOMP_FAIL
TIMED_OUT, PEER_LEFT = CUDECOMP_TIMED_OUT, CUDECOMP_PEER_LEFT


cdef const cudecomp_signal_table *signal_table() except NULL:
    """Return the functions, loaded at their first use."""
    global _functions
    if _functions == NULL:
        path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "libcudecomp_cuda.so")
        _functions = (<functions> open_symbol(path, "cudecomp_signal_functions"))()
    return _functions


cdef class Signals:
    """The signals of one plan on the current device.

    Parameters
    ----------
    edges : list of (theirs, mine, table, peer, put, source)
        Per peer: this rank's lines in its control memory and its lines in this rank's, the table of where its
        registrations are mapped (addresses), its rank, the first of its slots (-1: nothing is written there), and
        whether it writes into this rank's memory.
    fields : int
        Destination arrays per rank.
    slots : DeviceMemory
        The addresses that the pack program looks up.
    timeout : float, optional
        Seconds after which a signal is waited for no longer.

    Notes
    -----
    Local. Once a signal was waited for in vain, none is given or waited for any more, and peers are told.
    """

    def __cinit__(self, list edges, int fields, slots, timeout=None):
        self.table = signal_table()
        self.fields = fields
        status = PinnedMemory(8)
        self.memory = (status, slots)
        cdef uintptr_t word = status.address, slot = slots.address
        self.status = <uint64_t *> word
        self.status[0] = 0
        cdef cudecomp_edge *made = <cudecomp_edge *> calloc(max(len(edges), 1), sizeof(cudecomp_edge))
        cdef uint64_t nanoseconds = 0 if timeout is None else max(int(timeout * 1e9), 1)
        if made == NULL:
            raise MemoryError
        try:
            for number, edge in enumerate(edges):
                _fill(&made[number], edge)
            self.check("create", self.table.create(made, len(edges), fields, <char **> slot, self.status, nanoseconds,
                                                   &self.signals))
        finally:
            free(made)

    def __dealloc__(self):
        if self.signals != NULL:
            abandon(<release_function> self.table.destroy, self.signals)

    @property
    def stopped(self):
        """Why signals have stopped, and for which peer: (TIMED_OUT or PEER_LEFT, rank); None if they have not."""
        cdef uint64_t found = (<volatile uint64_t *> self.status)[0]
        why = found >> 32
        return (why, found & 0xffffffff) if why in (TIMED_OUT, PEER_LEFT) else None

    @property
    def status_address(self):
        """Where the word lies that is 0 as long as all is well."""
        return <uintptr_t> self.status

    def give(self, int what, uintptr_t stream):
        """Launch a signal without places at once."""
        self.check("signal", self.table.signal(self.signals, what, NULL, <void *> stream))

    cdef int check(self, str call, int status) except -1:
        if status == 0:
            return 0
        raise KernelError(f"cuda kernels, {call}: status {status} ({self.table.error_string(status).decode()})")


cdef int _fill(cudecomp_edge *made, edge) except -1:
    cdef uintptr_t theirs, mine, table
    theirs, mine, table, made.peer, made.put, made.source = edge
    made.theirs, made.mine, made.table = <uint64_t *> theirs, <uint64_t *> mine, <char **> table
    return 0


cdef struct SignalArguments:
    const cudecomp_signal_table *table
    cudecomp_signals *signals
    int32_t what
    uint64_t *places


cdef int _issue_signal(void *argument, void *stream, bint capturing) noexcept nogil:
    cdef SignalArguments *one = <SignalArguments *> argument
    return one.table.signal(one.signals, one.what, one.places, stream)


cdef class SignalStep(Step):
    """A signal as a step of device work.

    Parameters
    ----------
    signals : Signals
        Whose.
    what : int
        OFFER, ADMIT, ARRIVE, or several or-ed.
    places : sequence of (int, int), optional
        For OFFER: registration and byte offset of each field's destination.
    """

    cdef SignalArguments arguments
    cdef Signals signals

    def __cinit__(self, Signals signals, int what, places=()):
        cdef Py_ssize_t i
        self.signals = signals
        self.arguments.table = signals.table
        self.arguments.signals = signals.signals
        self.arguments.what = what
        self.arguments.places = NULL
        if what & OFFER:
            if len(places) != signals.fields:
                raise ValueError(f"signals: {len(places)} places, expected {signals.fields}, one per field")
            self.arguments.places = <uint64_t *> malloc(2 * signals.fields * sizeof(uint64_t))
            if self.arguments.places == NULL:
                raise MemoryError
            for i, (number, offset) in enumerate(places):
                self.arguments.places[2 * i] = number
                self.arguments.places[2 * i + 1] = offset
        self.issue = &_issue_signal
        self.argument = &self.arguments

    def __dealloc__(self):
        free(self.arguments.places)

    cdef int fail(self, int status) except -1:
        return self.signals.check("signal", status)
