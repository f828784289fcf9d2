"""Model: what SGLang makes of a model folder, as far as the host pools are concerned.

SGLang's own ModelConfig decides, wherever this Python has SGLang: nothing else knows the defaults
of a model's class, its other names for the same thing and the architectures that SGLang treats
apart. Without SGLang, transformers' configuration classes fill in the defaults and rules of ours
read them; without those, config.json's keys alone. ``Model.notes`` says what a reading rests on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hiqcache.architectures import FAMILY_OF
from hiqcache.compatibility import FAMILIES, Family
from hiqcache.geometry import GeometryError, KVGeometry
from hiqcache.host_pools import HostPool, Model, split
from hiqcache.rotary import otherwise

__all__ = ["HostPool", "Model", "read_model"]


def read_model(path: str | Path, tp: int = 1) -> Model:
    """Read ``path``, a model folder or its config.json, for tensor parallelism ``tp``.

    Raises GeometryError where it cannot be read, is no language model or cannot be split.
    """
    if tp < 1:
        raise GeometryError(f"tensor parallelism must be at least 1, not {tp}.")
    folder = Path(path)
    if folder.name == "config.json":
        folder = folder.parent
    config = _load(folder / "config.json")
    failures: list[str] = []
    for reader in (_by_sglang, _by_transformers):
        try:
            model = reader(folder, tp)
        except GeometryError as error:
            raise GeometryError(f"{folder}: {error}") from error
        except _UnreadableError as error:
            failures.append(str(error))
            continue
        return _with_notes(model, failures)
    try:
        return _with_notes(_by_keys(folder, config, tp), failures)
    except GeometryError as error:
        raise GeometryError(f"{folder / 'config.json'}: {error}") from error


class _UnreadableError(Exception):
    """A reader that is not at hand, or that does not know the model; the text is a sentence."""


def _with_notes(model: Model, failures: list[str]) -> Model:
    notes = (*failures, *model.notes)
    return replace(model, notes=notes)


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GeometryError(
            f"{file}: no such file. Give a model folder or its config.json; a model on a hub "
            "must be downloaded first."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GeometryError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise GeometryError(f"{file}: holds no JSON object, so it is no model configuration.")
    return config


def _by_sglang(folder: Path, tp: int) -> Model:
    if find_spec("sglang") is None:
        raise _UnreadableError("This Python has no SGLang, which decides how a model is read.")
    # Here, not above: it loads SGLang, and with it torch.
    from hiqcache.sglang.model_config import ReadingError, read

    try:
        return read(folder, tp)
    except ReadingError as error:
        raise _UnreadableError(f"{error}.") from error


def _by_transformers(folder: Path, tp: int) -> Model:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise _UnreadableError(
            "It has no transformers either, so defaults of the model's class are not known."
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # whatever a model's class raises
        line = (str(error).strip().splitlines() or [""])[0]
        raise _UnreadableError(
            f"transformers does not read it either ({type(error).__name__}: {line})."
        ) from error
    return _by_rules(
        folder,
        tp,
        tuple(config.architectures or text.architectures or ()),
        lambda key: getattr(text, key, None),
        f"transformers {_version('transformers')}'s configuration class, by rules of HiQCache",
        defaults_known=True,
    )


def _by_keys(folder: Path, config: Mapping[str, Any], tp: int) -> Model:
    text: Mapping[str, Any] = next(
        (config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), config
    )

    def key_of(name: str) -> Any:
        return next(
            (text[other] for other in (name, *_OTHER_NAMES.get(name, ())) if other in text), None
        )

    return _by_rules(
        folder,
        tp,
        tuple(config.get("architectures") or ()),
        key_of,
        "config.json's keys alone",
        defaults_known=False,
    )


#: Where a model of several modalities keeps its language model, in SGLang's order
#: (get_hf_text_config).
_TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")

#: Other names for a key, where no class of transformers translates them.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "dtype": ("torch_dtype",),
}

#: Keys that name the number of KV heads, in SGLang's order (ModelConfig.get_total_num_kv_heads).
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)

#: Layer kinds beside attention over everything; SGLang gives some of them pools of their own.
_STATE_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "ssm")


def _by_rules(
    folder: Path,
    tp: int,
    architectures: tuple[str, ...],
    get: Callable[[str], Any],
    source: str,
    *,
    defaults_known: bool,
) -> Model:
    """What SGLang would decide, as far as a plain or a latent pool goes.

    get: the value of a key, or None. defaults_known: whether a class has filled in its defaults.
    """
    assumed: list[str] = []
    name = str(get("dtype") or "float32").removeprefix("torch.")
    # SGLang's --dtype auto serves float32 weights as float16, but Gemma's as bfloat16.
    gemma = str(get("model_type") or "").startswith("gemma")
    dtype = {"float32": "bfloat16" if gemma else "float16"}.get(name, name)
    family = _family_of(architectures, get)
    layers = _integer(get, "num_hidden_layers")
    if family.key in ("mla", "dsa"):
        latent, rope = _integer(get, "kv_lora_rank"), _integer(get, "qk_rope_head_dim")
        pools: tuple[HostPool, ...] = (
            HostPool("kv", KVGeometry.of_latent(layers, latent, rope, dtype)),
        )
    elif family.key in ("plain", "unequal"):
        heads = _integer(get, "num_attention_heads")
        kv_heads = _kv_heads(get, heads, assumed)
        head_dim = _head_dim(get, heads, assumed)
        v_head_dim = get("v_head_dim") or head_dim
        if v_head_dim != head_dim:
            family = FAMILIES["unequal"]
        geometry = KVGeometry.of_heads(
            layers, split(kv_heads, tp), head_dim, dtype, v_head_dim=v_head_dim
        )
        pools = (HostPool("kv", geometry),)
    else:
        pools = ()
        defaults_known = False
        assumed.append(
            "Only SGLang's own reading tells the pools of such a model: plan where SGLang is "
            "installed."
        )
    notes = (f"Read from {source}.", *(() if defaults_known else assumed))
    return Model(folder, family, pools, source, rotary=otherwise(get), notes=notes)


def _family_of(architectures: tuple[str, ...], get: Callable[[str], Any]) -> Family:
    for name in architectures:
        if name in FAMILY_OF:
            return FAMILIES[FAMILY_OF[name]]
    layer_types = get("layer_types") or ()
    if get("linear_attn_config") or any(kind in _STATE_LAYERS for kind in layer_types):
        return FAMILIES["linear_mla" if get("kv_lora_rank") else "linear"]
    if get("kv_lora_rank"):
        return FAMILIES["dsa" if get("index_topk") else "mla"]
    return FAMILIES["plain"]


def _kv_heads(get: Callable[[str], Any], heads: int, assumed: list[str]) -> int:
    if get("multi_query") and not get("new_decoder_architecture"):
        return 1
    for key in _KV_HEADS:
        if get(key) is not None:
            return _integer(get, key)
    assumed.append(
        f"No key names the KV heads: as many as attention heads ({heads}) are taken, and a class "
        "with another default has fewer."
    )
    return heads


def _head_dim(get: Callable[[str], Any], heads: int, assumed: list[str]) -> int:
    if get("head_dim") is not None:
        return _integer(get, "head_dim")
    hidden = _integer(get, "hidden_size")
    assumed.append(
        f"No key names the head_dim: hidden_size / num_attention_heads ({hidden // heads}) is "
        "taken, and a class with another default differs."
    )
    return hidden // heads


def _integer(get: Callable[[str], Any], key: str) -> int:
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(
            f"{key} is {value!r}, where a positive whole number is needed: this is no language "
            "model's configuration, or it is incomplete."
        )
    return value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"
