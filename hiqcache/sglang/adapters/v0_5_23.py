"""SGLang 0.5.23: a device pool describes its rows; host pools are built of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hiqcache.sglang.terms import ASSEMBLER, MEM, Need

_HOST_POOL = f"{MEM}.pool_host.mha"

NEEDS: tuple[Need, ...] = (
    Need(ASSEMBLER, "get_mha_host_pool_cls", "hooked: the class of a pool", ("buffer_info",)),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost.__init__",
        "SGLang builds the quantised pool with these, which it hands on",
        (
            *("buffer_info", "host_to_device_ratio", "host_size", "page_size", "layout"),
            *("pin_memory", "device", "allocator_type", "device_capacity_tokens", "start_layer"),
            *("end_layer", "draft_buffer_infos", "write_back_staging", "pool_label"),
            "host_token_capacity",
        ),
        alone=True,
    ),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost._initialize_transfer_views",
        "overridden: it builds the transfer",
        ("buffer_info", "write_back_staging"),
        alone=True,
    ),
    Need(
        _HOST_POOL,
        "MHATokenToKVPoolHost",
        "the rows that SGLang's own pools move",
        has=("_buffer_infos",),
    ),
    Need(
        f"{MEM}.device_pool_info",
        "MHABufferInfo",
        "the device's rows",
        ("buffers", "head_num", "head_dim", "v_head_dim", "dtype", "device", "scales"),
    ),
    Need(f"{MEM}.device_pool_info", "KVBuffers", "the device's rows", ("k", "v", "layout")),
    Need(f"{MEM}.memory_pool", "MHATokenToKVPool.get_device_pool_infos", "the device's rows"),
    # Latent rows.
    Need(
        f"{MEM}.pool_host.mla",
        "MLATokenToKVPoolHost.__init__",
        "SGLang builds the quantised pool with these, which it hands on",
        (
            *("buffer_info", "host_to_device_ratio", "host_size", "page_size", "layout"),
            *("pin_memory", "device", "allocator_type", "override_kv_cache_dim"),
            *("draft_buffer_infos", "dcp_size", "dcp_rank", "device_capacity_tokens"),
            *("start_layer", "end_layer", "target_layer_num", "layer_shard_enabled"),
            *("pool_label", "host_token_capacity"),
        ),
        alone=True,
    ),
    Need(
        f"{MEM}.pool_host.mla",
        "MLATokenToKVPoolHost._initialize_transfer_views",
        "overridden: it builds the transfer",
        alone=True,
    ),
    Need(
        f"{MEM}.pool_host.mla",
        "MLATokenToKVPoolHost",
        "the rows that host pools move",
        has=("device_kv_buffers", "_native_buffers"),
    ),
    Need(
        f"{MEM}.device_pool_info",
        "MLABufferInfo",
        "the device's latent rows",
        (
            *("buffers", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dtype", "device"),
            *("packed_fp8", "scales"),
        ),
    ),
    Need(f"{MEM}.memory_pool", "MLATokenToKVPool.get_device_pool_infos", "the device's rows"),
    Need(
        f"{MEM}.pool_host.host_pool_decl",
        "HostPoolDecl",
        "pools beside KV rows",
        ("storage_info", "owned_device_layers"),
        has=("is_layout_root",),
    ),
    Need(
        f"{MEM}.cache_init_params",
        "CacheInitParams",
        "draft models beside the target",
        ("sidecar_draft_device_pools",),
    ),
)

LATENT = True

HOOKS: tuple[tuple[str, Callable[..., Any]], ...] = ()


def rows(given: Any) -> Any:
    return given


def rows_of_device_pool(kv_pool: Any) -> Any:
    return kv_pool.get_device_pool_infos()[0].buffer_info


def rows_of_host_pool(pool: Any) -> Any:
    return pool._buffer_infos[0]


def packed_drafts(arguments: Mapping[str, Any]) -> int:
    return len(arguments.get("draft_buffer_infos", ()))


def sidecar_drafts(params: Any) -> tuple[Any, ...]:
    return tuple(params.sidecar_draft_device_pools)
