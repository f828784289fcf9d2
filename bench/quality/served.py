"""How the quality harness serves, and the proof of what its servers restored."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping

import torch

from bench.lab.server_metrics import RESTORED_BYTES, RESTORED_TOKENS, scrape
from bench.lab.servers import CPU_ARGS, CPU_ENV, GPU_ARGS, Server
from bench.quality.arm_run import InvalidRunError

#: A server counts a restore when it next looks at finished transfers.
COUNTED_WITHIN_S = 10.0


def serves_on_gpu() -> bool:
    """Whether there is a GPU, and SGLang's kernels for it: ``make env`` installs none."""
    return torch.cuda.is_available() and importlib.util.find_spec("sgl_kernel") is not None


def server_args(l1_tokens: int, gigabytes: int) -> tuple[str, ...]:
    """SGLang's arguments for an L1 of so many tokens and an L2 of so many decimal gigabytes."""
    return (
        *(GPU_ARGS if serves_on_gpu() else CPU_ARGS),
        *("--max-total-tokens", str(l1_tokens)),
        *("--hicache-size", str(gigabytes), "--skip-server-warmup"),
    )


def server_env() -> Mapping[str, str]:
    """Variables that every arm's server has."""
    return {} if serves_on_gpu() else CPU_ENV


def check_bytes(expected: int, arm: str, server: Server, reported: int) -> dict[str, float]:
    """What the server restored, in tokens and bytes; its codec's record proves which codec ran.

    ``expected``: bytes per token. ``reported``: tokens that the answers say came from L2. Raises
    InvalidRunError where the server's counters disagree.
    """
    deadline = time.monotonic() + COUNTED_WITHIN_S
    while True:
        # One look at both: they are counted together.
        metrics = scrape(server)
        tokens, moved = metrics[RESTORED_TOKENS], metrics[RESTORED_BYTES]
        if (tokens >= reported and moved == tokens * expected) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if tokens < reported or moved != tokens * expected:
        raise InvalidRunError(
            f"INVALID RUN: {arm} restored {tokens:.0f} tokens in {moved:.0f} bytes, where its "
            f"requests reported {reported} tokens and its layout takes {expected} bytes per token."
        )
    return {"tokens": tokens, "bytes": moved, "bytes_per_token": moved / tokens}
