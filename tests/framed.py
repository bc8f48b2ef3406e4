# SPDX-License-Identifier: Apache-2.0
"""Owns memory between canaries: who writes before or behind an array is found out; knows nothing of what is in it."""

from __future__ import annotations

from typing import Any

import numpy as np

CANARY = 0xA5
WIDTH = 128  # bytes on either side: more than the widest store of any kernel


class Framed:
    """An array, at any address, with canaries on both sides.

    Parameters
    ----------
    array : ndarray
        What it holds at first.
    shift : int
        Bytes between a multiple of 64 and its start.
    """

    def __init__(self, array: np.ndarray, shift: int = 0):
        self._block = np.full(array.nbytes + 2 * WIDTH + 128, CANARY, np.uint8)
        self._start = WIDTH + -(self._block.ctypes.data + WIDTH) % 64 + shift
        inside = self._block[self._start :][: array.nbytes]
        self.array: np.ndarray = inside.view(array.dtype).reshape(array.shape)
        self.array[...] = array

    @property
    def address(self) -> int:
        """Where the array starts."""
        return self._block.ctypes.data + self._start

    def problems(self, what: Any) -> list[str]:
        """What is wrong with the canaries: texts, none if all is well."""
        around = self._block.copy()
        around[self._start :][: self.array.nbytes] = CANARY
        places = np.flatnonzero(around != CANARY) - self._start
        if not places.size:
            return []
        return [f"{what}: bytes {places[0]} to {places[-1]} of an array of {self.array.nbytes} were written"]
