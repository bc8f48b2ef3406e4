# SPDX-License-Identifier: Apache-2.0
"""Owns several operations on a GPU recorded as one graph, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .graph import Graph, Work


class DeviceChain:
    """The graph of several bound operations, in order.

    Parameters
    ----------
    bounds : sequence of Bound
        Of engines on this device whose captures hold whole operations.
    """

    def __init__(self, bounds: Sequence[Any]):
        self._bounds = bounds
        self._engines: list[Any] = list(dict.fromkeys(bound.engine for bound in bounds))
        for engine in self._engines:
            engine.usable()
        self._record()

    def _record(self) -> None:
        self._works = [bound.engine._work(bound) for bound in self._bounds]
        self._generations = [engine.generation for engine in self._engines]
        self._graph = Graph(Work([step for work in self._works for step in work.steps]))
        for engine in self._engines:
            engine.stats.captures += 1

    def replay(self, stream: Any = None) -> None:
        """Launch the graph; within a capture of the caller's, the operations become part of that."""
        last = self._bounds[-1]
        for bound in self._bounds:
            bound._refuse()
        if self._generations != [engine.generation for engine in self._engines]:
            self._record()  # a workspace has moved since
        for bound in self._bounds:
            bound.engine.enter_chain(bound, last, stream)
        if last.engine.in_capture:
            for bound, work in zip(self._bounds, self._works, strict=True):
                bound.engine.launch_in_capture(work)
        else:
            self._graph.launch(last.engine.target)
        for bound, work in zip(self._bounds, self._works, strict=True):
            bound.engine.leave_chain(work)
