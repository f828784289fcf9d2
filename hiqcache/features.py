"""What a server may be asked for beside its model: the second table of what is served and refused.

As hiqcache.compatibility's, which is of models: read by plan, doctor, the entry point, the pool and
docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from hiqcache.compatibility import GROWTH, Entry, Evidence, by_key
from hiqcache.rotary import HALVES
from hiqcache.storage.backends import REFUSED, SERVED

_REFUSALS = "tests/sglang/test_refusals.py::"
_ASSEMBLY = "tests/sglang/test_assembly.py::"
_RANKS = "tests/e2e/test_ranks.py::test_restored_answers"

#: What a server may be asked for beside its model, by key.
FEATURES: Mapping[str, Entry] = by_key(
    Entry(
        "tp",
        "Tensor parallelism (--tp-size)",
        tested=(
            Evidence("random", "Qwen3-8B's shape", "2 x H200", "results/h200/server_tp2.json"),
            Evidence("random", "a tiny Llama on two ranks", "CPU", _RANKS),
        ),
    ),
    Entry(
        "pp",
        "Pipeline parallelism (--pp-size)",
        tested=(
            Evidence("random", "a tiny Llama on two stages", "CPU", _RANKS),
            Evidence(
                "unit",
                "stages get equal slots, by SGLang's assembly",
                "CPU",
                _ASSEMBLY + "test_pipeline_stages_get_equal_slots_without_asking_each_other",
            ),
            Evidence(
                "unit",
                "of a fixed size too, in a group that asks each other",
                "CPU",
                "tests/sglang/test_stages.py::"
                "test_stages_hold_the_same_slots_within_the_bytes_of_each",
            ),
        ),
    ),
    Entry("dp", "DP attention (--attn-dp-size)"),
    Entry(
        "layouts",
        "--hicache-mem-layout page_first, page_first_direct, layer_first",
        tested=(
            Evidence(
                "unit",
                "rows of each come back",
                "CPU",
                "tests/sglang/test_host_pool.py::"
                "test_rows_come_back_as_the_codec_leaves_them_and_nothing_else_moves",
            ),
        ),
    ),
    Entry(
        "other_layouts",
        "--hicache-mem-layout page_head and others",
        refused="HiQCache serves page_first, page_first_direct and layer_first.",
        way_out="Choose one of those",
        tested=(Evidence("unit", "refused", "CPU", _REFUSALS + "test_unknown_host_layouts"),),
    ),
    Entry(
        "dcp",
        "Decode context parallelism (--dcp-size), with MLA",
        tested=(
            Evidence(
                "unit",
                "each rank keeps its part of a page",
                "CPU",
                "tests/sglang/test_latent_pool.py::"
                "test_ranks_that_share_a_page_keep_their_slots_of_it",
            ),
        ),
    ),
    Entry(
        "dcp_storage",
        "Decode context parallelism with L3 storage",
        refused="HiQCache stores pages that one rank holds.",
        way_out="Start without a storage backend",
        tested=(
            Evidence(
                "unit",
                "refused",
                "CPU",
                "tests/sglang/test_latent_pool.py::test_latent_rows_that_are_not_served",
            ),
        ),
    ),
    Entry(
        "latent_release",
        "Latent attention (MLA) on SGLang 0.5.22",
        refused="HiQCache reads latent rows as SGLang 0.5.23 describes them.",
        way_out="Install sglang==0.5.23",
        tested=(
            Evidence("unit", "refused", "CPU", _REFUSALS + "test_latent_rows_of_older_releases"),
            Evidence(
                "unit",
                "refused by SGLang 0.5.22's own assembly",
                "CPU",
                _ASSEMBLY + "test_latent_rows_are_refused_where_sglang_does_not_describe_them",
            ),
        ),
    ),
    Entry(
        "host_dedup",
        "MLA's rows in the host memory of one rank only",
        refused="SGLang 0.5.23 has the class for it and no server that builds it; HiQCache keeps "
        "the rows of each rank.",
        tested=(
            Evidence(
                "unit",
                "refused",
                "CPU",
                "tests/sglang/test_latent_pool.py::test_latent_rows_that_are_not_served",
            ),
        ),
    ),
    Entry(
        "quantised_kv",
        "An L1 with scales of its own, or of fewer than 8 bits (--kv-cache-dtype mxfp8, fp4)",
        refused="HiQCache stores bf16, fp16 and FP8 rows.",
        way_out="Start with --kv-cache-dtype auto and --dtype bfloat16",
        tested=(
            Evidence("unit", "refused", "CPU", _REFUSALS + "test_a_quantised_l1"),
            Evidence("unit", "refused", "CPU", _REFUSALS + "test_other_dtypes"),
        ),
    ),
    Entry(
        "fp8",
        "An FP8 L1 (--kv-cache-dtype fp8_e4m3, fp8_e5m2) under codec int4",
        tested=(
            Evidence(
                "trained",
                "SmolLM2-135M, e4m3",
                "CPU",
                "tests/e2e/test_restores.py::test_an_fp8_l1_gets_its_rows_back",
            ),
            Evidence(
                "unit",
                "pages of both come back",
                "CPU",
                "tests/sglang/test_host_pool.py::"
                "test_whole_pages_of_an_fp8_l1_come_back_as_int4_leaves_them",
            ),
        ),
    ),
    Entry(
        "narrow_fp8",
        "An FP8 L1 under codecs int8 and int8-rot",
        refused="a row of INT8 takes as many bytes as one of FP8: nothing would be gained.",
        way_out="Set HIQCACHE_CODEC=int4 with --page-size 64, or start with --kv-cache-dtype auto",
        tested=(
            Evidence(
                "unit",
                "refused",
                "CPU",
                _REFUSALS + "test_an_fp8_l1_under_codecs_that_gain_nothing",
            ),
        ),
    ),
    Entry(
        "rotary",
        "Codec int4 and K that turns otherwise than by rotary halves of the whole head, or is not "
        "known to",
        refused="int4 stores channels c and c + head_dim / 2 as rotary halves of the whole head "
        f"turn, which is known of {', '.join(HALVES)}.",
        way_out="Set HIQCACHE_CODEC=int8",
        tested=(
            Evidence(
                "unit",
                "K of each model type that is known, and of others, looked at",
                "CPU",
                "tests/test_rotary.py::test_k_of_what_is_known_turns_by_halves_of_the_whole_head",
            ),
            Evidence(
                "unit",
                "refused",
                "CPU",
                _ASSEMBLY + "test_k_that_turns_otherwise_is_refused_for_int4",
            ),
        ),
    ),
    Entry(
        "draft",
        "A draft model's own host pool (EAGLE): stays SGLang's own",
        tested=(
            Evidence("unit", "beside a quantised target, by SGLang's assembly", "CPU", GROWTH),
        ),
    ),
    Entry(
        "packed_draft",
        "Draft layers packed into the target's rows (MTP)",
        refused="HiQCache serves the target model; a quantised draft would lose acceptance unseen.",
        way_out="Start without the packed draft (--speculative-algorithm)",
        tested=(Evidence("unit", "refused", "CPU", _REFUSALS + "test_packed_draft_layers"),),
    ),
    Entry(
        "storage",
        f"L3 storage (--hicache-storage-backend {', '.join(SERVED)}); it is chosen at the start",
        tested=(
            Evidence(
                "trained",
                "SmolLM2-135M, file, across a restart",
                "CPU",
                "tests/e2e/test_l3.py::"
                "test_a_restarted_server_of_another_layout_finds_whole_pages_alone",
            ),
            Evidence(
                "trained",
                "SmolLM2-135M, a Mooncake store over TCP, tiers flushed",
                "CPU",
                "tests/e2e/test_l3.py::"
                "test_pages_come_back_from_mooncake_once_both_tiers_are_flushed",
            ),
            Evidence(
                "trained",
                "SmolLM2-135M, two replicas that share a folder behind SGLang's router, one killed",
                "CPU",
                "tests/e2e/test_fleet.py::"
                "test_what_one_replica_computed_the_other_restores_once_that_one_is_killed",
            ),
            Evidence(
                "unit",
                "pages shared in a Mooncake store over TCP",
                "CPU",
                "tests/sglang/test_mooncake.py::"
                "test_replicas_share_pages_and_a_damaged_one_is_a_miss_that_leaves",
            ),
        ),
    ),
    Entry(
        "other_storage",
        f"L3 storage of other kinds ({', '.join(REFUSED)})",
        refused="their keys name no format, or nobody has tried them with encoded pages.",
        way_out=f"Choose one of {', '.join(SERVED)}",
        tested=(
            Evidence(
                "unit",
                "refused",
                "CPU",
                "tests/sglang/test_storage.py::"
                "test_backends_that_cannot_be_served_are_refused_by_name",
            ),
        ),
    ),
    Entry(
        "retraction",
        "Requests retracted on a decode server: their host pool stays SGLang's own "
        "(HIQCACHE_RETRACTION=quantised: by the codec)",
        tested=(
            Evidence(
                "unit",
                "by SGLang's assembly",
                "CPU",
                _ASSEMBLY + "test_retracted_requests_stay_in_sglangs_own_pool",
            ),
        ),
    ),
    Entry(
        "shared_retraction",
        "Retracted requests in the host pool that is L2 too",
        refused="answers in the making would be quantised.",
        way_out="Start with --disaggregation-decode-retraction-backup cpu_tensor, or set "
        "HIQCACHE_RETRACTION=quantised to have them stored by the codec",
        tested=(
            Evidence(
                "unit", "refused", "CPU", _ASSEMBLY + "test_a_pool_of_both_purposes_is_refused"
            ),
        ),
    ),
    Entry(
        "decode_offload",
        "Decode servers that offload KV to L3 storage "
        "(--disaggregation-decode-enable-offload-kvcache)",
        tested=(
            Evidence(
                "trained",
                "SmolLM2-135M: L2 of another server reads what a decode server wrote, to which no "
                "KV had been moved (fake transfer)",
                "CPU",
                "tests/e2e/test_pd.py::test_l2_finds_in_storage_what_a_decode_server_wrote",
            ),
            Evidence(
                "unit",
                "by SGLang's assembly",
                "CPU",
                _ASSEMBLY + "test_decode_offload_writes_what_prefill_s_l2_reads",
            ),
        ),
    ),
    Entry(
        "decode_offload_of_several",
        "Decode servers that offload several pools (sliding windows, --enable-unified-memory)",
        refused="nobody has tried it with encoded pages.",
        way_out="Start without --disaggregation-decode-enable-offload-kvcache",
        tested=(
            Evidence(
                "unit", "refused", "CPU", _ASSEMBLY + "test_offload_of_several_pools_is_refused"
            ),
        ),
    ),
    Entry(
        "other_pools",
        "Host pools of other kinds than the models' above",
        refused="HiQCache quantises K and V heads (MHA, GQA, MQA) and latent rows (MLA).",
        tested=(
            Evidence("unit", "refused", "CPU", _REFUSALS + "test_pools_that_are_built_unasked"),
        ),
    ),
    Entry(
        "layer_shards",
        "Device pools that are sharded by layer",
        refused="HiQCache serves pools that hold every layer of their rank.",
        way_out="Start without layer sharding",
        tested=(Evidence("unit", "refused", "CPU", _REFUSALS + "test_device_pools"),),
    ),
    Entry(
        "page_interleaving",
        "Device pools that interleave pages over ranks",
        refused="HiQCache has not been tried with pages that are spread over ranks.",
        way_out="Start without page interleaving",
        tested=(Evidence("unit", "refused", "CPU", _REFUSALS + "test_device_pools"),),
    ),
    Entry(
        "device_layouts",
        "Device buffers that are no rows [slot, head, head_dim]",
        refused="HiQCache serves nhd rows [slot, head, head_dim].",
        way_out="Choose an attention backend that uses them (triton, flashinfer, fa3)",
        tested=(Evidence("unit", "refused", "CPU", _REFUSALS + "test_unknown_device_layouts"),),
    ),
)
