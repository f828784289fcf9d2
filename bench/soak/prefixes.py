"""Prefixes as a tree of chunks, and L1's pages, which they come and go in."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Chunk:
    """A node of the tree: tokens numbered from ``first`` on, in L2 and, with ``device``, in L1."""

    first: int
    tokens: int
    host: torch.Tensor
    parent: Chunk | None
    device: torch.Tensor | None = None
    children: int = 0

    def path(self) -> list[Chunk]:
        """From the root to this chunk."""
        above = self.parent.path() if self.parent else []
        return [*above, self]


class DeviceSlots:
    """L1's pages, given out in any order."""

    def __init__(self, pages: int, page_size: int, chance: random.Random) -> None:
        self._free = list(range(pages))
        chance.shuffle(self._free)
        self._page_size = page_size
        self._within = torch.arange(page_size)

    def take(self, tokens: int) -> torch.Tensor | None:
        """Slots for so many tokens; None where there are not enough."""
        pages = tokens // self._page_size
        if pages > len(self._free):
            return None
        taken, self._free = self._free[-pages:], self._free[:-pages]
        return (torch.tensor(taken)[:, None] * self._page_size + self._within).flatten()

    def give(self, slots: torch.Tensor) -> None:
        """Back, at the end of a round."""
        self._free[:0] = (slots[:: self._page_size] // self._page_size).tolist()
