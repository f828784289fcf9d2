"""What HiQCache needs of SGLang: names, signatures, behaviours and metrics, in one place.

`hiqcache doctor` checks it against the installed release, `make contract SGLANG=x.y.z` against the
wheel of any other, both by reading its source. What a release lacks is said by name. Every name of
SGLang that this package imports or hooks, and every metric of SGLang that a rule, a dashboard or
the exporter reads, must be here: tests see to it. Where the served releases differ, the terms stand
in the release's adapter.
"""

from __future__ import annotations

from hiqcache.sglang.adapters import adapter_for
from hiqcache.sglang.adapters.base import Adapter
from hiqcache.sglang.source import Source
from hiqcache.sglang.terms import ASSEMBLER, BUILDER, MEM, Behaviour, Metric, Need

_CONTEXT = "sglang.srt.runtime_context"

_TRANSFER = ("device_pool", "host_indices", "device_indices", "io_backend")

#: Of every release; see the adapters for the rest.
NEEDS: tuple[Need, ...] = (
    # Plug-ins.
    Need("sglang.srt.plugins", "load_plugins", "it calls the entry point"),
    Need(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "it lays our functions around SGLang's",
    ),
    Need(
        "sglang.srt.plugins.hook_registry",
        "HookType",
        "the kinds of hook",
        has=("AROUND", "BEFORE", "AFTER", "REPLACE"),
    ),
    # Where host pools are chosen and assembled.
    Need(
        ASSEMBLER,
        "build_kv_host_pool",
        "hooked: what is built of which device pool",
        ("kv_pool", "page_size", "use_mla", "host_size", "mtp_draft_device_pools", "pool_label"),
    ),
    Need(ASSEMBLER, "build_mamba_host_pool", "hooked: recurrent state beside KV", ("host_size",)),
    Need(
        ASSEMBLER,
        "attach_hybrid_pool_to_unified_cache",
        "hooked: what is built inside is L2, or a pool for retracted requests",
        ("cache", "params"),
    ),
    Need(BUILDER, "create_tree_cache", "hooked: the model, and whether there is an L2"),
    Need(f"{MEM}.registry", "TreeCacheBuildContext", "the model", has=("model_config",)),
    Need(BUILDER, "maybe_register_hicache_draft", "hooked: what is built inside is a draft's"),
    Need(
        BUILDER,
        "prepare_hicache_staging",
        "hooked: GPU memory that a quantised pool does not use",
        ("tp_worker", "draft_plan"),
    ),
    Need(f"{MEM}.pool_host.group", "HostPoolGroup.__init__", "hooked: all pools", ("entries",)),
    Need(f"{MEM}.pool_host.group", "HostPoolGroup.add_entry", "hooked: pools that come later"),
    Need(f"{MEM}.pool_host.group", "PoolEntry", "a pool and its name", ("name", "host_pool")),
    # Storage beyond the host.
    Need(
        f"{MEM}.storage.backend_factory",
        "StorageBackendFactory.create_backend",
        "hooked: storage, which a guard is laid around",
    ),
    Need(
        f"{MEM}.hicache_storage",
        "HiCacheStorageConfig",
        "whose pages a backend keeps",
        ("tp_rank", "tp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name"),
    ),
    Need(
        f"{MEM}.hicache_storage",
        "HiCacheStorage",
        "what the guard is laid around",
        has=(
            *("batch_get", "batch_set", "batch_get_v1", "batch_set_v1", "batch_get_v2"),
            *("batch_set_v2", "register_mem_host_pool_v2"),
        ),
    ),
    Need(f"{MEM}.pool_host.base", "HostKVCache", "keys hold it", has=("storage_format_tag",)),
    Need(
        f"{MEM}.hicache_storage",
        "HiCacheFile._get_suffixed_key",
        "corrupt pages are taken out",
        ("key",),
    ),
    Need(
        f"{MEM}.storage.file.lru_file_evictor",
        "LRUFileEvictor.abort",
        "corrupt pages are taken out",
        ("suffixed_key",),
    ),
    Need(
        f"{MEM}.hybrid_cache.hybrid_cache_controller",
        "HybridCacheController._move_pool_indices",
        "hooked: host slots stay on the CPU",
        ("host_pool", "host_indices", "device_indices"),
    ),
    Need(
        f"{MEM}.unified_radix_cache",
        "UnifiedRadixCache.evict_host",
        "hooked: what is freed inside is evicted",
    ),
    # The base class of the host pool.
    Need(
        f"{MEM}.pool_host.mha",
        "MHATokenToKVPoolHost",
        "the base class of the quantised pool",
        has=(
            *("size", "page_num", "page_size", "layout", "pool_label", "dtype", "pin_memory"),
            *("allocator", "device", "kv_buffer", "size_per_token", "logical_size"),
            *("target_layer_num", "layer_num", "device_k_buffers", "device_v_buffers"),
            *("k_data_refs", "v_data_refs", "k_buffer", "v_buffer", "_transfer_device"),
            *("alloc", "free", "clear", "destroy", "available_size", "get_ksize_per_token"),
            *("get_hybrid_pool_buffer", "get_data_page", "get_dummy_flat_data_page"),
            *("set_from_flat_data_page", "get_page_buffer_meta", "is_stride_page_aligned"),
            "get_split_heads_page_buffer_meta",
        ),
    ),
    *(
        Need(f"{MEM}.pool_host.{module}", f"{owner}.{method}", why, takes, alone=True)
        for module, owner in (("mha", "MHATokenToKVPoolHost"), ("mla", "MLATokenToKVPoolHost"))
        for method, why, takes in (
            ("get_size_per_token", "overridden", ()),
            ("init_kv_buffer", "overridden", ()),
            ("backup_from_device_all_layer", "overridden: every backup", _TRANSFER),
            (
                "load_to_device_per_layer",
                "overridden: every restore",
                (*_TRANSFER, "layer_id", "is_draft"),
            ),
        )
    ),
    Need(
        f"{MEM}.pool_host.mla",
        "MLATokenToKVPoolHost",
        "the base class of the quantised pool of latent rows",
        has=(
            *("size", "page_num", "page_size", "layout", "pool_label", "dtype", "pin_memory"),
            *("target_layer_num", "layer_num", "data_refs", "kv_buffer", "_is_dummy"),
            *("_transfer_device", "dcp_size", "dcp_rank", "get_contiguous_buf_infos"),
        ),
    ),
    Need(
        "sglang.srt.layers.dcp.layout",
        "maybe_dcp_kernel_indices",
        "slots of a rank under decode context parallelism",
        ("indices", "dcp_size", "dcp_rank"),
        alone=True,
    ),
    Need(f"{MEM}.pool_host.common", "ALLOC_MEMORY_FUNCS", "it allocates the arena"),
    # Device pools, of which the sizes of host pools follow.
    Need(
        f"{MEM}.memory_pool",
        "MHATokenToKVPool",
        "K and V on the device",
        has=("size", "layer_num", "host_capacity_tokens"),
    ),
    Need(
        f"{MEM}.memory_pool",
        "MLATokenToKVPool",
        "latent rows on the device",
        has=("size", "layer_num", "host_capacity_tokens", "host_pool_decls"),
    ),
    *(
        Need(f"{MEM}.{module}", name, "the family that a model is of")
        for module, name in (
            ("memory_pool", "DSATokenToKVPool"),
            ("memory_pool", "MiniMaxSparseKVPool"),
            ("deepseek_v4_memory_pool", "DeepSeekV4TokenToKVPool"),
        )
    ),
    Need(f"{MEM}.memory_pool", "HybridLinearKVPool", "beside states", has=("full_kv_pool",)),
    Need(f"{MEM}.base_swa_memory_pool", "BaseSWAKVPool", "sliding windows", has=("swa_kv_pool",)),
    Need(
        f"{MEM}.swa_memory_pool",
        "SWAKVPool",
        "sliding windows",
        has=("full_kv_pool", "swa_kv_pool"),
    ),
    # Memory, settings and ranks.
    Need(
        f"{MEM}.host_memory",
        "available_host_memory_bytes",
        "what a pool may take",
        ("allow_cgroup_fallback",),
        alone=True,
    ),
    Need(
        f"{MEM}.pool_host.base",
        "HICACHE_HOST_MEMORY_RESERVE_BYTES",
        "what SGLang leaves free",
    ),
    Need(_CONTEXT, "get_memory", "settings of HiCache"),
    Need(_CONTEXT, "get_disagg", "settings of decode servers"),
    Need(_CONTEXT, "get_parallel", "ranks, for labels"),
    Need(_CONTEXT, "get_serving", "the model's name, for labels"),
    *(
        Need(f"sglang.srt.arg_groups.fields.{group}", owner, "settings that are read", has=fields)
        for group, owner, fields in (
            (
                "memory",
                "Memory",
                (
                    *("enable_hierarchical_cache", "hicache_ratio", "hicache_size"),
                    *("hicache_mem_layout", "hicache_storage_backend"),
                ),
            ),
            ("serving", "Serving", ("served_model_name",)),
            (
                "disagg",
                "Disagg",
                (
                    "disaggregation_decode_enable_offload_kvcache",
                    "disaggregation_decode_retraction_backup",
                ),
            ),
        )
    ),
    # How a model is read.
    Need(
        "sglang.srt.configs.model_config",
        "ModelConfig",
        "a model's shape",
        has=(
            *("hf_config", "hf_text_config", "attention_arch", "is_hybrid_swa", "dtype"),
            *("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "has_asymmetric_kv"),
            *("num_attention_layers", "full_attention_layer_ids", "swa_attention_layer_ids"),
            *("is_hybrid_swa_compress", "kv_lora_rank", "qk_rope_head_dim"),
            *("get_total_num_kv_heads", "from_server_args"),
        ),
    ),
    Need("sglang.srt.configs.model_config", "AttentionArch", "kinds of it", has=("MLA", "SSM")),
    Need("sglang.srt.configs.model_config", "is_deepseek_dsa", "a family", ("config",)),
    Need("sglang.srt.configs.model_config", "is_deepseek_v4", "a family", ("config",)),
    Need("sglang.srt.configs.model_config", "is_minimax_sparse", "a family", ("config",)),
    Need("sglang.srt.configs.hybrid_arch", "mambaish_config", "a family", ("model_config",)),
    Need(
        "sglang.srt.arg_groups.overrides",
        "collect_model_override_declarations",
        "what SGLang sets by model",
        ("architecture", "server_args", "hf_config"),
        alone=True,
    ),
    Need("sglang.srt.server_args", "ServerArgs", "a server's arguments"),
    # CPUs, and the mover transfer.
    Need("sglang.srt.platforms.cpu", "CpuDeviceMixin", "base of the CPU platform"),
    Need("sglang.srt.platforms.device_mixin", "PlatformEnum", "kinds of platform", has=("OOT",)),
    Need("sglang.srt.platforms.interface", "PlatformCapabilities", "the CPU platform's"),
    Need(
        "sglang.srt.platforms.interface",
        "SRTPlatform",
        "base of the CPU platform",
        has=("get_default_attention_backend", "is_pin_memory_available", "post_load_model"),
    ),
    Need(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "AttentionBackendRegistry.register",
        "latent attention on a CPU",
        ("backend_name", "handler_func"),
        alone=True,
    ),
    Need(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "_dispatch_mla_subtype",
        "latent attention on a CPU",
    ),
    Need(
        "sglang.kernels.ops.kvcache.hicache",
        "can_use_hicache_jit_kernel",
        "the mover's kernels",
        ("element_size", "page_size"),
        alone=True,
    ),
    Need(
        "sglang.kernels.ops.kvcache.hicache",
        "transfer_hicache_one_layer",
        "the mover's restores",
        (
            *("k_cache_dst", "v_cache_dst", "indices_dst", "k_cache_src", "v_cache_src"),
            *("indices_src", "page_size"),
        ),
        alone=True,
    ),
    Need(
        "sglang.kernels.ops.kvcache.hicache",
        "transfer_hicache_all_layer",
        "the mover's backups",
        (
            *("k_ptr_dst", "v_ptr_dst", "indices_dst", "k_ptr_src", "v_ptr_src", "indices_src"),
            *("kv_cache_dst_stride_bytes", "kv_cache_src_stride_bytes", "element_size"),
            "page_size",
        ),
        alone=True,
    ),
)

BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        "sglang.srt.plugins",
        "load_plugins",
        "an exception of ours is swallowed, so that a bad setting must leave by SystemExit",
        ("func()", "except Exception", "HookRegistry.apply_hooks()"),
    ),
    Behaviour(
        "sglang.srt.plugins",
        "load_plugins_by_group",
        "doctor takes SGLANG_PLUGINS in the same way",
        ("if allowed_str:", ".split(',')", "ep.name not in allowed_set"),
    ),
    Behaviour(
        f"{MEM}.l2_transfer",
        "L2TransferEngine.submit_host_to_device",
        "a layer is restored, whole, before SGLang says that it is",
        ("host_pool.load_to_device_per_layer", "on_layer_done(layer_id)"),
    ),
    Behaviour(
        f"{MEM}.l2_transfer",
        "L2TransferEngine._submission",
        "transfers are enqueued on the stream that is current",
        ("device_module.stream(stream)", "start_event.wait(stream)", "ack_finish.record()"),
    ),
    Behaviour(
        f"{MEM}.pool_host.base",
        "HostKVCache.__init__",
        "a pool's tokens follow from decimal GB or a ratio, in whole pages and one more",
        (
            "host_size * 1000000000.0 // self.size_per_token",
            "device_capacity_tokens * host_to_device_ratio",
            "self.size // self.page_size + 1",
            "self._allocate_host_buffer()",
        ),
    ),
    Behaviour(
        f"{MEM}.pool_host.common",
        "get_allocator_type",
        "a host pool learns of the storage backend by its allocator's name",
        ("backend = get_memory().hicache_storage_backend", "return backend or 'default'"),
    ),
    Behaviour(
        "sglang.srt.managers.cache_controller",
        "storage_model_name",
        "the format of a pool's pages is part of their keys",
        ("tag = host_pool.storage_format_tag", "f'{model_name}-{tag}'"),
    ),
    Behaviour(
        "sglang.srt.managers.cache_controller",
        "HiCacheController.attach_storage_backend",
        "backends come from the factory, with these arguments",
        (
            "StorageBackendFactory.create_backend(storage_backend, self.storage_config, "
            "self.storage_host_pool)",
        ),
    ),
    Behaviour(
        "sglang.srt.managers.cache_controller",
        "HiCacheController._generic_page_set",
        "images are sealed between the pool and the backend",
        ("self.storage_host_pool.get_data_page", "self.storage_backend.batch_set"),
    ),
    Behaviour(
        "sglang.srt.managers.cache_controller",
        "HiCacheController._generic_page_get",
        "images are proven between the backend and the pool, and one that is None ends a prefix",
        (
            "self.storage_backend.batch_get(hash_values, dummy_page_dst)",
            "if page_data[i] is None:",
            "break",
            "self.storage_host_pool.set_from_flat_data_page",
        ),
    ),
    Behaviour(
        "sglang.srt.managers.cache_controller",
        "HiCacheController._page_get_zero_copy",
        "a page that is not proven ends a prefix",
        ("self.storage_backend.batch_get_v1", "if not results[i]:", "break"),
    ),
    Behaviour(
        ASSEMBLER,
        "_split_hicache_size",
        "several pools share --hicache-size by their bytes on the device",
        ("kv_pool.get_kv_size_bytes()", "hicache_size * size_bytes / total_device_pool_size"),
    ),
    Behaviour(
        "sglang.srt.arg_groups.hicache_hook",
        "handle_hicache_ratio_default",
        "SGLang shrinks L2 to fit unless a ratio or a size is given",
        (
            "cfg.hicache_ratio is not None or cfg.hicache_size > 0",
            "fields['hicache_host_memory_fraction'] = None",
        ),
    ),
)

