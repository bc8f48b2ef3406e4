# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, binding=True, embedsignature=True
"""Owns plans and calls, what users hold; all work is done by the engine of the plan's device."""

from libc.stdint cimport uintptr_t

import warnings
from copy import copy
from dataclasses import replace

from cudecomp.binding import Binding
from cudecomp.comm import attempt, Communicator
from cudecomp.exchange import Exchange
from cudecomp.halo import halo_exchange
from cudecomp.host import HostEngine
from cudecomp.host_direct import DirectEngine
from cudecomp.memory import plan_shape
from cudecomp.registry import Registry
from cudecomp.report import explain, summary
from cudecomp.spec import halo_spec, patience, transpose_spec
from cudecomp.transports import direct_or, with_awareness


cdef class Plan:
    """What `TransposePlan` and other plans have in common: a schedule bound to a dtype, a device and a communicator.

    Use it as a context manager, or call `close`. Building a plan is collective over its communicator and fails on all
    ranks alike; running it is not collective beyond the messages themselves: the ranks that exchange data must run the
    plan, and must run plans that share peers in the same order.
    """

    def __init__(self):
        raise TypeError("Plan is the base of plans; build a TransposePlan or a HaloPlan")

    @property
    def src(self):
        """The pencil of the source (Pencil)."""
        return self._engine.spec.src

    @property
    def dst(self):
        """The pencil of the destination (Pencil)."""
        return self._engine.spec.dst

    @property
    def dtype(self):
        """The dtype of the items (numpy.dtype)."""
        return self._engine.spec.dtype

    @property
    def comm(self):
        """The communicator the plan was built on (mpi4py.MPI.Intracomm), or None."""
        return self._engine.group.user

    @property
    def rank(self):
        """The rank of this process in the communicator; 0 without one."""
        return self._engine.group.rank

    @property
    def device(self):
        """Where the arrays lie: "host" or "cuda"."""
        return self._engine.spec.device

    @property
    def backend(self):
        """The name of the transport that was chosen."""
        return self._engine.spec.choice.name

    @property
    def launch(self):
        """How device work is launched: "fused", "per_peer" or "per_peer_events"; without effect on the host device."""
        return self._engine.spec.launch

    @property
    def fields(self):
        """The number of arrays that travel together."""
        return self._engine.spec.fields

    @property
    def inplace(self):
        """Whether source and destination are one buffer."""
        return self._engine.spec.inplace

    @property
    def capturable(self):
        """Whether a capture holds the whole operation (bool).

        False where MPI carries messages, since the host drives it: a capture is then the pack sequence.
        """
        return self._engine.capturable

    @property
    def workspace_bytes(self):
        """The bytes of workspace that this rank needs."""
        return self._engine.schedule.workspace_bytes

    @property
    def workspace(self):
        """The Workspace in use, the plan's own or the one given to it."""
        return self._engine.workspace

    @property
    def stats(self):
        """Counters since the plan was built, by name (dict).

        Runs, messages sent, runs whose destination mapped peers could not write to directly (landings), captures,
        evictions and replays of CUDA graphs.
        """
        return self._engine.stats.as_dict()

    @property
    def closed(self):
        """Whether the plan was closed."""
        return self._engine is None or self._engine.closed

    def run(self, src, dst=None, stream=None):
        """Move the interior of `src` to the interior of `dst`.

        Parameters
        ----------
        src, dst : array
            In memory order: of the `memory_shape` of the plan's pencils for this rank, or flat with at least `size`
            items, contiguous, of exactly the plan's dtype. With several fields, one array with a leading axis, or a
            sequence of arrays. A plan in place, and a HaloPlan, take one array and no `dst`.
        stream : stream or int, optional
            A stream of cuda.core, CuPy or PyTorch, or the address of a cudaStream_t. None: the stream that `dst` says
            it is in use on, else the legacy default stream. On the host device it must be None.

        Raises
        ------
        TypeError
            An argument is no array, or is of another dtype or device.
        ValueError
            Wrong shape, order or size, a read-only destination, or overlapping arrays.
        RuntimeError
            The plan is closed, failed before, or an operation on it, its workspace or the arrays is pending.
        TimeoutError
            Nothing arrived for the plan's timeout; the plan cannot be used any more. With `check=True` also: some ranks
            do not call it; the communicator cannot be used any more.

        Notes
        -----
        Not collective beyond the messages. On the host device it blocks until `dst` is complete. On a GPU it is ordered
        after earlier work on the stream, and on the streams that the arrays export; when it returns, later work on the
        stream sees `dst` and may overwrite `src`. MPI transports block the host until all messages have passed, without
        the GIL; where no other rank takes part nothing is waited for.

        Errors in arguments are local and raised before anything is launched or sent; with `check=True` they are agreed
        on and all ranks raise the same (collective). Halo and padding cells of `dst` are left as they were.
        """
        cdef Call call = self._bind(src, dst, self._engine_open().spec.check)
        call._bound.run(stream)

    def bind(self, src, dst=None):
        """Return a Call: this plan with these arrays, checked now and kept alive.

        Local; with `check=True` collective. Arguments and errors as for `run`.
        """
        cdef Call call = self._bind(src, dst, self._engine_open().spec.check)
        call._bound.plan = self
        return call

    def capture(self, src, dst=None):
        """Return a Call whose work is recorded now, for `Call.replay` and `Plan.replay`.

        On a GPU the pack sequence becomes a CUDA graph, which `replay` launches as one unit. On the host device the
        record is the call itself, whose arrays were checked. Local; with `check=True` collective. Arguments and errors
        as for `run`. The call is kept by the plan until another capture takes its place.
        """
        cdef Call call = self.bind(src, dst)
        self._engine.capture(call._bound)
        latest = self._engine.latest = copy(call._bound)
        latest.plan = None  # a plan that nobody else holds must not keep itself alive
        return call

    def replay(self, stream=None):
        """Replay the latest capture; RuntimeError if there is none. Local but for the messages, otherwise as `run`."""
        latest = self._engine_open().latest
        if latest is None:
            raise RuntimeError(f"{self._engine}: nothing was captured; call capture(src, dst) first")
        latest.replay(stream)

    def forget(self):
        """Destroy the automatic captures of `run`; what `capture` made stays. Local."""
        self._engine_open().forget()

    def empty_src(self):
        """Return an uninitialised array for the source, of its memory shape, with a leading axis for several fields.

        A plan in place gets one flat buffer that holds either pencil. Local on MPI transports, collective on "direct",
        whose peers map it. The memory belongs to the array and outlives the plan.
        """
        return self._empty(self.src)

    def empty_dst(self):
        """Return an uninitialised array for the destination; local or collective, and otherwise, as `empty_src`."""
        return self._empty(self.dst)

    def register(self, array):
        """Make an array known to the transport, and return it.

        Local on MPI transports, which need nothing, and on the host device, where "direct" can only map arrays that
        `empty_src` and `empty_dst` made: others pass through the workspace, with one more copy. Collective for "direct"
        on a GPU: peers map the array, which is kept alive until the plan is closed; OSError on all ranks if the memory
        of one cannot be shared, since it does not come from cudaMalloc.
        """
        engine = self._engine_open()
        engine.register(array, f"{engine.spec.operation}.register: array")
        return array

    def check(self):
        """Raise if the plan cannot be run now: closed, failed before, or an operation on it is pending. Local."""
        self._engine_open().usable()

    def close(self):
        """Give resources back. Local, idempotent, never waits for peers; arrays live on."""
        if self._engine is not None:
            self._engine.close()

    def explain(self):
        """Return the schedule in words (str): transport and why, messages, bytes per peer, workspace, rewrites.

        Local.
        """
        return explain(self._engine.spec, self._engine.schedule, self.rank)

    def _engine_open(self):
        if self._engine is None or self._engine.closed:
            raise RuntimeError(f"{type(self).__name__}: it is closed")
        return self._engine

    def _bind(self, src, dst, agree):
        engine = self._engine_open()
        call, error = attempt(lambda: _bound_call(engine, src, dst))
        if agree:
            engine.group.agree(engine.spec.operation, error, timeout=engine.spec.timeout)
        elif error is not None:
            raise error
        return call

    def _empty(self, pencil):
        engine = self._engine_open()
        spec = engine.spec
        pencils = (spec.src, spec.dst) if spec.inplace else (pencil,)
        return engine.empty(plan_shape(pencils, self.rank, spec.fields))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and self._engine is not None:
            self._engine.poison(f"its block was left by {kind.__name__}")
        self.close()

    def __repr__(self):
        if self._engine is None:
            return f"<{type(self).__name__}, not built>"
        return summary(self._engine.spec, self._engine.schedule, self.rank, self.stats, self.closed)

    def __del__(self):
        if self._engine is not None and not self._engine.closed:
            warnings.warn(f"{self._engine} was not closed", ResourceWarning, source=self)
            self._engine.close()


