"""Reads a model folder as SGLang does: its ModelConfig, and the overrides it declares by model."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hiqcache.compatibility import FAMILIES, Family
from hiqcache.geometry import GeometryError, KVGeometry
from hiqcache.host_pools import HostPool, Model, split
from hiqcache.rotary import otherwise

#: Device tokens of sliding-window layers for each token of the others, and device bytes of state
#: for each byte of KV, where neither an argument nor the model says otherwise (SGLang's
#: --swa-full-tokens-ratio and --mamba-full-memory-ratio).
SWA_TOKENS, STATE_BYTES = 0.8, 0.9


class ReadingError(Exception):
    """SGLang cannot be loaded here, or cannot read the model; the text says which and why."""


def read(folder: Path, tp: int) -> Model:
    """What SGLang decides for ``folder`` under HiCache, for one of ``tp`` ranks.

    Raises ReadingError where SGLang does not read it, and GeometryError where it reads a shape
    that no pool has.
    """
    release = f"SGLang {version('sglang')}"
    try:
        with _quietly():
            config, declared = _config_of(folder)
            family = _family_of(config)
            pools = _pools_of(config, family, declared, tp)
    except GeometryError:
        raise
    except Exception as error:  # whatever a model's or SGLang's own code raises
        line = (str(error).strip().splitlines() or [""])[0]
        raise ReadingError(
            f"{release} does not read this model here ({type(error).__name__}: {line})"
        ) from error
    state = declared.get("mamba_full_memory_ratio", STATE_BYTES)
    return Model(
        folder,
        family,
        pools,
        f"{release}'s ModelConfig",
        rotary=otherwise(lambda key: getattr(config.hf_text_config, key, None)),
        state_share=state if family.key.startswith("linear") else 0.0,
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """SGLang's log, warnings and prints of a server's start say nothing to a plan."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _config_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """SGLang's ModelConfig, and what SGLang declares of a server's arguments for this model."""
    from sglang.srt.arg_groups.overrides import collect_model_override_declarations
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(folder), enable_hierarchical_cache=True)
    config = ModelConfig.from_server_args(arguments)
    architecture = config.hf_config.architectures[0]
    declared: dict[str, Any] = {}
    for _, values in collect_model_override_declarations(architecture, arguments, config.hf_config):
        declared.update(values)
    again = {
        name: declared[name] for name in ("disable_hybrid_swa_memory", "dtype") if name in declared
    }
    if again:
        arguments = ServerArgs(model_path=str(folder), enable_hierarchical_cache=True, **again)
        config = ModelConfig.from_server_args(arguments)
    return config, declared


def _family_of(config: Any) -> Family:
    """The family of SGLang's ``config``: the order of kv_cache_configurator.py."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        AttentionArch,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_minimax_sparse,
    )

    state = mambaish_config(config) is not None
    latent = config.attention_arch == AttentionArch.MLA
    if is_deepseek_v4(config.hf_config):
        key = "deepseek_v4"
    elif config.attention_arch == AttentionArch.SSM:
        key = "state"
    elif latent and config.is_hybrid_swa:
        key = "mla_sliding"
    elif latent and state:
        key = "linear_mla"
    elif latent:
        key = "dsa" if is_deepseek_dsa(config.hf_config) else "mla"
    elif config.is_hybrid_swa:
        key = "linear_sliding" if state else "sliding"
    elif is_minimax_sparse(config.hf_config):
        key = "sparse"
    elif state:
        key = "linear"
    else:
        # Not has_asymmetric_kv, which counts windows of other widths in a pool that has none.
        key = "plain" if config.head_dim == config.v_head_dim else "unequal"
    return FAMILIES[key]


def _pools_of(
    config: Any, family: Family, declared: dict[str, Any], tp: int
) -> tuple[HostPool, ...]:
    """The host pools of KV rows of one rank; none where SGLang keeps other rows."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    layers, dtype = config.num_attention_layers, str(config.dtype).removeprefix("torch.")
    if family.key in ("linear", "linear_mla"):
        layers = len(mambaish_config(config).full_attention_layer_ids)
    if family.key in ("mla", "dsa", "linear_mla"):
        latent = KVGeometry.of_latent(layers, config.kv_lora_rank, config.qk_rope_head_dim, dtype)
        return (HostPool("kv", latent),)
    if family.key not in ("plain", "unequal", "sliding", "linear"):
        return ()
    heads = split(config.get_total_num_kv_heads(), tp)
    widths = config.head_dim, config.v_head_dim
    if family.key == "sliding":
        return _windowed(config, heads, dtype, declared, tp)
    return (HostPool("kv", KVGeometry.of_heads(layers, heads, widths[0], dtype, widths[1])),)


def _windowed(
    config: Any, heads: int, dtype: str, declared: dict[str, Any], tp: int
) -> tuple[HostPool, ...]:
    full, swa = len(config.full_attention_layer_ids), len(config.swa_attention_layer_ids)
    width, v_width = config.head_dim, config.v_head_dim
    swa_heads, swa_width, swa_v_width = heads, width, v_width
    if config.is_hybrid_swa_compress:  # heads of their own (_build_hybrid_swa_kv_pool)
        swa_heads = split(config.hf_text_config.swa_num_key_value_heads, tp)
        swa_width, swa_v_width = config.swa_head_dim, config.swa_v_head_dim
    share = declared.get("swa_full_tokens_ratio", SWA_TOKENS)
    pools = []
    if full:
        rows = KVGeometry.of_heads(full, heads, width, dtype, v_width)
        pools.append(HostPool("full", rows))
    if swa:
        rows = KVGeometry.of_heads(swa, swa_heads, swa_width, dtype, swa_v_width)
        pools.append(HostPool("swa", rows, share if full else 1.0))
    return tuple(pools)
