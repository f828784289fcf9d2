"""Which models turn K with the position as codec int4 takes for granted.

Rotary embedding turns pairs of channels by angles that grow with the position. int4 gives more bits
to channels that turn slowly (hiqcache/codecs/int4.py), and finds them by their place: channel c
with c + head_dim / 2, the faster the smaller c, over the whole head and in every layer. Where pairs
are neighbours (GPT-J, Cohere, GLM-4, ERNIE), a part of the head turns (Phi, GPT-NeoX, StableLM) or
some layers do not (Cohere 2, SmolLM3), other channels are slow ones.

No configuration says so of itself: it is the model's code. So what is known is known by name, and
tests/test_rotary.py runs each model and looks at its K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Model types (as transformers' text configurations name them) whose K turns so.
HALVES = (
    *("llama", "mistral", "mixtral", "ministral3", "arcee", "apertus", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("starcoder2", "olmo", "olmo2", "olmoe", "granite", "granitemoe", "granitemoeshared"),
)

#: Keys by which a model of such a type may still turn otherwise, and the value that changes nothing
#: (SGLang's models/llama.py and gemma3_causal.py read both, transformers the first).
_PLAIN: Mapping[str, Any] = {"partial_rotary_factor": 1, "rope_is_neox_style": True}


def otherwise(get: Callable[[str], Any]) -> str:
    """Why K may not turn so; empty where it does.

    get: the value of a key of the text configuration, or None.
    """
    kind = get("model_type")
    if kind not in HALVES:
        return f"K of model type {kind!r}"
    for key, plain in _PLAIN.items():
        for found in (get(key), *_of_rope(get, key)):
            if found is not None and found != plain:
                return f"K of model type {kind!r} with {key} {found!r}"
    return ""


def _of_rope(get: Callable[[str], Any], key: str) -> list[Any]:
    """Values of ``key`` in the settings of rotary embedding, which some models have by layer."""
    given = [get(name) for name in ("rope_parameters", "rope_scaling")]
    outer = [each for each in given if isinstance(each, dict)]
    inner = [each for one in outer for each in one.values() if isinstance(each, dict)]
    return [each.get(key) for each in (*outer, *inner)]