class TransposePlan(Plan):
    """Move an array from one pencil layout to another.

    Parameters
    ----------
    src, dst : Pencil
        The layouts, of one global shape over process grids of the communicator's size. Axes, memory orders, halos and
        process grids may differ.
    dtype : dtype-like
        Of the items; any dtype of a fixed size without Python objects. Arrays must have exactly this one.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks of the process grids are ranks of `comm`. None: this process alone; MPI is not imported.
    device : {"host", "cuda"}
        Where arrays lie.
    backend : str
        The transport: "direct" (peers on one host write into each other's memory, others get messages), "mpi_p2p",
        "mpi_p2p_pl" (pipelined), "mpi_a2a", "local" (one process), or "auto".
    launch : {"fused", "per_peer", "per_peer_events"}
        How a GPU packs: "fused" is one kernel that raises a flag per message; "per_peer" a launch per message, each
        with its flag; "per_peer_events" a launch and an event per message. Without effect on the host device.
    graphs : bool, optional
        Whether `run` captures and replays by itself on a GPU; None asks CUDECOMP_ENABLE_CUDA_GRAPHS.
    fields : int, optional
        How many arrays travel together, in one message per peer; where a message of a field needs no packing and is
        large, in one per field.
    inplace : bool
        Source and destination are one buffer.
    workspace : Workspace, optional
        Memory to share with other plans; None: the plan's own.
    timeout : float, optional
        Seconds without progress after which a waiting rank raises TimeoutError; None asks CUDECOMP_TIMEOUT, then never.
        Ranks that build the plan wait so long for the others, but at least 30 s.
    check : bool
        Agree on the arguments of each run, so that all ranks raise the same (a reduction per run).
    nodes : sequence of int, optional
        Which host each rank is on, for the order of messages and for whom "direct" maps; None asks MPI.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument is wrong on any rank, or differs between ranks: the same exception on all ranks.
    TimeoutError
        Some ranks do not build the plan; the communicator cannot be used any more. Without a timeout others wait for
        them for ever.

    Notes
    -----
    Collective over `comm`. See `Plan` for running it.
    """

    def __init__(self, src, dst, dtype, comm=None, *, device="host", backend="auto", launch="fused", graphs=None,
                 fields=None, inplace=False, workspace=None, timeout=None, check=False, nodes=None):
        options = dict(device=device, backend=backend, launch=launch, graphs=graphs, fields=fields, inplace=inplace,
                       workspace=workspace, timeout=timeout, check=check, nodes=nodes)
        group = Communicator.of(comm, patience(timeout))
        spec, error = attempt(lambda: transpose_spec(group, src, dst, dtype, **options))
        group.agree("TransposePlan", error, spec and spec.table(), patience(timeout))
        _build(self, spec, group, lambda rank, nodes: Exchange(src, dst, rank, nodes))

    def reverse(self):
        """Return the plan from `dst` to `src`, with the same options and the same workspace; collective."""
        spec = self._engine_open().spec
        return TransposePlan(
            spec.dst, spec.src, spec.dtype, self.comm, device=spec.device, backend=spec.backend,
            launch=spec.launch, graphs=spec.graphs, fields=spec.fields, inplace=spec.inplace,
            workspace=self.workspace, timeout=spec.timeout, check=spec.check, nodes=spec.nodes)


