"""Builds the transfer that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hiqcache.codecs.base import Codec
from hiqcache.transfers.base import Arena, Transfer


def build_transfer(
    name: str,
    codec: Codec,
    arena: Arena,
    device: Sequence[Sequence[torch.Tensor]],
    checked: bool = False,
) -> Transfer:
    """The transfer called ``name``, which support.require_transfer has resolved.

    ``device``: the pool's buffers by part and layer, as Transfer takes them. ``checked``: in a
    CheckedTransfer.

    Each is imported where it is used: dma and fused need Triton, mover SGLang's JIT kernels.
    """
    if checked:
        from hiqcache.transfers.checked import CheckedTransfer

        return CheckedTransfer(build_transfer(name, codec, arena, device))
    if name == "torch":
        from hiqcache.transfers.torch import TorchTransfer

        return TorchTransfer(codec, arena, device)
    if name == "dma":
        from hiqcache.transfers.dma import DmaTransfer

        return DmaTransfer(codec, arena, device)
    if name == "fused":
        from hiqcache.transfers.fused import FusedTransfer

        return FusedTransfer(codec, arena, device)
    if name == "mover":
        from hiqcache.sglang.jit_mover import JitMover
        from hiqcache.transfers.mover import MoverTransfer

        return MoverTransfer(codec, arena, device, JitMover())
    raise ValueError(f"there is no transfer {name!r}")
