"""The entry points that SGLang loads: the general plug-in and the CPU platform.

SGLang runs ``register`` in each of its processes before the engine starts, and swallows whatever
Exception it raises. A bad setting must stop the server rather than serve BF16 unseen, so it leaves
by SystemExit, which is no Exception: the server ends with the message before it loads a model.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from collections.abc import Callable
from typing import Any

from hiqcache.compatibility import UnsupportedError
from hiqcache.settings import Settings, SettingsError
from hiqcache.sglang import SUPPORTED_SGLANG
from hiqcache.sglang.adapters import SERVED, adapter
from hiqcache.sglang.assembly import Assembly
from hiqcache.sglang.support import (
    installed_sglang,
    require_supported_sglang,
)

logger = logging.getLogger(__name__)

CPU_PLATFORM = "hiqcache_cpu"

_ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_BUILDER = "sglang.srt.mem_cache.kv_cache_builder"
_RADIX_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_STORAGE = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend"
_HYBRID_CONTROLLER = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)
_GROUP = "sglang.srt.mem_cache.pool_host.group.HostPoolGroup"


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

    copies = os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM
    measured = settings.metrics and _served(settings)
    assembly = Assembly(settings, copies=copies, measured=measured)
    hooks: list[tuple[str, Callable[..., Any], HookType]] = []
    if settings.quantises:
        hooks += [
            (f"{_ASSEMBLER}.build_kv_host_pool", assembly.build_kv_host_pool, HookType.AROUND),
            (
                f"{_ASSEMBLER}.build_mamba_host_pool",
                assembly.build_mamba_host_pool,
                HookType.AROUND,
            ),
            # Every assembly ends in a group of host pools; some never ask the selector.
            (f"{_GROUP}.__init__", assembly.check_group, HookType.BEFORE),
            (f"{_GROUP}.add_entry", assembly.check_entry, HookType.BEFORE),
            (
                f"{_BUILDER}.prepare_hicache_staging",
                assembly.prepare_hicache_staging,
                HookType.AROUND,
            ),
            (f"{_BUILDER}.create_tree_cache", assembly.check_model, HookType.BEFORE),
            (f"{_BUILDER}.create_tree_cache", assembly.create_tree_cache, HookType.AFTER),
            (f"{_HYBRID_CONTROLLER}._move_pool_indices", _keep_indices, HookType.AROUND),
        ]
    if measured:
        hooks.append((f"{_RADIX_CACHE}.evict_host", _mark_eviction, HookType.AROUND))
    elif settings.metrics:
        logger.warning(
            "HiQCache: its metrics need SGLang %s; this is %s, so the host pool goes unmeasured.",
            " or ".join(SERVED),
            installed_sglang(),
        )
    if settings.quantises or copies or measured:
        hooks += [
            (f"{_ASSEMBLER}.{hook.__name__}", hook, HookType.AROUND)
            for hook in (
                assembly.attach_hybrid_pool_to_unified_cache,
                assembly.get_mha_host_pool_cls,
            )
        ]
        hooks.append(
            (
                f"{_BUILDER}.maybe_register_hicache_draft",
                assembly.maybe_register_hicache_draft,
                HookType.AROUND,
            )
        )
        hooks += [(target, hook, HookType.AROUND) for target, hook in adapter().HOOKS]
    if settings.quantises or measured:
        hooks.append((_STORAGE, _guard_storage(measured), HookType.AROUND))
    for target, hook, kind in hooks:
        if settings.quantises:
            _require(target)
        HookRegistry.register(target, hook, kind)
    if (settings.quantises or copies or measured) and adapter().LATENT:
        # SGLang has no selector for latent pools: its assembler calls the class by this name. A
        # REPLACE hook would reach every module that imports the class.
        assembler = importlib.import_module(_ASSEMBLER)
        assembler.MLATokenToKVPoolHost = assembly.mla_host_pool  # type: ignore[attr-defined]


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


def _mark_eviction(original: Any, *args: Any, **kwargs: Any) -> Any:
    from hiqcache.sglang.observed import mark_eviction

    return mark_eviction(original, *args, **kwargs)


def _guard_storage(measured: bool) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        from hiqcache.sglang.storage_backend import create_backend

        return create_backend(*args, measured=measured, **kwargs)

    return hook


def _keep_indices(
    original: Any,
    controller: Any,
    host_pool: Any,
    host_indices: Any,
    device_indices: Any,
    **kwargs: Any,
) -> Any:
    """Host slots stay on the CPU, where the copy engine's batches are made, and fused's copies.

    SGLang would copy them from pageable memory on the scheduler's stream, which it avoids for its
    own staged write-backs.
    """
    from hiqcache.sglang.host_pool import QuantisedPool

    ours = isinstance(host_pool, QuantisedPool) and host_pool.takes_cpu_slots
    if controller.io_backend == "kernel" and ours:
        return host_indices, device_indices
    return original(controller, host_pool, host_indices, device_indices, **kwargs)
