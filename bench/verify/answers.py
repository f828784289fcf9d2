"""One answer, as log-probabilities of fixed token ids, and how far two of them lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lab.servers import Server
from hiqcache import direct_http

NEW_TOKENS = 4


class Reply(NamedTuple):
    """One answer: log-probabilities [NEW_TOKENS, watched ids], and where its prompt was."""

    values: NDArray[np.float64]
    device: int
    host: int


def ask(
    server: Server, ids: Sequence[int], watched: Sequence[int], tokens: int = NEW_TOKENS
) -> Reply:
    """Generate greedily from the prompt ``ids``. Raises HttpError."""
    answer = direct_http.post(
        f"{server.url}/generate",
        {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": list(watched),
        },
        timeout=300,
    )
    meta = answer.json()["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    rows = [[entry[0] for entry in step] for step in meta["output_token_ids_logprobs"]]
    return Reply(
        np.array(rows, dtype=np.float64),
        int(details.get("device") or 0),
        int(details.get("host") or 0),
    )


def distance(one: Reply, other: Reply) -> float:
    """Largest change of a watched log-probability at the first generated position.

    Later positions follow from the token that was chosen there, so a near-tie would count as a
    large change; the first depends on the prompt's rows alone.
    """
    return float(np.abs(one.values[0] - other.values[0]).max())


def strays(order: Sequence[int], replies: Sequence[Reply], references: Sequence[Reply]) -> int:
    """How many ``replies`` are nearer to another reference than to theirs, ``order``'s."""
    values = np.stack([reference.values[0] for reference in references])
    nearest = [int(np.abs(values - reply.values[0]).max(axis=1).argmin()) for reply in replies]
    return sum(found != own for found, own in zip(nearest, order, strict=True))


def closest(rows: Sequence[NDArray[np.float64]]) -> float:
    """The smallest distance between any two of ``rows`` (largest element difference)."""
    values = np.stack(rows)
    least = np.inf
    for index in range(len(values) - 1):
        least = min(least, float(np.abs(values[index + 1 :] - values[index]).max(axis=1).min()))
    return least
