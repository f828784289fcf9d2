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

    @property
    def untried(self) -> bool:
        """Whether it is refused only because nobody has served it on a GPU."""
        return self.refused == _UNTRIED

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


def by_key(*entries: _E) -> Mapping[str, _E]:
    return MappingProxyType({entry.key: entry for entry in entries})


_E2E = "tests/e2e/test_restores.py::test_restored_answers"
_MODELS = "tests/e2e/test_models.py::test_restored_answers"
_LATENT = (
    "tests/sglang/test_latent_pool.py::"
    "test_rows_come_back_as_the_codec_leaves_them_and_nothing_else_moves"
)
GROWTH = (
    "tests/sglang/test_assembly.py::test_every_pool_grows_alike_within_the_bytes_of_sglangs_own"
)
_UNTRIED = "it has not been served on a GPU yet."
_AT_YOUR_RISK = "Set HIQCACHE_ALLOW_UNTRIED=1 to serve it at your own risk"

#: Families by key, in the order in which SGLang decides (kv_cache_configurator.py).
FAMILIES: Mapping[str, Family] = by_key(
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
            Evidence("random", "a tiny Gemma 3", "CPU", _MODELS),
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
        way_out=_AT_YOUR_RISK,
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
        way_out=_AT_YOUR_RISK,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", GROWTH),),
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
        way_out=_AT_YOUR_RISK,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", GROWTH),),
    ),
    Family(
        "linear",
        "Linear attention or Mamba beside plain attention",
        models=("Qwen3-Next", "Qwen3.5", "Nemotron-H", "Falcon-H1", "LFM2"),
        pools=("MHATokenToKVPoolHost", "MambaPoolHost"),
        quantised="K and V; recurrent states stay SGLang's own",
        example=Example("Qwen3-Next-80B-A3B", (KVGeometry.of_heads(12, 2, 256),)),
        refused=_UNTRIED,
        way_out=_AT_YOUR_RISK,
        tested=(Evidence("unit", "by SGLang's assembly", "CPU", GROWTH),),
    ),
    Family(
        "linear_mla",
        "Linear attention beside latent attention",
        models=("Kimi-Linear", "Ling 2.5"),
        pools=("MLATokenToKVPoolHost", "MambaPoolHost"),
        quantised="latent rows; recurrent states stay SGLang's own",
        refused=_UNTRIED,
        way_out=_AT_YOUR_RISK,
    ),
    Family(
        "linear_sliding",
        "Linear attention beside sliding windows",
        models=("Inkling",),
        pools=("MHATokenToKVPoolHost", "MHATokenToKVPoolHost", "MambaPoolHost"),
        quantised="K and V of both pools; recurrent states stay SGLang's own",
        refused=_UNTRIED,
        way_out=_AT_YOUR_RISK,
    ),
    Family(
        "mla_sliding",
        "Latent attention with sliding windows",
        models=("Dots 3 Note",),
        pools=("MLATokenToKVPoolHost", "MLATokenToKVPoolHost"),
        quantised="latent rows of both pools",
        refused=_UNTRIED,
        way_out=_AT_YOUR_RISK,
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
