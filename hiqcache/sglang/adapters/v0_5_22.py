"""SGLang 0.5.22: host pools are built of the device pool itself, which describes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from hiqcache.sglang.terms import ASSEMBLER, BUILDER, MEM, Need

_HOST_POOL = f"{MEM}.pool_host.mha"

NEEDS: tuple[Need, ...] = (
    Need(ASSEMBLER, "get_mha_host_pool_cls", "hooked: the class of a pool", ("device_pool",)),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost.__init__",
        "SGLang builds the quantised pool with these, which it hands on",
        (
            *("device_pool", "host_to_device_ratio", "host_size", "page_size", "layout"),
            *("pin_memory", "device", "allocator_type", "mtp_draft_device_pools", "pool_label"),
        ),
        alone=True,
    ),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost._initialize_transfer_views",
        "overridden: it builds the transfer",
        alone=True,
    ),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost",
        "the rows that SGLang's own pools move",
        has=("device_pool",),
    ),
    Need(
        f"{MEM}.memory_pool",
        "MHATokenToKVPool",
        "the device's rows",
        has=(
            *("k_buffer", "v_buffer", "head_num", "head_dim", "v_head_dim", "row_dim"),
            *("store_dtype", "device", "kv_cache_layout", "k_scale_buffer"),
            "native_k_scale_buffer",
        ),
    ),
    Need(
        BUILDER,
        "build_kv_cache",
        "hooked: draft models beside the target",
        ("hicache_draft_plan",),
    ),
    Need(
        "sglang.srt.speculative.base_spec_worker",
        "HiCacheDraftPlan",
        "draft models beside the target",
        ("mode", "device_pools"),
    ),
)

LATENT = False

_drafts: ContextVar[tuple[Any, ...]] = ContextVar("hiqcache_sidecar_drafts", default=())


class Rows(NamedTuple):
    """The rows of ``pool``, in the words of 0.5.23's MHABufferInfo."""

    pool: Any
    buffers: SimpleNamespace
    head_num: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    scales: SimpleNamespace | None


def build_kv_cache(original: Any, *args: Any, hicache_draft_plan: Any = None, **kw: Any) -> Any:
    """Around SGLang's: the sidecar drafts, which its parameters for a cache do not name."""
    plan = hicache_draft_plan
    beside = plan is not None and plan.mode.value == "sidecar"
    token = _drafts.set(tuple(plan.device_pools) if beside else ())
    try:
        return original(*args, hicache_draft_plan=plan, **kw)
    finally:
        _drafts.reset(token)


HOOKS: tuple[tuple[str, Callable[..., Any]], ...] = ((f"{BUILDER}.build_kv_cache", build_kv_cache),)


def rows(given: Any) -> Any:
    k, v = tuple(given.k_buffer), tuple(given.v_buffer)
    layout = "nhd" if given.kv_cache_layout == "page_major" else given.kv_cache_layout
    # Pools of equal widths may hold several heads' rows in one (as 0.5.23 counts them).
    equal = given.head_dim == given.v_head_dim
    return Rows(
        given,
        SimpleNamespace(k=k, v=v, layout=SimpleNamespace(value=layout)),
        given.row_dim // given.head_dim if equal else given.head_num,
        given.head_dim,
        given.v_head_dim,
        given.store_dtype,
        k[0].device if k else torch.device(given.device),
        _scales(given),
    )


def rows_of_device_pool(kv_pool: Any) -> Any:
    return rows(kv_pool)


def rows_of_host_pool(pool: Any) -> Any:
    return rows(pool.device_pool)


def packed_drafts(arguments: Mapping[str, Any]) -> int:
    return len(arguments.get("mtp_draft_device_pools", ()))


def sidecar_drafts(params: Any) -> tuple[Any, ...]:
    return _drafts.get()


def _scales(pool: Any) -> SimpleNamespace | None:
    for name in ("k_scale_buffer", "native_k_scale_buffer"):
        if getattr(pool, name, None) is not None:
            return SimpleNamespace(layout=SimpleNamespace(value=name))
    return None
