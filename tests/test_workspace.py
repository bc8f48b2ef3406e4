# SPDX-License-Identifier: Apache-2.0
"""Workspaces: they grow while plans are built, serve one operation at a time, and say where they lie."""

import gc

import pytest

from cudecomp import Workspace


class Plan:
    """A tenant that counts how often the memory moved."""

    def __init__(self):
        self.moves = 0

    def rebind(self):
        self.moves += 1

    def __str__(self):
        return "a plan"


def test_empty_at_first():
    workspace = Workspace()
    assert workspace.nbytes == 0
    assert repr(workspace) == "Workspace(device='host', nbytes=0)"
    assert workspace.comm.size == 1


def test_an_unknown_device():
    with pytest.raises(ValueError, match="device is 'abacus'"):
        Workspace(device="abacus")


def test_growing():
    workspace, first, second = Workspace(), Plan(), Plan()
    workspace.reserve(100, "host", first)
    assert workspace.nbytes == 100
    assert workspace.address("host") % 4096 == 0
    before = workspace.address("host")
    workspace.reserve(50, "host", second)
    assert (workspace.nbytes, workspace.address("host")) == (100, before)
    assert (first.moves, second.moves) == (0, 0)
    workspace.reserve(1 << 20, "host", second)
    assert workspace.nbytes == 1 << 20
    assert (first.moves, second.moves) == (1, 1)


def test_nothing_is_needed():
    workspace = Workspace()
    workspace.reserve(0, "host", Plan())
    assert workspace.nbytes == 0
    workspace.address("host")


def test_released_and_forgotten_tenants_are_not_told():
    workspace, released, kept = Workspace(), Plan(), Plan()
    for tenant in (released, kept, Plan()):
        workspace.reserve(10, "host", tenant)
    workspace.release(released)
    workspace.release(released)
    gc.collect()
    workspace.reserve(20, "host", kept)
    assert (released.moves, kept.moves) == (0, 1)


def test_one_operation_at_a_time():
    workspace, one, other = Workspace(), Plan(), Plan()
    workspace.enter(one)
    for tenant in (one, other):
        with pytest.raises(RuntimeError, match="in use by a pending operation of a plan"):
            workspace.enter(tenant)
    workspace.leave(other)
    with pytest.raises(RuntimeError, match="in use"):
        workspace.enter(other)
    workspace.leave(one)
    workspace.enter(other)


def test_no_growth_while_in_use():
    workspace, one = Workspace(), Plan()
    workspace.reserve(10, "host", one)
    workspace.enter(one)
    workspace.reserve(10, "host", Plan())
    with pytest.raises(RuntimeError, match="cannot grow while an operation is pending"):
        workspace.reserve(11, "host", Plan())
    assert workspace.nbytes == 10


def test_release_ends_the_operation():
    workspace, one = Workspace(), Plan()
    workspace.enter(one)
    workspace.release(one)
    workspace.enter(Plan())


def test_memory_that_cannot_be_had():
    workspace, one = Workspace(), Plan()
    workspace.reserve(10, "host", one)
    with pytest.raises(MemoryError):
        workspace.reserve(1 << 60, "host", one)
    assert workspace.nbytes == 10
    assert one.moves == 0
