"""What a form of the gated delta rule moves and keeps, counted where it is moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Bytes, added up by the calls that are given it.

    read, written  recurrent state, by passes over tiles of it in memory. What a pass looks at again while a tile is in
                   the cache is not counted again, nor is what a processor reads of memory that it is about to write.
    kept           what verify leaves for the commit: factors, inputs or states.
    working        states beside the committed one while verify runs, which a later commit does not need.
    """

    read: int = 0
    written: int = 0
    kept: int = 0
    working: int = 0


def size(*tensors: torch.Tensor) -> int:
    """Bytes of their numbers."""
    return sum(each.numel() * each.element_size() for each in tensors)
