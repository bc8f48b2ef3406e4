# SPDX-License-Identifier: Apache-2.0
"""Owns how the tests on all ranks agree: each test ends on all ranks alike; knows nothing of what they check."""

import traceback

import pytest
from mpi4py import MPI

# Apart from the communicators under test, so that a message that went astray there cannot reach the verdicts.
VERDICTS = MPI.COMM_WORLD.Dup()


def raise_together(problems):
    """Fail on all ranks if one of them has problems (list of str); collective."""
    found = [
        text for rank, texts in enumerate(VERDICTS.allgather(problems)) for text in (f"[{rank}] {t}" for t in texts)
    ]
    if found:
        more = f"\n... and {len(found) - 12} more" if len(found) > 12 else ""
        pytest.fail("\n".join(found[:12]) + more, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that fails on one rank fails on all: otherwise ranks would go on with different tests, and hang.

    Only the end of the test is agreed on: a rank that leaves a test early while others wait for its messages meets the
    timeout.
    """
    failure = None
    try:
        result = yield
    except pytest.skip.Exception:
        raise
    except Exception as error:
        failure = error
    except pytest.fail.Exception as error:
        failure = error
    if failure is not None:  # before ranks meet: the others may be waiting elsewhere
        traceback.print_exception(failure)
    failed = [rank for rank, one in enumerate(VERDICTS.allgather(failure is not None)) if one]
    if failure is not None:
        raise failure
    if failed:
        pytest.fail(f"{pyfuncitem.name} failed on ranks {failed}", pytrace=False)
    return result


@pytest.fixture
def comm():
    """The communicator of all ranks."""
    return MPI.COMM_WORLD


@pytest.fixture
def verdict():
    """Fail on all ranks if one of them has problems: verdict(list of str), collective."""
    return raise_together


@pytest.fixture
def raised(comm):
    """Call something that must raise; return (type name, text) by rank, None where nothing was raised. Collective."""

    def call(action):
        try:
            action()
        except Exception as error:
            mine = type(error).__name__, str(error)
        else:
            mine = None
        return VERDICTS.allgather(mine)

    return call


@pytest.fixture
def alike(raised):
    """Call something that must raise the same on all ranks, with a text that contains the given ones. Collective."""

    def call(kind, texts, action):
        found = raised(action)
        assert all(one is not None for one in found), f"not raised everywhere: {found}"
        assert len(set(found)) == 1, f"not alike: {found}"
        name, text = found[0]
        assert name == kind.__name__, (name, text)
        for part in texts:
            assert part in text, text

    return call
