"""Models as SGLang serves them: read by SGLang itself, by transformers' classes, by keys alone."""

from __future__ import annotations

import builtins
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hiqcache import model as model_module
from hiqcache.architectures import FAMILY_OF
from hiqcache.geometry import GeometryError, KVGeometry
from hiqcache.model import read_model
from tests.model_folders import (
    CHATGLM3,
    DEEPSEEK_V3,
    GEMMA2_2B,
    GEMMA3_4B,
    GLM5,
    GPT_OSS_20B,
    MAMBA2,
    PHI2,
    QWEN3_8B,
    QWEN3_NEXT,
    STARCODER,
    without,
    write,
)

PLAIN = [
    (QWEN3_8B, KVGeometry.of_heads(36, 8, 128)),
    (without(QWEN3_8B, "head_dim"), KVGeometry.of_heads(36, 8, 128)),
    (without(QWEN3_8B, "torch_dtype", dtype="float16"), KVGeometry.of_heads(36, 8, 128, "float16")),
    (without(QWEN3_8B, torch_dtype="float32"), KVGeometry.of_heads(36, 8, 128, "float16")),
    (GEMMA2_2B, KVGeometry.of_heads(26, 4, 256)),  # float32 weights: bf16, for Gemma alone
    (GEMMA3_4B, KVGeometry.of_heads(34, 4, 256)),
    (STARCODER, KVGeometry.of_heads(40, 1, 128, "float16")),
    (CHATGLM3, KVGeometry.of_heads(28, 2, 128, "float16")),
    (PHI2, KVGeometry.of_heads(32, 32, 128)),
]
NAMES = [
    *("qwen3", "no-head-dim", "float16", "float32", "gemma2", "gemma3", "starcoder", "chatglm"),
    "phi",
]
#: Those of which K turns otherwise than by rotary halves of the whole head.
OTHERWISE = ("gpt_bigcode", "chatglm", "phi")


def without_package(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if ``names`` were not installed."""
    found, imported = importlib.util.find_spec, builtins.__import__

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name in names else found(name, *rest)

    def load(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in names:
            raise ImportError(f"No module named {name!r}")
        return imported(name, *rest, **more)

    monkeypatch.setattr(model_module, "find_spec", find_spec)
    monkeypatch.setattr(builtins, "__import__", load)


@pytest.mark.parametrize(("config", "expected"), PLAIN, ids=NAMES)
def test_the_shape_is_the_one_that_sglang_takes(
    config: Mapping[str, Any], expected: KVGeometry, tmp_path: Path
) -> None:
    read = read_model(write(tmp_path, config))
    assert read.family.key == "plain"
    assert read.geometry == expected
    assert read.source == "SGLang 0.5.23's ModelConfig"
    assert read.notes == ()
    assert bool(read.rotary) == (config["model_type"] in OTHERWISE)
    assert read == read_model(tmp_path / "config.json")


@pytest.mark.parametrize(("config", "expected"), PLAIN, ids=NAMES)
def test_without_sglang_transformers_classes_say_the_same(
    config: Mapping[str, Any],
    expected: KVGeometry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_package(monkeypatch, "sglang")
    read = read_model(write(tmp_path, config))
    assert (read.family.key, read.geometry) == ("plain", expected)
    assert bool(read.rotary) == (config["model_type"] in OTHERWISE)
    assert "transformers" in read.source
    assert "no SGLang" in read.notes[0]


def test_by_keys_alone_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch, "sglang", "transformers")
    assert read_model(write(tmp_path, QWEN3_8B)).geometry == KVGeometry.of_heads(36, 8, 128)
    assert read_model(write(tmp_path, CHATGLM3)).geometry.parts[0] == ("k", 2, 128)
    assert read_model(write(tmp_path, QWEN3_8B)).rotary == ""
    starcoder = read_model(write(tmp_path, STARCODER))
    assert "'gpt_bigcode'" in starcoder.rotary
    assert starcoder.geometry.parts[0] == ("k", 1, 128)
    assert "No key names the head_dim" in " ".join(starcoder.notes)
    # Its class says 8 KV heads of 128: keys alone can't know, and say so.
    bare = read_model(write(tmp_path, without(QWEN3_8B, "num_key_value_heads")))
    assert bare.geometry.parts[0].heads == 32
    assert "No key names the KV heads" in " ".join(bare.notes)
    assert "config.json's keys alone" in bare.notes[-2]
    with pytest.raises(GeometryError, match="num_attention_heads is None"):
        read_model(write(tmp_path, GEMMA3_4B))


@pytest.mark.parametrize(
    ("config", "family", "pools"),
    [
        (DEEPSEEK_V3, "mla", [("kv", KVGeometry.of_latent(61, 512, 64))]),
        (GLM5, "dsa", [("kv", KVGeometry.of_latent(78, 512, 64))]),
        (
            GPT_OSS_20B,
            "sliding",
            [
                ("full", KVGeometry.of_heads(12, 8, 64)),
                ("swa", KVGeometry.of_heads(12, 8, 64)),
            ],
        ),
        (QWEN3_NEXT, "linear", [("kv", KVGeometry.of_heads(12, 2, 256))]),
        (MAMBA2, "state", []),
    ],
    ids=["deepseek-v3", "glm-5", "gpt-oss", "qwen3-next", "mamba2"],
)
def test_other_families_and_their_pools(
    config: Mapping[str, Any],
    family: str,
    pools: list[tuple[str, KVGeometry]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = read_model(write(tmp_path, config))
    assert read.notes == ()
    assert read.family.key == family
    assert [(pool.label, pool.geometry) for pool in read.pools] == pools
    if len(pools) != 1:
        with pytest.raises(GeometryError, match="one pool of KV rows is needed"):
            _ = read.geometry
    # A reading without SGLang names the same family, and its pools where they are a single one.
    without_package(monkeypatch, "sglang")
    lesser = read_model(tmp_path)
    assert lesser.family.key == family
    if family in ("mla", "dsa"):
        assert lesser.geometry == read.geometry
    else:
        assert lesser.pools == ()
        assert "plan where SGLang is installed" in lesser.notes[-1]


def test_overrides_that_sglang_declares_by_model_are_heeded(tmp_path: Path) -> None:
    """Step-3.5's windows are in a plain pool, but only under HiCache."""
    from sglang.srt.configs.model_config import ModelConfig

    config = {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "torch_dtype": "bfloat16",
    }
    write(tmp_path, config)
    assert ModelConfig(str(tmp_path)).is_hybrid_swa
    assert read_model(tmp_path).family.key == "plain"


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_split_or_replicated_over_ranks(tp: int, heads: int, tmp_path: Path) -> None:
    assert read_model(write(tmp_path, QWEN3_8B), tp).geometry.parts[0].heads == heads


def test_a_latent_row_is_whole_on_every_rank(tmp_path: Path) -> None:
    latent = KVGeometry.of_latent(61, 512, 64)
    assert read_model(write(tmp_path, DEEPSEEK_V3), 8).geometry == latent


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (QWEN3_8B, 3, "8 KV heads cannot be split over --tp 3"),
        (QWEN3_8B, 0, "at least 1"),
        ({}, 1, "num_hidden_layers is None"),
        ({"num_hidden_layers": True}, 1, "num_hidden_layers is True"),
    ],
)
def test_what_cannot_be_served_is_said(
    config: Mapping[str, Any], tp: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GeometryError, match=message):
        read_model(write(tmp_path, config), tp)


