# SPDX-License-Identifier: Apache-2.0
"""Halo plans of one process on the host device; the same cases run on the GPU in gpu/test_halo_cuda.py."""

import numpy as np
import pytest
import updates

from cudecomp import HaloPlan, Pencil, ProcessGrid

ALONE = ProcessGrid((1, 1))


@pytest.mark.parametrize("way", list(updates.WAYS))
def test_updates_equal_the_reference(way):
    for pencil, options, dtype in updates.cases([(1, 1)]):
        assert not updates.problems(pencil, dtype, None, options, [way])


@pytest.mark.parametrize("width", [1, 2, 3, (2, 0)])
@pytest.mark.parametrize("order", updates.ORDERS)
def test_all_orders_and_widths(order, width):
    for axes in (0, 1, 2, None):
        pencil = Pencil((6, 70, 9), ALONE, 0, halo=[width] * 3, order=order)
        options = {"periods": (True, False, True), "axes": (axes,) if axes is not None else None}
        assert not updates.problems(pencil, "f8", None, options, ["run"])


@pytest.mark.parametrize("captured", [False, True])
def test_values_that_change_between_runs(captured):
    pencil = Pencil((9, 8, 7), ALONE, 1, halo=(1, (0, 2), 2), order="contiguous")
    assert not updates.repeated(pencil, None, 3, captured, periods=(True, True, False), fields=2)


def test_fields_of_separate_arrays():
    pencil = Pencil((5, 6, 7), ALONE, 2, halo=2)
    (before,), (after,) = updates.outcome(pencil, (True,) * 3, None, "f4")
    with HaloPlan(pencil, "f4", periods=True, fields=2) as plan:
        arrays = [before.copy(), before + 1]
        plan.run(arrays)
        np.testing.assert_array_equal(arrays[0], after)
        np.testing.assert_array_equal(arrays[1], after + 1)
