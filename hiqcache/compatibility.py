"""What is served and what is refused: one table, which everything that speaks of it reads.

`hiqcache plan`, `hiqcache doctor`, the containers' entry point, the pool's refusals and
docs/compatibility.md say what these entries say. An entry whose ``refused`` is empty is served:
emptying it, and naming the evidence, is all that a newly served family needs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from hiqcache.geometry import KVGeometry
from hiqcache.rotary import HALVES
from hiqcache.storage.backends import REFUSED, SERVED

#: What keeps any model served, and how it is refused.
WAY_OUT = "Unset HIQCACHE_CODEC (or set it to bf16) to serve it with SGLang's own host pool."


class UnsupportedError(ValueError):
    """A configuration that HiQCache does not serve; the text says what was found, and a way out."""


@dataclass(frozen=True)
class Evidence:
    """One way in which an entry was tested.

    how: with which weights (``trained``, ``random``), or ``unit`` where no server ran.
    what: the model, or what was done.
    on: the hardware.
    where: the test (file, or file::function) or the file of results, from the repository's root.
    """

    how: Literal["trained", "random", "unit"]
    what: str
    on: str
    where: str


@dataclass(frozen=True)
class Example:
    """A model of a family, by which its factor is stated.

    pools: the rows of each quantised pool, for one rank.
    kept_bytes: bytes per token that stay as SGLang has them, all layers together.
    """

    model: str
    pools: tuple[KVGeometry, ...]
    kept_bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """One line of a table. ``refused`` says why it is not served; empty where it is.

    way_out: what to do where it is refused, before the general way out.
    """

    key: str
    name: str
    tested: tuple[Evidence, ...] = ()
    refused: str = ""
    way_out: str = ""

    @property
    def served(self) -> bool:
        """Whether a quantised host pool serves it."""
        return not self.refused

    def message(self, found: str) -> str:
        """Why ``found`` is refused, and what to do, in sentences."""
        other = f"{self.way_out}, or: " if self.way_out else ""
        return f"{found}: {self.refused} {other}{WAY_OUT}"

    def require(self, found: str) -> None:
        """Raise UnsupportedError where this entry is refused; ``found`` says what was seen."""
        if self.refused:
            raise UnsupportedError(self.message(found))


@dataclass(frozen=True, kw_only=True)
class Family(Entry):
    """Models of which SGLang builds the same kinds of host pool.

    models: some that belong to it.
    pools: classes of the host pools that SGLang 0.5.23 builds.
    quantised: what of that HiQCache stores as codes, and what stays SGLang's own.
    """

    models: tuple[str, ...]
    pools: tuple[str, ...]
    quantised: str
    example: Example | None = None


_E = TypeVar("_E", bound=Entry)


def _by_key(*entries: _E) -> Mapping[str, _E]:
    return MappingProxyType({entry.key: entry for entry in entries})


_E2E = "tests/e2e/test_restores.py::test_restored_answers"
_MODELS = "tests/e2e/test_models.py::test_restored_answers"
_REFUSALS = "tests/sglang/test_refusals.py::"
_LATENT = (
    "tests/sglang/test_latent_pool.py::"
    "test_rows_come_back_as_the_codec_leaves_them_and_nothing_else_moves"
)
_ASSEMBLY = "tests/sglang/test_assembly.py::"
_GROWTH = _ASSEMBLY + "test_every_pool_grows_alike_within_the_bytes_of_sglangs_own"
_UNTRIED = "it has not been served on a GPU yet."

#: Families by key, in the order in which SGLang decides (kv_cache_configurator.py).
FAMILIES: Mapping[str, Family] = _by_key(
    Family(
        "plain",
        "Plain attention (MHA, GQA, MQA)",
        models=("Llama 2 and 3", "Qwen2", "Qwen3", "Mistral", "Gemma 2 and 3", "StarCoder"),
        pools=("MHATokenToKVPoolHost",),
        quantised="K and V of every layer. Where SGLang keeps sliding windows in the same pool "
        "(Gemma 2 and 3), those layers too",
        example=Example("Qwen3-8B", (KVGeometry.of_heads(36, 8, 128),)),
        tested=(
            Evidence("trained", "SmolLM2-135M", "CPU", _E2E),
            Evidence("trained", "SmolLM2-135M", "H200", "results/h200/server_smollm2.json"),
            Evidence("random", "Qwen3-8B's shape", "H200", "results/h200/server.json"),
        ),
    ),
    Family(
        "unequal",
        "Plain attention, K and V of different widths",
        models=("DeepSeek-VL2 without MLA",),
        pools=("AsymmetricMHATokenToKVPoolHost",),
        quantised="K and V",
        refused=_UNTRIED,
        tested=(
            Evidence(
                "unit",
                "rows come back",
                "CPU",
                "tests/sglang/test_host_pool.py::test_k_and_v_of_different_widths",
            ),
        ),
    ),
    Family(
        "mla",
        "Latent attention (MLA)",
        models=("DeepSeek V2 and V3", "Kimi K2", "GLM-4.7-Flash", "MiniCPM3"),
        pools=("MLATokenToKVPoolHost",),
        quantised="the latent, in blocks of 128 with a scale each, and the rope part",
        example=Example("DeepSeek-V3", (KVGeometry.of_latent(61, 512, 64),)),
        tested=(
            Evidence("random", "a tiny DeepSeek-V2", "CPU", _MODELS),
            Evidence("unit", "rows come back", "CPU", _LATENT),
        ),
    ),
    Family(
        "dsa",
        "Latent attention with an indexer (DSA)",
        models=("DeepSeek V3.2", "GLM-5"),
        pools=("MLATokenToKVPoolHost", "DSAIndexerPoolHost"),
        quantised="as of MLA; the indexer's keys stay SGLang's own",
        # The indexer's keys: 128 elements of fp8 and one fp32 scale (mem_cache/pool_host/dsa.py).
        example=Example(
            "DeepSeek-V3.2", (KVGeometry.of_latent(61, 512, 64),), kept_bytes=61 * (128 + 4)
        ),
        refused=_UNTRIED,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", _GROWTH),),
    ),
    Family(
        "sliding",
        "Sliding windows in a pool of their own",
        models=("gpt-oss", "Llama 4", "Gemma 4", "MiMo-V2"),
        pools=("MHATokenToKVPoolHost", "MHATokenToKVPoolHost"),
        quantised="K and V of both pools",
        example=Example(
            "gpt-oss-20b", (KVGeometry.of_heads(12, 8, 64), KVGeometry.of_heads(12, 8, 64))
        ),
        refused=_UNTRIED,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", _GROWTH),),
    ),
    Family(
        "linear",
        "Linear attention or Mamba beside plain attention",
        models=("Qwen3-Next", "Qwen3.5", "Nemotron-H", "Falcon-H1", "LFM2"),
        pools=("MHATokenToKVPoolHost", "MambaPoolHost"),
        quantised="K and V; recurrent states stay SGLang's own",
        example=Example("Qwen3-Next-80B-A3B", (KVGeometry.of_heads(12, 2, 256),)),
        refused=_UNTRIED,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", _GROWTH),),
    ),
    Family(
        "linear_mla",
        "Linear attention beside latent attention",
        models=("Kimi-Linear", "Ling 2.5"),
        pools=("MLATokenToKVPoolHost", "MambaPoolHost"),
        quantised="latent rows; recurrent states stay SGLang's own",
        refused=_UNTRIED,
    ),
    Family(
        "linear_sliding",
        "Linear attention beside sliding windows",
        models=("Inkling",),
        pools=("MHATokenToKVPoolHost", "MHATokenToKVPoolHost", "MambaPoolHost"),
        quantised="K and V of both pools; recurrent states stay SGLang's own",
        refused=_UNTRIED,
    ),
    Family(
        "mla_sliding",
        "Latent attention with sliding windows",
        models=("Dots 3 Note",),
        pools=("MLATokenToKVPoolHost", "MLATokenToKVPoolHost"),
        quantised="latent rows of both pools",
        refused=_UNTRIED,
    ),
    Family(
        "deepseek_v4",
        "DeepSeek-V4's compressed pools",
        models=("DeepSeek-V4",),
        pools=("LogicalHostPool", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"),
        quantised="nothing",
        refused="SGLang keeps its rows in fp8 pages of a layout of their own, which leaves INT8 "
        "nothing to gain.",
    ),
    Family(
        "sparse",
        "MiniMax's sparse attention",
        models=("MiniMax-M3",),
        pools=("MHATokenToKVPoolHost", "MHATokenToKOnlyPoolHost"),
        quantised="nothing",
        refused="SGLang keeps index keys beside its K and V, which HiQCache does not serve.",
    ),
    Family(
        "state",
        "State-space models without attention",
        models=("Mamba", "Mamba 2", "Falcon-Mamba"),
        pools=("MambaPoolHost",),
        quantised="nothing",
        refused="it keeps no K and V, so there is nothing to quantise.",
    ),
)

#: What a server may be asked for beside its model, by key.
FEATURES: Mapping[str, Entry] = _by_key(
    Entry(
        "tp",
        "Tensor parallelism (--tp-size)",
        tested=(
            Evidence("random", "Qwen3-8B's shape", "2 x H200", "results/h200/server_tp2.json"),
        ),
    ),
    Entry(
        "pp",
        "Pipeline parallelism (--pp-size)",
        tested=(
            Evidence(
                "unit",
                "stages get equal slots, by SGLang's assembly",
                "CPU",
                _ASSEMBLY + "test_pipeline_stages_get_equal_slots_without_asking_each_other",
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
            Evidence("unit", "beside a quantised target, by SGLang's assembly", "CPU", _GROWTH),
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
        "Decode servers that offload KV to L3 storage",
        refused="SGLang builds their host pool apart from L2, and nobody has tried it with encoded "
        "pages.",
        way_out="Start without it",
        tested=(Evidence("unit", "refused", "CPU", _ASSEMBLY + "test_decode_offload_is_refused"),),
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
