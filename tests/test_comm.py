# SPDX-License-Identifier: Apache-2.0
"""What groups agree on, without MPI: this process alone, the texts, and ranks played by threads."""

import subprocess
import sys
import threading

import pytest

from cudecomp import comm as module
from cudecomp.comm import Alone, Communicator, attempt
from cudecomp.text import ranks_text


class Rank:
    """The communicator of one of several threads, as far as `agree` needs it."""

    def __init__(self, rank, barrier, board):
        self.rank, self.barrier, self.board = rank, barrier, board

    def allgather(self, mine):
        self.board[self.rank] = mine
        self.barrier.wait()
        said = list(self.board)
        self.barrier.wait()
        return said

    def Iallgather(self, mine, everything):  # noqa: N802
        everything[:] = b"".join(self.allgather(mine))
        return self

    def Test(self):  # noqa: N802
        return True


def agreed(entries):
    """What `agree` raises on each rank, for (error, spec) by rank: a list of (type, text)."""
    barrier, board, outcomes = threading.Barrier(len(entries), timeout=10), [None] * len(entries), [None] * len(entries)

    def play(rank, error, spec):
        group = Communicator.__new__(Communicator)
        group.rank, group.size, group.mpi = rank, len(entries), Rank(rank, barrier, board)
        group._given_up = False
        _, found = attempt(lambda: group.agree("Thing", error, spec))
        outcomes[rank] = type(found), str(found)

    threads = [threading.Thread(target=play, args=(rank, *entry)) for rank, entry in enumerate(entries)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_is_well():
    assert agreed([(None, {"a": "1"})] * 3) == [(type(None), "None")] * 3


def test_an_error_on_one_rank_is_raised_on_all():
    found = agreed([(None, {}), (TypeError("bad dtype"), {}), (None, {})])
    assert found == [(TypeError, "bad dtype (on rank 1 of 3)")] * 3


def test_the_lowest_rank_speaks():
    found = agreed([(None, {}), (ValueError("first"), {}), (TypeError("second"), {})])
    assert found == [(ValueError, "first (on ranks 1, 2 of 3)")] * 3


def test_an_error_on_all_ranks_names_none():
    assert agreed([(ValueError("bad"), {})] * 2) == [(ValueError, "bad")] * 2


def test_errors_of_other_kinds():
    """Subclasses arrive as what they are a case of; the rest as RuntimeError."""

    class SpecialError(MemoryError):
        pass

    assert agreed([(SpecialError("no room"), {}), (None, {})]) == [(MemoryError, "no room (on rank 0 of 2)")] * 2
    assert agreed([(OSError("broken"), {}), (None, {})])[1] == (OSError, "broken (on rank 0 of 2)")
    assert agreed([(ZeroDivisionError("odd"), {}), (None, {})])[1][0] is RuntimeError


def test_the_first_differing_entry_is_named():
    found = agreed([(None, {"a": "1", "b": "2"}), (None, {"a": "1", "b": "3"}), (None, {"a": "1", "b": "2"})])
    text = "Thing: b differs over the ranks: 2 on ranks 0, 2; 3 on rank 1; expected the same on all"
    assert found == [(ValueError, text)] * 3


def test_different_operations():
    found = agreed([(None, {"a": "1"}), (None, {"a": "1", "more": "2"})])
    assert len(set(found)) == 1
    assert found[0][0] is ValueError


def test_alone():
    group = Communicator.of(None)
    assert isinstance(group, Alone)
    assert (group.rank, group.size, group.user) == (0, 1, None)
    group.agree("Thing", None, {})
    error = KeyError("as it is")
    with pytest.raises(KeyError) as caught:
        group.agree("Thing", error)
    assert caught.value is error


@pytest.mark.parametrize("thing", ["world", 3, object()], ids=["str", "int", "object"])
def test_what_is_no_communicator(thing):
    with pytest.raises(TypeError, match=f"comm is a {type(thing).__name__}, expected an mpi4py.MPI.Intracomm or None"):
        Communicator.of(thing)


def test_tags_are_positive_and_start_again():
    group = Communicator.__new__(Communicator)
    group._tags, group._tag_limit = 0, 3
    assert [group.tag() for _ in range(5)] == [1, 2, 3, 1, 2]


def test_attempt():
    assert attempt(lambda: 3) == (3, None)
    result, error = attempt(lambda: 1 / 0)
    assert result is None
    assert isinstance(error, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), (list(range(10)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")],
)
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == text


def test_plans_without_a_communicator_import_no_mpi():
    code = """
import sys
from cudecomp import Pencil, ProcessGrid, TransposePlan, Workspace
x = Pencil((2, 3, 4), ProcessGrid((1, 1)), 0)
with TransposePlan(x, x.pencil(1), "f8", workspace=Workspace()) as plan:
    plan.run(plan.empty_src(), plan.empty_dst())
assert "mpi4py.MPI" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert module._keyval is None
