"""How many ranks SGLang starts on a host, by its own reading of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.entrypoints.engine import _calculate_rank_ranges
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import prepare_server_args


def ranks_of_a_host(arguments: Sequence[str]) -> int:
    """Schedulers on the first node of ``arguments``. Call by tests.sglang.assembled.apart.

    SGLang starts as many for each replica; groups of DP attention are among them
    (DataParallelController, launch_dp_schedulers and launch_dp_attention_schedulers).
    """
    publish(prepare_server_args(list(arguments)), role="tokenizer")
    stages, ranks, *_ = _calculate_rank_ranges(0)
    parallel = get_parallel()
    replicas = 1 if parallel.attn_dp_enabled else parallel.num_dp_ranks
    return len(stages) * len(ranks) * replicas
