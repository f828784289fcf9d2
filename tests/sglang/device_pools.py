"""A model folder's device pools, chosen and built by SGLang's own configurator, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.families import family_of
from hiqcache.sglang.rows import layers_of, stock_row_bytes
from hiqcache.sglang.sizing import kv_pools

#: Tokens, or pages where those are larger, of each pool; requests.
TOKENS, REQUESTS = 256, 4


class Built(NamedTuple):
    """What SGLang made of a model: the family its pools are taken for, and what they hold.

    row_bytes: of a token in each KV pool of a kind that is served, all layers together.
    """

    family: str | None
    kind: str
    row_bytes: tuple[int, ...]


def built(folder: Path, page_size: int) -> Built:
    """The device pools of the model in ``folder``. Call by ``apart``."""
    # What SGLang asks of a GPU: one of Hopper's, which it takes a DSA model to run on.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    # It builds some pools on platforms of its own alone, since others may lack their kernels.
    kv_cache_configurator.reject_out_of_tree_path = lambda *_, **__: None
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        # Each family has rules for backends; none computes anything here.
        attention_backend="triton",
        dsa_prefill_backend="tilelang",
        dsa_decode_backend="tilelang",
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_hierarchical_cache=True,
        disable_overlap_schedule=True,
        mamba_radix_cache_strategy="no_buffer",
        max_mamba_cache_size=REQUESTS,
        page_size=page_size,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    config = ModelConfig.from_server_args(arguments)
    configurator = _configurator(config, arguments, page_size)
    pools = configurator._init_pools(
        sizes=_sizes(), req_to_token_pool=None, token_to_kv_pool_allocator=None
    )
    kvcache = pools.token_to_kv_pool
    states = getattr(pools.req_to_token_pool, "mamba_pool", None)
    family = family_of(kvcache, states is not None, get_parallel().pp_size)
    rows = [adapter().rows_of_device_pool(pool) for pool in kv_pools(kvcache)]
    return Built(
        family and family.key,
        type(kvcache).__name__,
        tuple(stock_row_bytes(row) * layers_of(row) for row in rows),
    )


def _configurator(config: ModelConfig, arguments: ServerArgs, page_size: int) -> Any:
    """As SGLang's ModelRunner builds it for a target model on one rank."""
    v4 = "DeepseekV4ForCausalLM" in config.hf_config.architectures
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=config,
        server_args=arguments,
        kv_cache_dtype=torch.float8_e4m3fn if v4 else config.dtype,
        model_dtype=config.dtype,
        page_size=page_size,
        sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SimpleNamespace(draft_model_config=None, dflash_draft_num_layers=None),
        is_hybrid_swa=config.is_hybrid_swa,
        is_hybrid_swa_compress=config.is_hybrid_swa_compress,
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=None, model_config=config, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )


def _sizes() -> Any:
    tokens = (
        *("max_total_num_tokens", "full_max_total_num_tokens", "swa_max_total_num_tokens"),
        *("c4_max_total_num_tokens", "c128_max_total_num_tokens"),
        *("c4_state_pool_size", "c128_state_pool_size"),
    )
    return kv_cache_configurator._PoolSizes(
        **dict.fromkeys(tokens, TOKENS),
        max_running_requests=REQUESTS,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
    )
