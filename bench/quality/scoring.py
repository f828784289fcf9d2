"""Asks a server for the distributions over a suffix, and proves where the prefix came from.

SGLang never matches a cached prefix beyond ``logprob_start_len``, so asking for log-probabilities
from the end of the prefix on leaves the whole prefix to the cache; asking for them from the start
would have it computed again.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiqcache import direct_http

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Scored:
    """One answered request.

    logprobs: of the suffix's tokens after its first ``[positions]``.
    top_values, top_tokens: the most probable tokens at each position ``[positions, k]``, best
        first.
    output: greedily generated tokens.
    device, host: prefix tokens that came from L1 and from L2.
    """

    logprobs: Floats
    top_values: Floats
    top_tokens: Integers
    output: tuple[int, ...]
    device: int
    host: int


class Scorer:
    """Scores suffixes on one server, one request at a time: shapes decide the last bits.

    page_size: the server's; of a prefix, whole pages are cached.
    """

    def __init__(self, url: str, timeout: float = 600, page_size: int = 1) -> None:
        self._url = url
        self._timeout = timeout
        self._page_size = page_size

    def cached_of(self, prefix: int) -> int:
        """How much of a prefix of ``prefix`` tokens a tier can hold."""
        return prefix // self._page_size * self._page_size

    def score(
        self,
        tokens: Sequence[int] | Sequence[Sequence[int]],
        prefix: int,
        top: int,
        generate: int | Sequence[int] = 1,
    ) -> list[Scored]:
        """Score what follows the first ``prefix`` tokens, with the ``top`` best at each position.

        A list of lists is answered as one batch, each with its own ``generate``. Raises HttpError.
        """
        counts = [generate] if isinstance(generate, int) else generate
        asked = [_greedily(count) for count in counts]
        response = direct_http.post(
            f"{self._url}/generate",
            {
                "input_ids": tokens,
                "sampling_params": asked[0] if isinstance(generate, int) else asked,
                "return_logprob": True,
                "logprob_start_len": prefix,
                "top_logprobs_num": top,
                "return_flat_raw_top_logprobs": True,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            },
            timeout=self._timeout,
        )
        answer = response.json()
        return [_scored(one) for one in (answer if isinstance(answer, list) else [answer])]

    def solve(self, tokens: Sequence[int], longest: int, stops: Sequence[str]) -> tuple[str, int]:
        """What the model writes after ``tokens``, and how many of them came from L2.

        Greedily, until one of ``stops`` or ``longest`` tokens. Raises HttpError.
        """
        answer = direct_http.post(
            f"{self._url}/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": longest,
                    "stop": list(stops),
                },
            },
            timeout=self._timeout,
        ).json()
        cached = answer["meta_info"]["cached_tokens_details"] or {}
        return answer["text"], int(cached.get("host", 0))

    def fill(self, tokens: Sequence[int]) -> None:
        """Have a prefix computed and stored."""
        direct_http.post(
            f"{self._url}/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": _greedily(1),
            },
            timeout=self._timeout,
        )

    def flush(self) -> None:
        """Empty both tiers. Raises HttpError."""
        direct_http.post(f"{self._url}/flush_cache", timeout=self._timeout)


def _greedily(tokens: int) -> dict[str, Any]:
    """SGLang's sampling parameters for the ``tokens`` most probable tokens."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def _scored(answer: dict[str, Any]) -> Scored:
    meta = answer["meta_info"]
    shape = meta["input_top_logprobs_shape"]

    def array(key: str, dtype: str) -> NDArray[Any]:
        return np.frombuffer(base64.b64decode(meta[key]), dtype).reshape(shape)

    cached = meta["cached_tokens_details"] or {}
    return Scored(
        # The first entry is the suffix's first token, which nothing in the suffix predicts.
        np.array([entry[0] for entry in meta["input_token_logprobs"][1:]], dtype=np.float32),
        array("input_top_logprobs_val_flat_b64", "<f4"),
        array("input_top_logprobs_idx_flat_b64", "<i4"),
        tuple(entry[1] for entry in meta["output_token_logprobs"]),
        int(cached.get("device", 0)),
        int(cached.get("host", 0)),
    )
