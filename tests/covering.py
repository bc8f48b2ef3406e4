# SPDX-License-Identifier: Apache-2.0
"""Owns pairwise coverings: few rows of factors that hold every pair of values; knows nothing of what is tested."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows, each with a value per factor, such that any two values of any two factors meet in some row.

    Greedy and deterministic, so that all ranks find the same rows: a row starts with a pair that is still missing, and
    each further factor takes the value that completes the most missing pairs.
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i, j in itertools.product(range(len(factors[names[a]])), range(len(factors[names[b]])))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for factor in range(len(names)):
            if factor not in row:
                turn = len(rows) + factor  # breaks ties by turns, so that values without missing pairs vary as well
                values = len(factors[names[factor]])
                row[factor] = max(
                    range(values),
                    key=lambda i: (len(missing.intersection(_met(row, factor, i))), -((i - turn) % values)),
                )
        missing.difference_update(itertools.combinations(sorted(row.items()), 2))
        rows.append({name: factors[name][row[factor]] for factor, name in enumerate(names)})
    return rows


def _met(row: Mapping[int, int], factor: int, value: int) -> Iterator[tuple[Any, ...]]:
    """The pairs that a value of a factor forms with what a row has already."""
    return (tuple(sorted([entry, (factor, value)])) for entry in row.items())
