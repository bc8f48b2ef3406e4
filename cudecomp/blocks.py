# SPDX-License-Identifier: Apache-2.0
"""Owns blocks: boxes of a message that together fill one box of the receiver; knows nothing of messages or memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from .exchange import BoxCopy


class Block(NamedTuple):
    """Boxes that together fill one box of the receiver, and travel as that box."""

    shape: tuple[int, ...]
    dst_start: tuple[int, ...]
    copies: tuple[BoxCopy, ...]

    def distance(self, box: BoxCopy, strides: tuple[int, ...]) -> int:
        """Return where one of its boxes begins within it, in items, by its strides per axis."""
        return sum((b - a) * s for a, b, s in zip(self.dst_start, box.dst_start, strides, strict=True))


def blocks_of(copies: Sequence[BoxCopy], order: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the blocks that boxes fill at the receiver, in the order of its memory: neighbours that fit are joined.

    The faces of a halo come from several places, since the halos of the other axes take part, and go to one.
    """
    blocks = [Block(copy.shape, copy.dst_start, (copy,)) for copy in copies]
    for axis in reversed(order) if len(blocks) > 1 else ():
        found: list[Block] = []
        for block in sorted(blocks, key=partial(_apart, axis=axis)):
            if found and _continues(found[-1], block, axis):
                block = _joined(found.pop(), block, axis)
            found.append(block)
        blocks = found
    return tuple(sorted(blocks, key=lambda block: [block.dst_start[axis] for axis in order]))


def _apart(block: Block, axis: int) -> Any:
    """Sort blocks along an axis, those with other extents along the other axes apart."""
    start, shape = block.dst_start, block.shape
    return start[:axis], start[axis + 1 :], shape[:axis], shape[axis + 1 :], start[axis]


def _continues(block: Block, after: Block, axis: int) -> bool:
    return (
        _apart(block, axis)[:-1] == _apart(after, axis)[:-1]
        and block.dst_start[axis] + block.shape[axis] == after.dst_start[axis]
    )


def _joined(block: Block, after: Block, axis: int) -> Block:
    shape = list(block.shape)
    shape[axis] += after.shape[axis]
    return Block(tuple(shape), block.dst_start, block.copies + after.copies)