class HaloPlan(Plan):
    """Fill the halo of an array from the interiors of its neighbours, faces, edges and corners in one step.

    Parameters
    ----------
    pencil : Pencil
        The layout, with halos: any widths, also per axis and side. A halo may be deeper than the neighbour's interior;
        it is then filled by several ranks.
    dtype : dtype-like
        Of the items; any dtype of a fixed size without Python objects. Arrays must have exactly this one.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks of the process grid are ranks of `comm`. None: this process alone; MPI is not imported.
    periods : bool or sequence of bool
        Per axis, whether it is periodic. Cells beyond the ends of other axes (walls) are left as they were.
    axes : int or sequence of int, optional
        The axes whose halos are filled; None: all. Along other axes a fill takes their halos along, so that updating
        axes one after the other gives the same as updating them in one plan.
    device, backend, launch, graphs, fields, workspace, timeout, check, nodes
        As for `TransposePlan`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        An argument is wrong on any rank, or differs between ranks: the same exception on all ranks.
    TimeoutError
        Some ranks do not build the plan; the communicator cannot be used any more. Without a timeout others wait for
        them for ever.

    Notes
    -----
    Collective over `comm`. Its runs take one array: `plan.run(array)`. A rank without interior takes no part.
    """

    def __init__(self, pencil, dtype, comm=None, *, periods, axes=None, device="host", backend="auto", launch="fused",
                 graphs=None, fields=None, workspace=None, timeout=None, check=False, nodes=None):
        options = dict(device=device, backend=backend, launch=launch, graphs=graphs, fields=fields,
                       workspace=workspace, timeout=timeout, check=check, nodes=nodes)
        group = Communicator.of(comm, patience(timeout))
        spec, error = attempt(lambda: halo_spec(group, pencil, dtype, periods, axes, **options))
        group.agree("HaloPlan", error, spec and spec.table(), patience(timeout))
        _build(self, spec, group, lambda rank, nodes: halo_exchange(pencil, rank, *spec.details, nodes))


