"""Which host pools SGLang assembles for L2, and what each becomes.

SGLang builds host pools for several purposes. Of them are quantised L2 and what storage shares
with it:

=====================  ============================================  ==========================
host pool              built by (SGLang 0.5.23)                      here
=====================  ============================================  ==========================
L2                     attach_hybrid_pool_to_unified_cache, with     quantised
                       --enable-hierarchical-cache
retracted requests     the same, without it: PD decode servers       SGLang's own, unless
                                                                     HIQCACHE_RETRACTION asks
both in one pool       the same, with both                           refused, unless it asks
decode offload to L3   DecodeKVCacheOffloadManager: PD decode        quantised: its pages are those
                       servers                                       that prefill's L2 reads
draft models           maybe_register_hicache_draft; label draft*    SGLang's own, measured
sparse attention       HiSparseCoordinator                           SGLang's own, not hooked
recurrent states       build_mamba_host_pool                         SGLang's own
=====================  ============================================  ==========================
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from hiqcache.settings import Settings
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.support import (
    nothing_to_quantise,
    require_family,
    require_known_pool,
    require_l2_alone,
    require_one_offloaded_pool,
    require_rotary,
    require_whole_pool,
)

logger = logging.getLogger(__name__)


class _Building(NamedTuple):
    """What SGLang is building: L2, or the host pool of a draft model beside it.

    growth: slots for each slot of SGLang's own pools (see sizing). kv_dtype: of the device pool
    whose host pool is being built.
    """

    what: Literal["l2", "draft"]
    growth: Fraction = Fraction(1)
    kv_dtype: Any = None


_building: ContextVar[_Building | None] = ContextVar("hiqcache_building", default=None)


@contextmanager
def building(what: Literal["l2", "draft"], growth: Fraction = Fraction(1)) -> Iterator[None]:
    """While SGLang builds host pools inside."""
    token = _building.set(_Building(what, growth))
    try:
        yield
    finally:
        _building.reset(token)


class Assembly:
    """Hooks around SGLang's assembler of host pools (names are SGLang's functions).

    copies: replace SGLang's own pools by ones that move rows by plain indexing (CPUs).
    """

    def __init__(self, settings: Settings, *, copies: bool, measured: bool) -> None:
        self._settings = settings
        self._copies = copies
        self._measured = measured

    def attach_hybrid_pool_to_unified_cache(
        self, original: Any, cache: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

        memory = get_memory()
        asked = self._settings.retraction == "quantised"
        if not memory.enable_hierarchical_cache and not asked:
            if self._settings.quantises:
                logger.info(
                    "HiQCache: the host pool for retracted requests stays SGLang's own, lossless "
                    "(HIQCACHE_RETRACTION=quantised stores them by the codec)."
                )
            return original(cache, params, *args, **kwargs)
        if not self._settings.quantises:
            with building("l2"):
                return original(cache, params, *args, **kwargs)

        from hiqcache.sglang.families import family_of
        from hiqcache.sglang.sizing import growth

        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        states = getattr(params.req_to_token_pool, "mamba_pool", None)
        family = family_of(kvcache, states is not None, get_parallel().pp_size)
        untried = self._settings.allow_untried
        require_family(family, type(kvcache).__name__, adapter().LATENT, untried)
        if not asked:
            require_l2_alone(get_disagg().disaggregation_decode_retraction_backup)
        factor = Fraction(1)
        if memory.hicache_size > 0 or self._settings.sizing == "bytes":
            factor = growth(params, self._settings)
        by_ratio = memory.hicache_size <= 0
        ratio = float(memory.hicache_ratio * factor) if by_ratio else memory.hicache_ratio
        with building("l2", factor), memory.override(hicache_ratio=ratio):
            return original(cache, params, *args, **kwargs)

    def maybe_register_hicache_draft(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.runtime_context import get_memory

        if not get_memory().enable_hierarchical_cache:
            return original(*args, **kwargs)
        with building("draft"):
            return original(*args, **kwargs)

    def build_kv_host_pool(self, original: Any, **kwargs: Any) -> Any:
        from sglang.srt.runtime_context import get_memory

        now = _building.get()
        kv_pool = kwargs["kv_pool"]
        if now is None:
            if not (_offloads() and self._settings.quantises):
                return original(**kwargs)
            require_one_offloaded_pool(kwargs.get("pool_label", "kv"))
            # Rows pass through it on their way to storage; it needs no more slots than SGLang's.
            require_whole_pool(kv_pool)
            with building("l2"):
                return original(**kwargs)

        from hiqcache.sglang.sizing import shrinkage

        require_whole_pool(kv_pool)
        size = kwargs.get("host_size")
        size = get_memory().hicache_size if size is None else size
        if size > 0 and kv_pool.layer_num:
            kept = shrinkage(kv_pool, kwargs["page_size"], self._settings)
            kwargs["host_size"] = float(Fraction(size) * now.growth * kept)
        token = _building.set(now._replace(kv_dtype=kv_pool.dtype))
        try:
            return original(**kwargs)
        finally:
            _building.reset(token)

    def build_mamba_host_pool(self, original: Any, *args: Any, host_size: float, **kw: Any) -> Any:
        now = _building.get()
        if now is not None:
            host_size = float(Fraction(host_size) * now.growth)
        return original(*args, host_size=host_size, **kw)

    def get_mha_host_pool_cls(self, original: Any, device_rows: Any) -> Callable[..., Any]:
        """What SGLang calls with a host pool's arguments, in place of a class of its own."""
        from hiqcache.sglang.rows import layers_of

        layers = layers_of(adapter().rows(device_rows))
        return functools.partial(self._build, original(device_rows), layers)

    def mla_host_pool(self, *args: Any, target_layer_num: int, **kwargs: Any) -> Any:
        """What SGLang's assembler calls in place of the class MLATokenToKVPoolHost."""
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

        kwargs["target_layer_num"] = target_layer_num
        return self._build(MLATokenToKVPoolHost, target_layer_num, *args, **kwargs)

    def _build(self, stock: type, layers: int, *args: Any, **kwargs: Any) -> Any:
        chosen = self._choose(stock, layers, kwargs["pool_label"])
        now = _building.get()
        if now is not None and _is_quantised(chosen):
            kwargs["kv_dtype"] = now.kv_dtype
        return chosen(*args, **kwargs)

    def _choose(self, stock: type, layers: int, label: str) -> type:
        from sglang.srt.runtime_context import get_memory

        now = _building.get()
        chosen = stock
        in_l2 = now is not None and now.what == "l2" and not label.startswith("draft")
        # A pipeline stage may hold no layer of a kind: there is nothing to store.
        if self._settings.quantises and in_l2 and layers:
            chosen = _quantised_pool(stock)
        elif self._copies:
            chosen = _copying_pool(stock)
        # TensorCast's store serves SGLang's own class and no subclass of it.
        tensorcast = get_memory().hicache_storage_backend == "tensorcast"
        if self._measured and now is not None and not tensorcast:
            from hiqcache.sglang.observed import observed

            chosen = observed(chosen)
        return chosen

    def check_group(self, group: Any, entries: Any) -> None:
        for entry in entries:
            self.check_entry(group, entry)

    def check_entry(self, group: Any, entry: Any) -> None:
        """Refuse KV pools that SGLang builds without asking its selector, which would stay BF16."""
        now = _building.get()
        if now is None or now.what != "l2":
            return
        pool = entry.host_pool
        if not _is_quantised(type(pool)) and getattr(pool, "layer_num", None) != 0:
            require_known_pool(type(pool).__name__, str(entry.name))

    def prepare_hicache_staging(
        self, original: Any, *, tp_worker: Any, draft_plan: Any = None
    ) -> Any:
        """Set aside GPU memory for the write-backs of pools that stay SGLang's own, no others."""
        from sglang.srt.runtime_context import get_memory

        if get_memory().enable_hierarchical_cache:
            no_target = SimpleNamespace(token_to_kv_pool=None, mtp_draft_device_pools=())
            tp_worker = SimpleNamespace(model_runner=no_target)
        return original(tp_worker=tp_worker, draft_plan=draft_plan)

    def check_model(self, context: Any) -> None:
        """Refuse a model that the codec does not serve, before its host pools are built.

        context: what SGLang gives create_tree_cache.
        """
        from sglang.srt.runtime_context import get_memory

        asked = self._settings.retraction == "quantised"
        if get_memory().enable_hierarchical_cache or asked or _offloads():
            require_rotary(self._settings.codec, context.model_config.hf_text_config)

    def create_tree_cache(self, cache: Any, context: Any) -> None:
        """Say so where the codec that was asked for has nothing to work on."""
        from sglang.srt.runtime_context import get_memory, get_parallel

        group = getattr(cache, "host_pool_group", None)
        pools = [type(entry.host_pool) for entry in group.entries] if group is not None else []
        if any(map(_is_quantised, pools)) or get_parallel().tp_rank or _offloads():
            return
        enabled = bool(get_memory().enable_hierarchical_cache)
        logger.warning(
            "HiQCache: %s",
            nothing_to_quantise(self._settings.codec, enabled, type(cache).__name__),
        )


def _offloads() -> bool:
    """Whether this is a decode server that writes to storage past L2."""
    from sglang.srt.runtime_context import get_disagg

    return bool(get_disagg().disaggregation_decode_enable_offload_kvcache)


def _is_quantised(pool: type) -> bool:
    from hiqcache.sglang.host_pool import QuantisedPool

    return issubclass(pool, QuantisedPool)


def _quantised_pool(stock: type) -> type:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from hiqcache.sglang.host_pool import (
        QuantisedMHATokenToKVPoolHost,
        QuantisedMLATokenToKVPoolHost,
    )

    latent = issubclass(stock, MLATokenToKVPoolHost)
    return QuantisedMLATokenToKVPoolHost if latent else QuantisedMHATokenToKVPoolHost


def _copying_pool(stock: type) -> type:
    from hiqcache.sglang.copying_pool import COPYING

    return COPYING.get(stock, stock)
