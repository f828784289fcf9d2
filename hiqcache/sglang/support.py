"""What is served and what is refused. Every refusal says what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hiqcache.codecs import get_codec
from hiqcache.codecs.base import DTYPES, FP8_DTYPES, Codec
from hiqcache.codecs.formats import BY_HALVES, require_pages
from hiqcache.compatibility import WAY_OUT as _WAY_OUT
from hiqcache.compatibility import Family, UnsupportedError
from hiqcache.features import FEATURES
from hiqcache.record import Format, Order, Part, RowFormat, format_of
from hiqcache.rotary import otherwise
from hiqcache.sglang import SUPPORTED_SGLANG
from hiqcache.sglang.adapters import SERVED
from hiqcache.sglang.contract import breaches
from hiqcache.sglang.source import Source
from hiqcache.transfers.auto import auto_transfer
from hiqcache.transfers.copy_engine import missing_batches

#: SGLang's host layouts that are served, and the arena order of each. page_first_direct is what
#: page_first becomes with --hicache-io-backend direct; the arena is the same.
ORDERS: dict[str, Order] = {
    "page_first": "page_first",
    "page_first_direct": "page_first",
    "layer_first": "layer_first",
}

#: Host pools that hold no attention KV, and so stay SGLang's own beside a quantised one.
NATIVE_POOLS = frozenset({"MambaPoolHost", "DSAIndexerPoolHost"})


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
    if found in SERVED:
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
        f"HiQCache uses internals of SGLang {' and '.join(SERVED)}; the installed version is "
        f"{found or 'none'}.{judged} Install sglang=={SUPPORTED_SGLANG}, or a HiQCache release "
        f"made for {found or 'your version'}. {_WAY_OUT}"
    )


def require_family(family: Family | None, pool: str, latent: bool, untried: bool = False) -> None:
    """Refuse models whose family is not served. Raises UnsupportedError.

    ``pool``: SGLang's class of device pool; ``family``: what it belongs to, if any; ``latent``:
    whether this release of SGLang describes latent rows; ``untried``: whether families are served
    that no GPU has served yet (HIQCACHE_ALLOW_UNTRIED).
    """
    found = f"the device pool ({pool})"
    entry = family or FEATURES["other_pools"]
    if not (untried and entry.untried):
        entry.require(found)
    if family is not None and "MLATokenToKVPoolHost" in family.pools and not latent:
        FEATURES["latent_release"].require(f"{found} keeps latent rows")


def require_rotary(codec: str, config: Any) -> None:
    """Refuse K that turns otherwise than ``codec`` takes for granted. Raises UnsupportedError.

    ``config``: the model's text configuration.
    """
    found = otherwise(lambda key: getattr(config, key, None))
    if codec in BY_HALVES and found:
        FEATURES["rotary"].require(found)


def require_whole_pool(kv_pool: Any) -> None:
    """Refuse device pools that hold a part of their rank's rows. Raises UnsupportedError."""
    name = f"the device pool ({type(kv_pool).__name__})"
    if getattr(kv_pool, "layer_shard_enabled", False):
        FEATURES["layer_shards"].require(f"{name} is sharded by layer")
    if hasattr(kv_pool, "placement"):
        FEATURES["page_interleaving"].require(f"{name} interleaves pages over ranks")


def require_no_drafts(drafts: int) -> None:
    """Refuse MTP draft layers packed into the target's host rows. Raises UnsupportedError."""
    if drafts:
        FEATURES["packed_draft"].require(f"{drafts} MTP draft layer(s) share the target's rows")


def require_plain_rows(info: Any, dtype: torch.dtype, codec: Codec) -> None:
    """Refuse device buffers (SGLang's MHABufferInfo) that are not rows of plain heads for a codec.

    ``dtype``: of the rows' elements. Raises UnsupportedError.
    """
    if info.scales is not None:
        FEATURES["quantised_kv"].require(
            f"the GPU's KV cache is quantised itself (dtype {info.dtype}, scales "
            f"{info.scales.layout.value})"
        )
    if dtype in FP8_DTYPES and dtype not in codec.dtypes:
        FEATURES["narrow_fp8"].require(f"the GPU's KV cache is {dtype}")
    if dtype not in codec.dtypes:
        FEATURES["quantised_kv"].require(f"the GPU's KV cache is {dtype}")
    if info.buffers.layout.value != "nhd":
        FEATURES["device_layouts"].require(
            f"the GPU's KV buffers have layout {info.buffers.layout.value!r}"
        )


def require_no_shared_pages(sharing: int, storage: str | None, codec: Codec) -> None:
    """Refuse L3 storage, and codecs of whole pages, where several ranks share a page.

    Raises UnsupportedError.

    ``sharing``: ranks of a decode context parallel group.
    """
    if sharing > 1 and storage is not None:
        FEATURES["dcp_storage"].require(f"--hicache-storage-backend {storage} with --dcp-size")
    if sharing > 1 and codec.page_sizes is not None:
        raise UnsupportedError(
            f"HIQCACHE_CODEC={codec.name} stores whole pages, and with --dcp-size {sharing} a rank "
            "has a part of each. Start without --dcp-size, or set HIQCACHE_CODEC=int8."
        )