cdef class Call:
    """A plan bound to arrays; it keeps both alive.

    Made by `Plan.bind` and `Plan.capture`. Running it checks nothing again; its methods are local but for the messages
    that pass.
    """

    def __init__(self):
        raise TypeError("Call is made by Plan.bind and Plan.capture")

    @property
    def captured(self):
        """Whether the call holds a capture that `replay` can use."""
        return self._bound.captured is not None

    def run(self, stream=None):
        """Carry the operation out with the bound arrays; local but for the messages, otherwise as `Plan.run`."""
        self._bound.run(stream)

    def capture(self):
        """Record the work now, for `replay`; returns the call. Local."""
        self._bound.engine.capture(self._bound)
        return self

    def replay(self, stream=None):
        """Carry the recorded work out; RuntimeError if nothing was captured.

        Local but for the messages, otherwise as `Plan.run`.
        """
        self._bound.replay(stream)

    def start(self, stream=None):
        """Begin the operation and return; until `wait`, arrays and workspace are in use. Local but for the messages.

        MPI messages advance only inside calls of this library or of MPI, writes of "direct" only inside calls of this
        library: a rank that waits for its peers elsewhere, say in a barrier, must not have operations pending.
        """
        self._bound.start(stream)

    def test(self):
        """Make progress without blocking; return whether the operation is complete (bool). Local."""
        return self._bound.test()

    def wait(self):
        """Block until the operation begun by `start` is complete; returns at once if there is none. Local."""
        self._bound.wait()

    def __repr__(self):
        return f"<Call of {self._bound.engine}{', captured' if self.captured else ''}>"


