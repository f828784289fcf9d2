"""Which slots and rows a timed transfer moves: whole pages, in sequence or at random."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

#: How the pages of a transfer lie, in the host pool and on the device.
Slots = Literal["sequential", "random"]
SLOTS: tuple[Slots, ...] = ("sequential", "random")

#: Index sets in rotation, so that no repetition finds its rows in the GPU's L2 (60 MB).
INDEX_SETS = 4


class Indices(NamedTuple):
    """Host slots and device rows of a transfer; the host slots on the CPU too."""

    host: torch.Tensor
    rows: torch.Tensor
    host_on_cpu: torch.Tensor


def index_sets(
    tokens: int,
    slots: Slots,
    host_slots: int,
    device_slots: int,
    page: int,
    device: str = "cuda",
) -> list[Indices]:
    """INDEX_SETS sets of host slots and device rows, whole pages of ``page`` both.

    Raises ValueError where ``tokens`` are no whole pages or one of the pools holds fewer.
    """
    if tokens % page or tokens > min(host_slots, device_slots):
        raise ValueError(
            f"{tokens} tokens must be whole pages of {page}, and no more than the {host_slots} "
            f"slots of the host and the {device_slots} of the device."
        )
    generator = torch.Generator().manual_seed(tokens)
    count, sets = tokens // page, []

    def chosen(of: int, index: int) -> torch.Tensor:
        pages = of // page
        if slots == "random":
            first = torch.randperm(pages, generator=generator)[:count]
        else:
            first = torch.arange(count) + (pages - count) * index // INDEX_SETS
        return (first[:, None] * page + torch.arange(page)).flatten()

    for index in range(INDEX_SETS):
        host, rows = chosen(host_slots, index), chosen(device_slots, index)
        sets.append(Indices(host.to(device), rows.to(device), host))
    return sets