def require_latent_rows(info: Any) -> None:
    """Refuse latent buffers (SGLang's MLABufferInfo) that are not rows of latent and rope.

    Raises UnsupportedError.
    """
    if not hasattr(info, "buffers"):
        FEATURES["host_dedup"].require("this rank's host pool is to hold no rows")
    if info.scales is not None or info.packed_fp8 or info.dtype not in DTYPES:
        FEATURES["quantised_kv"].require(
            f"the GPU's KV cache is quantised itself (latent rows of {info.kv_cache_dim} x "
            f"{info.dtype})"
        )
    if not isinstance(info.buffers, tuple):
        FEATURES["device_layouts"].require("the GPU keeps the latent and the rope apart")


def require_records(
    codec: str, transfer: str, parts: Sequence[Part]
) -> tuple[tuple[RowFormat, ...], Format]:
    """The rows of ``parts`` under ``codec``, and how ``transfer`` lays them out.

    Raises UnsupportedError for what either does not serve.
    """
    try:
        rows = get_codec(codec).row_formats(parts)
        return rows, format_of(transfer, rows)
    except ValueError as error:
        raise UnsupportedError(f"{error} {_WAY_OUT}") from error


def order_of(layout: str) -> Order:
    """The arena order for SGLang's host layout. Raises UnsupportedError for one not served."""
    if layout not in ORDERS:
        FEATURES["other_layouts"].require(f"--hicache-mem-layout {layout}")
    return ORDERS[layout]


def require_l2_alone(retraction: str | None) -> None:
    """Refuse an L2 that holds retracted requests too. Raises UnsupportedError.

    ``retraction``: SGLang's resolved --disaggregation-decode-retraction-backup.
    """
    if retraction == "host_pool":
        FEATURES["shared_retraction"].require(
            "--disaggregation-decode-retraction-backup host_pool beside --enable-hierarchical-cache"
        )


def require_one_offloaded_pool(label: str) -> None:
    """Refuse a decode server that offloads several pools to storage. Raises UnsupportedError.

    ``label``: SGLang's name for a pool of its; ``kv`` where there is one.
    """
    if label != "kv":
        FEATURES["decode_offload_of_several"].require(
            f"--disaggregation-decode-enable-offload-kvcache with a pool {label!r}"
        )


def require_known_pool(kind: str, name: str) -> None:
    """Refuse a host pool that SGLang builds as it likes in L2. Raises UnsupportedError.

    ``kind``: its class; ``name``: SGLang's name for it, which begins with draft for a draft's.
    """
    if kind not in NATIVE_POOLS and not name.startswith("draft"):
        FEATURES["other_pools"].require(f"SGLang's host pool of kind {kind}")


def nothing_to_quantise(codec: str, enabled: bool, cache: str) -> str:
    """What to say where HIQCACHE_CODEC is set and SGLang has built no L2.

    ``enabled``: whether --enable-hierarchical-cache is given; ``cache``: SGLang's class of prefix
    cache.
    """
    if enabled:
        return (
            f"HIQCACHE_CODEC={codec} does nothing here: SGLang chose {cache} for this model, which "
            "keeps no L2 (host KV cache). Unset HIQCACHE_CODEC."
        )
    return (
        f"HIQCACHE_CODEC={codec} does nothing here: this server keeps no L2 (host KV cache). Add "
        "--enable-hierarchical-cache (and --hicache-size or --hicache-ratio), or unset "
        "HIQCACHE_CODEC."
    )


def require_transfer(transfer: str, device: torch.device, codec: Codec, page_size: int) -> str:
    """The transfer to use on ``device``; ``auto`` resolved. Raises UnsupportedError."""
    try:
        require_pages(codec.name, page_size)
    except ValueError as error:
        raise UnsupportedError(f"{error} {_WAY_OUT}") from error
    if codec.page_sizes is not None and transfer == "mover":
        raise UnsupportedError(
            f"HIQCACHE_TRANSFER=mover moves rows one by one, and HIQCACHE_CODEC={codec.name} "
            "stores whole pages. Unset HIQCACHE_TRANSFER, or set HIQCACHE_CODEC=int8."
        )
    if transfer == "auto":
        return auto_transfer(codec.name, device.type, missing_batches() is None)
    if transfer != "torch" and device.type != "cuda":
        raise UnsupportedError(
            f"HIQCACHE_TRANSFER={transfer} needs a CUDA device; the KV cache is on {device}. Unset "
            "HIQCACHE_TRANSFER or set it to torch."
        )
    return transfer