#: What is read of a server's own metrics: rules, dashboards, the exporter, the benchmarks.
METRICS: tuple[Metric, ...] = (
    Metric("sglang:backuped_tokens_total"),
    Metric("sglang:cached_tokens_total", ("cache_source",)),
    Metric("sglang:evicted_tokens_total"),
    Metric("sglang:generation_tokens_total"),
    Metric("sglang:hicache_backup_bytes_total"),
    Metric("sglang:hicache_backup_tokens_total"),
    Metric("sglang:hicache_host_total_tokens"),
    Metric("sglang:hicache_host_used_tokens"),
    Metric("sglang:load_back_duration_seconds"),
    Metric("sglang:load_back_bytes_total"),
    Metric("sglang:load_back_tokens_total"),
    Metric("sglang:max_total_num_tokens"),
    Metric("sglang:num_queue_reqs"),
    Metric("sglang:num_requests_total"),
    Metric("sglang:num_retracted_requests_total"),
    Metric("sglang:num_running_reqs"),
    Metric("sglang:per_stage_req_latency_seconds", ("stage",)),
    Metric("sglang:prefetched_tokens_total"),
    Metric("sglang:prefill_effective_tokens_total", ("mode",)),
    Metric("sglang:realtime_tokens_total", ("mode",)),
    Metric("sglang:time_to_first_token_seconds"),
)


def terms(adapter: Adapter) -> tuple[Need | Behaviour | Metric, ...]:
    """Everything that is needed of a release with ``adapter``, in the contract's order."""
    return (*NEEDS, *adapter.NEEDS, *BEHAVIOURS, *METRICS)


def breaches(source: Source) -> list[str]:
    """What ``source`` lacks of the contract, a sentence each; empty where it holds."""
    wanted = terms(adapter_for(source))
    return [sentence for term in wanted for sentence in term.breaches(source)]
