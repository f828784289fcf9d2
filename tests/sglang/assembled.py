"""SGLang's own device pools, assembled into L2 by SGLang's own code with the plug-in's hooks.

Hooks change SGLang for good, so ``assembled`` runs in a process of its own. All it needs from a
server are the published arguments.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import kv_cache_builder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode, HiCacheDraftPlan
from transformers import AutoConfig

from hiqcache.compatibility import FAMILIES
from hiqcache.sglang import families, plugin
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.assembly import building
from hiqcache.sglang.support import UnsupportedError

SLOTS, SWA_SLOTS, STATES = 96, 32, 8
HEADS, DIM = 2, 64
LATENT, ROPE = 512, 64
DTYPE = torch.bfloat16

#: A PD decode server that moves no KV.
DECODE = {
    "enable_hierarchical_cache": False,
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "host_pool",
}

T = TypeVar("T")

#: Makes a model's device pools for a page size.
Shape = Callable[[int], CacheInitParams]


@dataclass
class Host:
    """What is told of one host pool."""

    kind: str
    slots: int
    bytes_per_slot: int
    layers: int


@dataclass
class Assembled:
    """What SGLang assembled: host pools by SGLang's names for them, and the plug-in's log."""

    pools: dict[str, Host] = field(default_factory=dict)
    log: str = ""

    @property
    def bytes(self) -> int:
        return sum(pool.slots * pool.bytes_per_slot for pool in self.pools.values())


def apart(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``work(*args, **kwargs)`` in a fresh process; what it raises is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conftest", "tests.sglang.assembled"])
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_with_memory, work, *args, **kwargs).result(timeout=120)


def _with_memory(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A few gigabytes for its pools: SGLang wants 10 GiB more than they take to be free."""
    with host_memory_budget_scope(4 * 10**9):
        return work(*args, **kwargs)


def mha(layers: int = 3, page_size: int = 1, slots: int = SLOTS) -> MHATokenToKVPool:
    return MHATokenToKVPool(slots, page_size, DTYPE, HEADS, DIM, layers, "cpu", False)


def plain(page_size: int, **pool: Any) -> CacheInitParams:
    """Attention of one kind."""
    return _of_one_kind(mha(page_size=page_size, **pool))


def _of_one_kind(kvcache: Any) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(
            kvcache.size, DTYPE, "cpu", kvcache, False
        ),
        page_size=kvcache.page_size,
        tree_components=(ComponentType.FULL,),
    )


def latent(page_size: int, layers: int = 3) -> CacheInitParams:
    """Latent attention (MLA)."""
    return _of_one_kind(
        MLATokenToKVPool(SLOTS, page_size, DTYPE, LATENT, ROPE, layers, "cpu", False)
    )


def indexed(page_size: int, layers: int = 3, without: int = 0) -> CacheInitParams:
    """Latent attention with an indexer (DSA); the last ``without`` layers have no keys."""
    return _of_one_kind(
        DSATokenToKVPool(
            size=2 * page_size,
            page_size=page_size,
            kv_lora_rank=LATENT,
            dtype=DTYPE,
            qk_rope_head_dim=ROPE,
            layer_num=layers,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=LATENT + ROPE,
            skip_topk_layers=[layer >= layers - without for layer in range(layers)],
        )
    )


def sliding(page_size: int, full: int = 2, swa: int = 3) -> CacheInitParams:
    """``full`` layers of full and ``swa`` of sliding-window attention."""
    kvcache = SWAKVPool(
        SLOTS,
        SWA_SLOTS,
        page_size,
        DTYPE,
        HEADS,
        DIM,
        swa_attention_layer_ids=list(range(full, full + swa)),
        full_attention_layer_ids=list(range(full)),
        device="cpu",
    )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
        token_to_kv_pool_allocator=SWATokenToKVPoolAllocator(
            SLOTS, SWA_SLOTS, page_size, DTYPE, "cpu", kvcache, False
        ),
        page_size=page_size,
        sliding_window_size=16,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )


def recurrent(page_size: int, full: int = 2, linear: int = 4) -> CacheInitParams:
    """``full`` layers of attention between ``linear`` layers with a recurrent state."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=4,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    linear_ids = list(range(full, full + linear))
    requests = HybridReqToTokenPool(
        size=4,
        mamba_size=STATES,
        mamba_spec_state_size=0,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape,
            layers=linear_ids,
            dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
        ),
        mamba_layer_ids=linear_ids,
        enable_mamba_extra_buffer=False,
    )
    kvcache = HybridLinearKVPool(
        size=SLOTS,
        dtype=DTYPE,
        page_size=page_size,
        head_num=HEADS,
        head_dim=DIM,
        full_attention_layer_ids=list(range(full)),
        device="cpu",
        mamba_pool=requests.mamba_pool,
    )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(SLOTS, DTYPE, "cpu", kvcache, False),
        page_size=page_size,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
    )


def assembled(
    shape: Callable[..., CacheInitParams],
    codec: str = "int8",
    *,
    flags: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    rank: int = 0,
    drafts: int = 0,
    served: bool = True,
    **kwargs: Any,
) -> Assembled:
    """The host pools that SGLang attaches for ``shape(page_size, **kwargs)``. Call by ``apart``.

    flags: SGLang's server arguments; environment: further HIQCACHE_ variables; drafts: layers of a
    speculative draft model with a pool of its own; served: serve every family, tried or not.
    """
    told = Assembled()
    if served:
        every = {key: dataclasses.replace(one, refused="") for key, one in FAMILIES.items()}
        families.FAMILIES = MappingProxyType(every)
    arguments = _published({**(flags or {})}, codec, environment or {}, rank, told)
    params = shape(arguments.page_size, **kwargs)
    plan = HiCacheDraftPlan()
    if drafts:
        draft = mha(drafts, arguments.page_size)
        plan = HiCacheDraftPlan(mode=HiCacheDraftMode.SIDECAR, device_pools=(draft,))
    cache = UnifiedRadixCache(params)

    def build(hicache_draft_plan: HiCacheDraftPlan) -> None:
        """As SGLang's build_kv_cache, which tells of drafts in a way of its release."""
        params.sidecar_draft_device_pools = hicache_draft_plan.device_pools
        cache.init_hicache(arguments, params)
        if drafts:
            kv_cache_builder.maybe_register_hicache_draft(tree_cache=cache, draft_plan=plan)

    for _, around in adapter().HOOKS:
        build = functools.partial(around, build)
    build(hicache_draft_plan=plan)
    for entry in cache.host_pool_group.entries:
        pool = entry.host_pool
        told.pools[str(entry.name)] = Host(
            type(pool).__name__, pool.size, pool.size_per_token, getattr(pool, "layer_num", 0)
        )
    return told


def refused(*args: Any, **kwargs: Any) -> str:
    """The text of the refusal of ``assembled(*args, **kwargs)``. Call by ``apart``."""
    try:
        assembled(*args, **kwargs)
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("nothing was refused")


#: A PD decode server that moves no KV, and offloads what it computes to storage.
OFFLOAD = {
    **DECODE,
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    "disaggregation_decode_enable_offload_kvcache": True,
    "hicache_storage_backend": "file",
    "page_size": 16,
}


def offloaded(codec: str, shape: Shape, **label: str) -> tuple[str, int, str]:
    """Kind, bytes per slot and format of the pool that a decode server's offload gets.

    Call by ``apart``. label: pool_label. The text of a refusal in place of the kind.
    """
    _published(OFFLOAD, codec, {}, 0, Assembled())
    try:
        # As DecodeKVCacheOffloadManager calls it, and build_hybrid_swa_stack for it.
        return _stored(shape, **label)
    except UnsupportedError as error:
        return str(error), 0, ""


def stored_l2(codec: str, shape: Shape) -> tuple[str, int, str]:
    """The same of the L2 of a prefill server with that storage. Call by ``apart``."""
    _published({"hicache_storage_backend": "file", "page_size": 16}, codec, {}, 0, Assembled())
    with building("l2"):
        return _stored(shape)