class Chain:
    """Several calls recorded as one unit, to be carried out in order; made by `capture`. It keeps them alive."""

    def __init__(self, calls):
        if not calls:
            raise ValueError("capture: no calls, expected at least one")
        for call in calls:
            if not isinstance(call, Call):
                raise TypeError(f"capture: got a {type(call).__name__}, expected calls of Plan.bind or Plan.capture")
        self.calls = tuple(calls)
        bounds = [(<Call> call)._bound for call in calls]
        for bound in bounds:
            bound.engine.usable()
        devices = {bound.engine.spec.device for bound in bounds}
        if len(devices) > 1:
            raise ValueError("capture: its calls are on the host and on a GPU, expected one device")
        driven = next((bound.engine for bound in bounds if not bound.engine.capturable), None)
        if devices == {"host"}:
            self._replay = lambda stream: _run_all(bounds, stream)
        elif driven is not None:
            raise RuntimeError(f"{driven}: its messages are driven by the host and cannot be part of a chain; see "
                               "Plan.capturable")
        else:
            from cudecomp.cuda.chain import DeviceChain

            self._replay = DeviceChain(bounds).replay

    def replay(self, stream=None):
        """Carry all calls out, in order; local but for what ranks exchange.

        On a GPU one graph is launched on `stream` (None: that of the last call's destination); within a capture of the
        caller's the operations become part of that. On the host device it blocks. Errors as for `Plan.run`.
        """
        self._replay(stream)

    def __repr__(self):
        return f"<Chain of {', '.join(map(repr, self.calls))}>"


def capture(*calls):
    """Return a Chain: calls recorded now as one unit, in order.

    Parameters
    ----------
    *calls : Call
        Of one device; on a GPU of plans that are `capturable`. A call may appear more than once.

    Raises
    ------
    RuntimeError
        A plan of one of the calls is closed, failed before, or has a pending operation; on a GPU: is not capturable.
    TypeError, ValueError
        Something is no call, there is none, or they are on different devices.

    Notes
    -----
    Local. All ranks that exchange data must replay chains of the same operations, in the same order.
    """
    return Chain(calls)


def _run_all(bounds, stream):
    for bound in bounds:  # all or none
        bound._refuse()
    for bound in bounds:
        bound.run(stream)


def _build(Plan plan, spec, group, exchange_of):
    """Give a plan the engine of its device; collective."""
    if spec.backend == "auto" and group.size > 1:
        direct = direct_or(spec.choice, _registry(group, spec.device).any_reachable)
        try:
            if direct.name == "direct":
                plan._engine = _engine(replace(spec, choice=direct), group, exchange_of)
                return
        except OSError as error:  # on all ranks alike: there is too little memory to share
            spec = replace(spec, choice=spec.choice._replace(why=f"auto: {error}"))
    plan._engine = _engine(spec, group, exchange_of)


def _registry(group, device):
    """Return which memory ranks can map on a device; collective at the first call."""
    if device == "host":
        return Registry.of(group)
    from cudecomp.cuda.reach import DeviceRegistry

    return DeviceRegistry.of(group)


def _engine(spec, group, exchange_of):
    """Return the engine of a device and transport; collective."""
    direct = spec.choice.name == "direct"
    if spec.device == "host":
        return (DirectEngine if direct else HostEngine)(spec, group, exchange_of)
    from cudecomp.cuda.direct import CudaDirectEngine
    from cudecomp.cuda.engine import CudaEngine

    if direct and spec.nodes is None and _registry(group, "cuda").all_reachable:
        spec = replace(spec, choice=spec.choice._replace(device_buffers=True))  # there are no messages to stage
    elif spec.choice.name != "local":
        spec = replace(spec, choice=with_awareness(spec.choice, *group.cuda_aware()))
    return (CudaDirectEngine if direct else CudaEngine)(spec, group, exchange_of)


def _bound_call(engine, src, dst):
    """Check the arrays against a plan and return the call."""
    cdef Call call = Call.__new__(Call)
    binding = Binding(engine.arguments, src, dst, engine.view)
    call._bound = engine.bind(binding.sources, binding.destinations, spans=binding.spans, owners=binding.owners,
                              streams=binding.streams, stream=binding.stream)
    return call


cdef int plan_run(Plan plan, void *src, void *dst, void *stream) except -1 nogil:
    with gil:
        bound = plan._engine_open().bind_addresses(<uintptr_t> src, <uintptr_t> dst)
        bound.run(<uintptr_t> stream if stream != NULL else None)
    return 0


cdef int call_run(Call call, void *stream) except -1 nogil:
    with gil:
        call.run(<uintptr_t> stream if stream != NULL else None)
    return 0


cdef int call_replay(Call call, void *stream) except -1 nogil:
    with gil:
        call.replay(<uintptr_t> stream if stream != NULL else None)
    return 0
