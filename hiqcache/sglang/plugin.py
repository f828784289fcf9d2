"""The entry points that SGLang loads: the general plug-in and the CPU platform.

SGLang runs ``register`` in each of its processes before the engine starts, and swallows whatever
Exception it raises. A bad setting must stop the server rather than serve BF16 unseen, so it leaves
by SystemExit, which is no Exception: the server ends with the message before it loads a model.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable
from typing import Any

from hiqcache.compatibility import UnsupportedError
from hiqcache.settings import Settings, SettingsError
from hiqcache.sglang import SUPPORTED_SGLANG
from hiqcache.sglang.support import (
    installed_sglang,
    require_no_storage,
    require_plain_kv_pool,
    require_supported_sglang,
)

logger = logging.getLogger(__name__)

CPU_PLATFORM = "hiqcache_cpu"

_ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_RADIX_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID_CONTROLLER = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)
_GROUP = "sglang.srt.mem_cache.pool_host.group.HostPoolGroup"
_STAGING = "sglang.srt.mem_cache.pool_host.mha.prepare_mha_write_back_staging"

#: Host pools that hold no attention KV, and so stay SGLang's own beside a quantised one.
_STATE_POOLS = frozenset({"MambaPoolHost"})


def cpu_platform() -> str | None:
    """The CPU platform's class, where SGLANG_PLATFORM names it; None stays out of the way."""
    if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        return "hiqcache.sglang.cpu_platform.HiQCacheCpuPlatform"
    return None


def register() -> None:
    """Hook SGLang's choice of host pool. Exits with a message where settings can't be served."""
    try:
        settings = Settings.from_env()
        if settings.quantises:
            require_supported_sglang(settings.allow_sglang)
    except (SettingsError, UnsupportedError) as error:
        raise SystemExit(f"HiQCache: {error}") from error

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: list[tuple[str, Callable[..., Any], HookType]] = []
    choose: Callable[[Any, Any], type] | None = None
    if settings.quantises:
        choose = _quantised_pool
        hooks += [
            (f"{_ASSEMBLER}.build_kv_host_pool", _check_kv_pool, HookType.BEFORE),
            # Every assembly ends in a group of host pools; some never ask the selector.
            (f"{_GROUP}.__init__", _check_group, HookType.BEFORE),
            (f"{_GROUP}.add_entry", _check_entry, HookType.BEFORE),
            # GPU memory for the stock pool's write-backs, which nothing would use.
            (_STAGING, _no_staging, HookType.REPLACE),
            (f"{_CONTROLLER}.attach_storage_backend", _check_storage, HookType.BEFORE),
        ]
        if settings.transfer == "dma":
            hooks.append(
                (f"{_HYBRID_CONTROLLER}._move_pool_indices", _keep_indices, HookType.AROUND)
            )
    elif os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        choose = _copying_pool
    if settings.metrics and _served(settings):
        choose = _observing(choose or _stock_pool)
        hooks.append((f"{_RADIX_CACHE}.evict_host", _mark_eviction, HookType.AROUND))
    elif settings.metrics:
        logger.warning(
            "HiQCache: its metrics need SGLang %s; this is %s, so the host pool goes unmeasured.",
            SUPPORTED_SGLANG,
            installed_sglang(),
        )
    if choose is not None:
        hooks.append((f"{_ASSEMBLER}.get_mha_host_pool_cls", choose, HookType.AROUND))
    for target, hook, kind in hooks:
        if settings.quantises:
            _require(target)
        HookRegistry.register(target, hook, kind)


def _served(settings: Settings) -> bool:
    try:
        require_supported_sglang(settings.allow_sglang)
    except UnsupportedError:
        return False
    return True


def _require(target: str) -> None:
    """Exit where ``target`` is not there: SGLang would log the lost hook, and serve BF16."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"HiQCache: SGLang has no {target} ({error}), which it hooks to quantise the host "
            f"pool. Reinstall sglang=={SUPPORTED_SGLANG}, or unset HIQCACHE_CODEC."
        ) from error


def _observing(choose: Callable[[Any, Any], type]) -> Callable[[Any, Any], type]:
    def chosen(original: Any, buffer_info: Any) -> type:
        from sglang.srt.runtime_context import get_memory

        from hiqcache.sglang.observed import observed

        pool = choose(original, buffer_info)
        # TensorCast's store serves SGLang's own class and no subclass of it.
        return pool if get_memory().hicache_storage_backend == "tensorcast" else observed(pool)

    return chosen


def _mark_eviction(original: Any, *args: Any, **kwargs: Any) -> Any:
    from hiqcache.sglang.observed import mark_eviction

    return mark_eviction(original, *args, **kwargs)


def _stock_pool(original: Any, buffer_info: Any) -> type:
    chosen: type = original(buffer_info)
    return chosen


def _quantised_pool(original: Any, buffer_info: Any) -> type:
    from hiqcache.sglang.host_pool import MHATokenToKVPoolHostINT8

    return MHATokenToKVPoolHostINT8


def _copying_pool(original: Any, buffer_info: Any) -> type:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from hiqcache.sglang.host_pool import MHATokenToKVPoolHostCopy

    chosen: type = original(buffer_info)
    return MHATokenToKVPoolHostCopy if chosen is MHATokenToKVPoolHost else chosen


def _check_kv_pool(**kwargs: Any) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import is_mla_pool

    kv_pool, use_mla = kwargs["kv_pool"], kwargs.get("use_mla")
    require_plain_kv_pool(
        kv_pool,
        is_mla_pool(kv_pool) if use_mla is None else use_mla,
        kwargs.get("mtp_draft_device_pools", ()),
    )


def _check_group(group: Any, entries: Any) -> None:
    for entry in entries:
        _check_entry(group, entry)


def _check_entry(group: Any, entry: Any) -> None:
    """Refuse KV pools that SGLang builds without asking its selector, which would stay BF16."""
    from hiqcache.sglang.host_pool import MHATokenToKVPoolHostINT8

    pool = entry.host_pool
    name = type(pool).__name__
    if not isinstance(pool, MHATokenToKVPoolHostINT8) and name not in _STATE_POOLS:
        raise UnsupportedError(
            f"SGLang builds a host pool of kind {name} for this model, which HiQCache cannot "
            "quantise: it serves plain multi-head, grouped-query and multi-query attention. Unset "
            "HIQCACHE_CODEC (or set it to bf16) to serve it with SGLang's own host pool."
        )


def _no_staging(*args: Any, **kwargs: Any) -> None:
    """No GPU memory is set aside for write-backs: a quantised pool's transfers bring their own."""


def _check_storage(controller: Any, storage_backend: str, *args: Any, **kwargs: Any) -> None:
    require_no_storage(storage_backend)


def _keep_indices(
    original: Any,
    controller: Any,
    host_pool: Any,
    host_indices: Any,
    device_indices: Any,
    **kwargs: Any,
) -> Any:
    """Host slots stay on the CPU, where the copy engine's batches are made.

    SGLang would copy them from pageable memory on the scheduler's stream, which it avoids for its
    own staged write-backs.
    """
    from hiqcache.sglang.host_pool import MHATokenToKVPoolHostINT8

    if controller.io_backend == "kernel" and isinstance(host_pool, MHATokenToKVPoolHostINT8):
        return host_indices, device_indices
    return original(controller, host_pool, host_indices, device_indices, **kwargs)
