"""Builds the transfer that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hiqcache.codecs.base import Codec
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.torch import TorchTransfer


def build_transfer(
    name: str,
    codec: Codec,
    arena: Arena,
    device_k: Sequence[torch.Tensor],
    device_v: Sequence[torch.Tensor],
) -> Transfer:
    """The transfer called ``name``, which support.require_transfer has resolved."""
    if name == "torch":
        return TorchTransfer(codec, arena, device_k, device_v)
    raise ValueError(f"there is no transfer {name!r}")