def test_a_model_that_sglang_does_not_read_is_noted(tmp_path: Path) -> None:
    read = read_model(write(tmp_path, without(QWEN3_8B, "architectures")))
    assert read.notes[0].startswith("SGLang 0.5.23 does not read this model here (")
    assert read.geometry == KVGeometry.of_heads(36, 8, 128)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GeometryError, match=r"config\.json: no such file"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GeometryError, match="cannot be read as JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(GeometryError, match="no JSON object"):
        read_model(tmp_path)


def test_reading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    read_model(write(tmp_path, GPT_OSS_20B))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""


def _served_architectures() -> set[str]:
    """Every model class that SGLang registers, from its sources."""
    import ast

    import sglang.srt.models as models

    names: set[str] = set()
    for file in Path(models.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "EntryClass"
                for target in node.targets
            ):
                names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return names


def test_the_names_are_those_of_sglangs_own_lists() -> None:
    from sglang.srt.arg_groups.overrides import _MAMBA_RADIX_CACHE_ARCHS
    from sglang.srt.configs.model_config import PURE_SSM_ARCHITECTURES, is_hybrid_swa_model

    served = _served_architectures()
    assert len(served) > 200
    # Drafts are none of a target's pools; Step's windows are in a plain pool under HiCache.
    drafts = {name for name in served if name.endswith(("MTP", "NextN", "DSpark"))}
    step = {"Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"}
    windowed = {name for name in served if is_hybrid_swa_model([name])} - drafts - step
    assert windowed == {
        name for name, key in FAMILY_OF.items() if key in ("sliding", "linear_sliding")
    } | {"DeepseekV4ForCausalLM"}
    linear = {name for name, key in FAMILY_OF.items() if key.startswith("linear")}
    assert linear >= _MAMBA_RADIX_CACHE_ARCHS
    assert {n for n, key in FAMILY_OF.items() if key == "state"} == set(PURE_SSM_ARCHITECTURES)
    assert set(FAMILY_OF) <= served