def sparse_attention(codec: str, shape: Shape) -> tuple[str, list[str]]:
    """The kind of L2's pool, and then the classes that HiSparse makes its host pools of.

    Call by ``apart``.
    """
    _published({}, codec, {}, 0, Assembled())
    with building("l2"):
        kind, *_ = _stored(shape)
    from sglang.srt.managers import hisparse_coordinator as sparse

    used = sparse.HiSparseMHATokenToKVPoolHost, sparse.MLATokenToKVPoolHost
    every = [base for cls in used for base in cls.__mro__ if base.__name__.endswith("PoolHost")]
    return kind, [f"{base.__module__}.{base.__name__}" for base in every]


def _stored(shape: Shape, **label: str) -> tuple[str, int, str]:
    kvcache = shape(16).token_to_kv_pool_allocator.get_kvcache()
    mla = isinstance(kvcache, MLATokenToKVPool)
    pool = assembler.build_kv_host_pool(kv_pool=kvcache, page_size=16, use_mla=mla, **label)
    return type(pool).__name__, pool.get_size_per_token(), str(pool.storage_format_tag)


def without_l2(codec: str, **flags: Any) -> str:
    """The plug-in's log where SGLang makes its prefix cache without L2. Call by ``apart``."""
    told = Assembled()
    _tree_cache({**flags, "enable_hierarchical_cache": False}, codec, told)
    return told.log


def of_model_type(kind: str, codec: str, *, enabled: bool = True, **flags: Any) -> str:
    """The refusal of a model of transformers' type ``kind``; "" if none. Call by ``apart``.

    enabled: with L2.
    """
    flags = {"enable_hierarchical_cache": enabled, "page_size": 64, **flags}
    try:
        _tree_cache(flags, codec, Assembled(), AutoConfig.for_model(kind))
    except UnsupportedError as error:
        return str(error)
    return ""


def _tree_cache(
    flags: dict[str, Any], codec: str, told: Assembled, text_config: Any = None
) -> None:
    arguments = _published(flags, codec, {}, 0, told)
    params = plain(arguments.page_size)
    kv_cache_builder.create_tree_cache(
        TreeCacheBuildContext(
            server_args=arguments,
            params=params,
            is_hybrid_swa=False,
            full_tokens_per_layer=None,
            is_hybrid_ssm=False,
            is_dsa=False,
            enable_hierarchical_cache=arguments.enable_hierarchical_cache,
            disable_radix_cache=False,
            # Told of the pools once they are built; no request is to come.
            tp_worker=SimpleNamespace(register_hicache_layer_transfer_counter=lambda _: None),
            model_config=SimpleNamespace(hf_text_config=text_config),
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
    )


def staged(codec: str, *, flags: dict[str, Any] | None = None) -> list[int]:
    """Layers of each pool that SGLang sets write-back memory aside for. Call by ``apart``."""
    _published(flags or {}, codec, {}, 0, Assembled())
    asked = []
    kv_cache_builder.prepare_mha_write_back_staging = lambda *_, layer_num, **__: asked.append(
        layer_num
    )
    runner = SimpleNamespace(token_to_kv_pool=mha(layers=3), mtp_draft_device_pools=())
    kv_cache_builder.prepare_hicache_staging(
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_plan=HiCacheDraftPlan(mode=HiCacheDraftMode.SIDECAR, device_pools=(mha(layers=1),)),
    )
    return asked


def _published(
    flags: dict[str, Any], codec: str, environment: dict[str, str], rank: int, told: Assembled
) -> ServerArgs:
    """SGLang's arguments, published as in a scheduler process that has loaded the plug-in."""
    os.environ.update(HIQCACHE_CODEC=codec, **environment)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.log += record.getMessage() + "\n"

    logger = logging.getLogger("hiqcache")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    # There is no CUDA here to register host memory with.
    for cls in (MambaPoolHost, DSAIndexerPoolHost):
        cls.__init__.__kwdefaults__["pin_memory"] = False
    plugin.register()
    HookRegistry.apply_hooks()
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(_CONFIG))
    arguments = ServerArgs(
        **{
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enable_hierarchical_cache": True,
            "hicache_ratio": 8.0,
            "page_size": 1,
            **flags,
        }
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    return arguments


#: Its shapes are not used: the pools are built by hand.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
