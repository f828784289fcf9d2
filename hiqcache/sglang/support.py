"""What is served and what is refused. Every refusal says what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hiqcache.codecs import get_codec
from hiqcache.codecs.base import DTYPES
from hiqcache.compatibility import WAY_OUT as _WAY_OUT
from hiqcache.compatibility import UnsupportedError
from hiqcache.record import Order, Part
from hiqcache.sglang import SUPPORTED_SGLANG
from hiqcache.sglang.contract import breaches
from hiqcache.sglang.source import Source

#: SGLang's host layouts that are served, and the arena order of each. page_first_direct is what
#: page_first becomes with --hicache-io-backend direct; the arena is the same.
ORDERS: dict[str, Order] = {
    "page_first": "page_first",
    "page_first_direct": "page_first",
    "layer_first": "layer_first",
}


def installed_sglang() -> str | None:
    """The version of the installed SGLang, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def require_supported_sglang(allowed: str = "") -> None:
    """Raise UnsupportedError unless the installed SGLang is served.

    ``allowed``: a release (HIQCACHE_ALLOW_SGLANG) that is served too, if it keeps the contract.
    """
    found = installed_sglang()
    if found == SUPPORTED_SGLANG:
        return
    source = Source.installed()
    lacking = breaches(source) if source is not None else []
    if source is not None and found == allowed and not lacking:
        return
    if source is None:
        judged = ""
    elif lacking:
        judged = f" It lacks what HiQCache needs: {' '.join(lacking)}"
    else:
        judged = (
            f" Its source has what HiQCache needs of it, and nothing of it was tested: "
            f"HIQCACHE_ALLOW_SGLANG={found} serves it at your own risk."
        )
    raise UnsupportedError(
        f"HiQCache uses internals of SGLang {SUPPORTED_SGLANG}; the installed version is "
        f"{found or 'none'}.{judged} Install sglang=={SUPPORTED_SGLANG}, or a HiQCache release "
        f"made for {found or 'your version'}. {_WAY_OUT}"
    )


def require_plain_kv_pool(kv_pool: Any, use_mla: bool, drafts: Sequence[Any]) -> None:
    """Refuse device pools of which no host pool of ours can be built. Raises UnsupportedError."""
    name = type(kv_pool).__name__
    if use_mla:
        raise UnsupportedError(
            f"the model uses multi-head latent attention ({name}): its KV is already compressed, "
            f"and HiQCache serves plain K and V heads (MHA, GQA, MQA). {_WAY_OUT}"
        )
    if getattr(kv_pool, "layer_shard_enabled", False):
        raise UnsupportedError(
            f"the device pool ({name}) is sharded by layer, HiQCache serves pools that hold every "
            f"layer of their rank. Start without layer sharding, or: {_WAY_OUT}"
        )
    if hasattr(kv_pool, "placement"):
        raise UnsupportedError(
            f"the device pool ({name}) interleaves logical pages over ranks, which HiQCache has "
            f"not been tried with. Start without page interleaving, or: {_WAY_OUT}"
        )
    if drafts:
        raise UnsupportedError(
            f"{len(drafts)} MTP draft layer(s) are packed into the host rows of {name}. HiQCache "
            "serves the target model's layers; a quantised draft would lose acceptance unseen. "
            f"Start without the packed draft (--speculative-algorithm), or: {_WAY_OUT}"
        )


def require_plain_buffers(info: Any, draft_infos: Sequence[Any], layers: int) -> None:
    """Refuse device buffers (SGLang's MHABufferInfo) that are not rows of plain heads.

    ``layers`` is the number of layers that the pool spans. Raises UnsupportedError.
    """
    if draft_infos:
        raise UnsupportedError(
            f"{len(draft_infos)} MTP draft layer(s) are packed into the host rows; HiQCache serves "
            f"the target model's layers only. Start without the packed draft, or: {_WAY_OUT}"
        )
    if info.scales is not None:
        raise UnsupportedError(
            f"the GPU's KV cache is quantised itself (dtype {info.dtype}, scales "
            f"{info.scales.layout.value}); HiQCache stores bf16 and fp16 rows. Start with "
            f"--kv-cache-dtype auto, or: {_WAY_OUT}"
        )
    if info.dtype not in DTYPES:
        # SGLang keeps an fp8 cache in uint8 buffers.
        what = "of 8 bits (fp8)" if info.dtype == torch.uint8 else str(info.dtype)
        raise UnsupportedError(
            f"the GPU's KV cache is {what}; HiQCache stores torch.bfloat16 and torch.float16 "
            f"rows. Start with --kv-cache-dtype auto and --dtype bfloat16, or: {_WAY_OUT}"
        )
    if info.head_dim != info.v_head_dim:
        raise UnsupportedError(
            f"K heads have {info.head_dim} elements and V heads {info.v_head_dim}; HiQCache serves "
            f"equal widths. {_WAY_OUT}"
        )
    if info.buffers.layout.value != "nhd":
        raise UnsupportedError(
            f"the GPU's KV buffers have layout {info.buffers.layout.value!r}; HiQCache serves nhd "
            "rows [slot, head, head_dim]. Choose an attention backend that uses them (triton, "
            f"flashinfer, fa3), or: {_WAY_OUT}"
        )
    if len(info.buffers.k) != layers:
        raise UnsupportedError(
            f"the device pool holds {len(info.buffers.k)} of this rank's {layers} layers: it is "
            f"sharded by layer. Start without layer sharding, or: {_WAY_OUT}"
        )


def require_codec(codec: str, parts: Sequence[Part]) -> None:
    """Refuse parts of a width that the codec does not serve. Raises UnsupportedError."""
    try:
        get_codec(codec).row_formats(parts)
    except ValueError as error:
        raise UnsupportedError(f"{error} {_WAY_OUT}") from error


def order_of(layout: str) -> Order:
    """The arena order for SGLang's host layout. Raises UnsupportedError for one not served."""
    if layout not in ORDERS:
        raise UnsupportedError(
            f"--hicache-mem-layout {layout}: HiQCache serves {', '.join(ORDERS)}. Choose one of "
            f"those, or: {_WAY_OUT}"
        )
    return ORDERS[layout]


def require_target_pool(label: str) -> None:
    """Refuse a speculative draft model's own pool. Raises UnsupportedError."""
    if label.startswith("draft"):
        raise UnsupportedError(
            f"host pool {label!r} belongs to a speculative draft model; HiQCache serves the target "
            "model, and a quantised draft would lose acceptance unseen. Start without "
            f"--speculative-algorithm, or: {_WAY_OUT}"
        )


def require_no_storage(backend: str | None) -> None:
    """Refuse L3 storage behind a quantised L2. Raises UnsupportedError."""
    if backend:
        raise UnsupportedError(
            f"--hicache-storage-backend {backend}: HiQCache does not write its records to L3 "
            f"storage yet. Start without a storage backend, or: {_WAY_OUT}"
        )


def require_transfer(transfer: str, device: torch.device) -> str:
    """The transfer to use on ``device``; ``auto`` resolved. Raises UnsupportedError."""
    if transfer == "auto":
        return "fused" if device.type == "cuda" else "torch"
    if transfer != "torch" and device.type != "cuda":
        raise UnsupportedError(
            f"HIQCACHE_TRANSFER={transfer} needs a CUDA device; the KV cache is on {device}. Unset "
            "HIQCACHE_TRANSFER or set it to torch."
        )
    return transfer
