"""KVGeometry: the shape of the KV rows that one tensor-parallel rank holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Row dtypes that are served, and their bytes per element.
ITEM_BYTES = {"bfloat16": 2, "float16": 2}


class GeometryError(ValueError):
    """A model configuration that cannot be read, or that HiQCache does not serve."""


class HybridError(GeometryError):
    """A model with layers of several kinds: only a started server knows its pools."""


@dataclass(frozen=True)
class KVGeometry:
    """KV rows of one rank: ``layers`` x (K, V) x ``heads`` x ``head_dim`` elements a token."""

    layers: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.head_dim) < 1:
            raise GeometryError(f"layers, heads and head_dim must be positive: {self}")
        if self.dtype not in ITEM_BYTES:
            raise GeometryError(f"KV dtype {self.dtype}: HiQCache serves {', '.join(ITEM_BYTES)}.")

    @property
    def stock_row_bytes(self) -> int:
        """Bytes of one token's K (or V) row in one layer, in the GPU's precision."""
        return self.heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def stock_bytes_per_token(self) -> int:
        """Bytes a token takes in SGLang's own host pool."""
        return 2 * self.layers * self.stock_row_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tp: int = 1) -> KVGeometry:
        """The geometry of a Hugging Face configuration under tensor parallelism ``tp``.

        KV heads are split over ranks, or replicated where there are fewer heads than ranks, the
        way SGLang does it. Raises GeometryError where the model or ``tp`` is not served.
        """
        if tp < 1:
            raise GeometryError(f"tensor parallelism must be at least 1, not {tp}.")
        config = config.get("text_config") or config
        if config.get("kv_lora_rank"):
            raise GeometryError(
                f"this is an MLA model (kv_lora_rank={config['kv_lora_rank']}). HiQCache serves "
                "plain multi-head, grouped-query and multi-query attention: keep "
                "HIQCACHE_CODEC=bf16 for it."
            )
        kinds = sorted(set(config.get("layer_types") or ["full_attention"]))
        if kinds != ["full_attention"]:
            raise HybridError(
                f"its layers are of kinds {', '.join(kinds)}; SGLang splits such a model's host "
                "memory over several pools, which a plan cannot foresee. Start the server and "
                "read the capacities from its log or from hiqcache_l2_capacity_tokens."
            )
        layers = _integer(config, "num_hidden_layers")
        heads = _integer(config, "num_attention_heads")
        kv_heads = (
            _integer(config, "num_key_value_heads")
            if config.get("num_key_value_heads") is not None
            else heads
        )
        if config.get("head_dim") is not None:
            head_dim = _integer(config, "head_dim")
        else:
            hidden = _integer(config, "hidden_size")
            if hidden % heads:
                raise GeometryError(
                    f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and "
                    "head_dim is not given: correct the model's config.json."
                )
            head_dim = hidden // heads
        if config.get("v_head_dim") not in (None, head_dim):
            raise GeometryError(
                f"K heads have {head_dim} elements and V heads {config['v_head_dim']}; HiQCache "
                "serves equal widths: keep HIQCACHE_CODEC=bf16 for it."
            )
        if max(kv_heads, tp) % min(kv_heads, tp):
            raise GeometryError(
                f"{kv_heads} KV heads cannot be split over --tp {tp}: choose a divisor or a "
                f"multiple of {kv_heads}."
            )
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        # SGLang's --dtype auto serves float32 weights as float16.
        dtype = {"float32": "float16"}.get(name.removeprefix("torch."), name.removeprefix("torch."))
        return cls(layers, max(1, kv_heads // tp), head_dim, dtype)

    @classmethod
    def from_path(cls, path: str | Path, tp: int = 1) -> KVGeometry:
        """Read ``path``, a model folder or its config.json. Raises GeometryError."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
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
        try:
            return cls.from_config(config, tp)
        except GeometryError as error:
            raise type(error)(f"{file}: {error}") from error


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(
            f"{key} is {value!r}, where a positive whole number is needed: this is no language "
            "model's configuration, or it is incomplete."
        )
    return value
