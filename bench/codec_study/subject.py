"""A real model in fp32, and what happens to its answers when K and V went through a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.codec_study.quantisers import Place
from hiqcache.model import read_model

#: Restored K and V of fp32 rows ``[heads, tokens, width]``.
Codec = Callable[[torch.Tensor, torch.Tensor, Place], tuple[torch.Tensor, torch.Tensor]]
#: K and V of each layer, ``[heads, tokens, width]``.
Rows = list[tuple[torch.Tensor, torch.Tensor]]


class Subject:
    """A causal model of ``transformers``, in fp32 so that its arithmetic does not hide a codec."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._model.config
        rows = read_model(folder).geometry
        self.layers: int = rows.layers
        self.heads, self.width = rows.parts[0].heads, rows.parts[0].width
        self._theta: float = config.rope_parameters["rope_theta"]

    def place(self, layer: int) -> Place:
        """What a quantiser may know of a layer."""
        return Place(layer, self.layers, self._theta)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int]) -> Rows:
        """Exact K (after RoPE) and V of ``tokens`` in every layer."""
        cache = DynamicCache()
        self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    @torch.inference_mode()
    def through(self, rows: Rows, codec: Codec) -> Rows:
        """``rows`` stored and restored by ``codec``."""
        return [codec(k, v, self.place(layer)) for layer, (k, v) in enumerate(rows)]

    @torch.inference_mode()
    def after(self, prefix: Rows, suffix: Sequence[int]) -> torch.Tensor:
        """Log-probabilities ``[suffix, vocabulary]`` after each token of ``suffix``.

        The suffix is computed exactly, on top of the prefix's rows as they are given.
        """
        cache = DynamicCache()
        for layer, (k, v) in enumerate(prefix):
            cache.update(k[None], v[None], layer)
        logits = self._model(torch.tensor([suffix]), past_key_values=cache, use_cache=True).logits
        return torch.log_softmax(logits[0], -1)

    @torch.inference_mode()
    def throughout(self, tokens: Sequence[int], codec: Codec) -> torch.Tensor:
        """Log-probabilities where every token's K and V pass ``codec`` before attention reads them.

        A layer's rows then carry the losses of all layers below it.
        """
        logits = self._model(
            torch.tensor([tokens]), past_key_values=_Lossy(self, codec), use_cache=True
        ).logits
        return torch.log_softmax(logits[0], -1)


class _Lossy(DynamicCache):  # type: ignore[misc]
    def __init__(self, subject: Subject, codec: Codec) -> None:
        super().__init__()
        self._subject = subject
        self._codec = codec

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._codec(key_states[0], value_states[0], self._subject.place(layer_idx))
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            k[None], v[None], layer_idx, *args, **kwargs
        )
        return found
