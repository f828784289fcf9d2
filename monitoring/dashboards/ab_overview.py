"""A/B overview: does the quantised host tier help? Both arms on one screen, one time axis."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.frame import ARMS, RANKS, Row, frame, in_rows, row
from monitoring.dashboards.panels import BAD, FAIR, GOOD, Steps, lines, number

_MORE_IS_GOOD: Steps = [(None, BAD), (0.98, FAIR), (1.05, GOOD)]
_LESS_IS_GOOD: Steps = [(None, GOOD), (1.0, FAIR), (1.5, BAD)]
_TIMES = "suffix:×"


def _rate(metric: str, arm: str) -> str:
    return f'sum(rate({metric}{{arm="{arm}", model_name=~"$model"}}[5m]))'


def _mean(metric: str, arm: str) -> str:
    return f"{_rate(metric + '_sum', arm)} / {_rate(metric + '_count', arm)}"


def build() -> Dashboard:
    """The dashboard."""
    board = frame(
        "hiqcache-ab",
        "HiQCache: A/B overview",
        "BF16 and INT8 host tiers side by side: capacity, hits, latency, throughput. The big "
        "numbers are INT8 against BF16 over the last 5 minutes.",
    )
    return in_rows(board, _gains(), *_graphs()).build()


def _gains() -> Row:
    ttft = "sglang:time_to_first_token_seconds"
    tokens = "sglang:generation_tokens_total"
    return row(
        4,
        number(
            "Capacity gain",
            "Tokens that INT8's L2 holds over those that BF16's holds. Near 2 with the same "
            "bytes; 1 where both were given the same tokens.",
            [("hiqcache_capacity_ratio", "")],
            _TIMES,
            _MORE_IS_GOOD,
            decimals=2,
        ),
        number(
            "Hit ratio gain",
            "INT8's share of prompt tokens served from the cache less BF16's, in points of "
            "100, over 10 minutes. 0 without load.",
            [
                (
                    '100 * sum(model:hit_ratio_gain:rate10m{model_name=~"$model"}) or vector(0)',
                    "",
                )
            ],
            "suffix:points",
            [(None, BAD), (-1, FAIR), (1, GOOD)],
            decimals=1,
        ),
        number(
            "TTFT gain",
            "BF16's mean time to first token over INT8's: 2 means that INT8 answers twice as fast.",
            [(f"({_mean(ttft, 'bf16')}) / ({_mean(ttft, 'int8')})", "")],
            "suffix:× faster",
            _MORE_IS_GOOD,
            decimals=2,
            no_value="no load yet",
        ),
        number(
            "Throughput gain",
            "Output tokens per second of INT8 over BF16's. Near 1 where the load sends both "
            "arms the same requests at a fixed rate.",
            [(f"{_rate(tokens, 'int8')} / {_rate(tokens, 'bf16')}", "")],
            _TIMES,
            _MORE_IS_GOOD,
            decimals=2,
            no_value="no load yet",
        ),
        number(
            "Restore time per token",
            "INT8's seconds per restored token over BF16's: below 1, INT8 restores faster. A "
            "GPU reads half the bytes; a CPU computes the decoding.",
            [("hiqcache_restore_time_ratio", "")],
            _TIMES,
            _LESS_IS_GOOD,
            decimals=2,
            no_value="none in both arms",
        ),
        number(
            "Arms",
            "Whether Prometheus reaches each server.",
            [('up{job="sglang"}', "{{arm}}")],
            "none",
            [(None, BAD), (1, GOOD)],
            states={"1": ("up", GOOD), "0": ("down", BAD)},
        ),
    )


def _graphs() -> list[Row]:
    return [
        row(
            8,
            lines(
                "Hit ratio by tier",
                "Share of prompt tokens found on the GPU (L1), in host memory (L2) and in storage "
                "(L3, if there is one), over 2 minutes. L1 is the same size in both arms; L2 is "
                "where they differ.",
                [(f"arm_model_tier:hit_ratio:rate2m{{{ARMS}}}", "{{arm}} {{tier}}")],
                "percentunit",
                top=1,
                dashed="/ L1$/",
            ),
            lines(
                "Time to first token",
                "Mean (solid) and 95th percentile (dashed) over 2 minutes, as servers see it.",
                [
                    (f"arm_model:ttft_seconds:mean2m{{{ARMS}}}", "{{arm}} mean"),
                    (f"arm_model:ttft_seconds:p95_2m{{{ARMS}}}", "{{arm}} p95"),
                ],
                "s",
                no_value="no request yet",
                dashed="/ p95$/",
            ),
        ),
        row(
            8,
            lines(
                "L2 tokens",
                "Tokens in host memory (solid) and its capacity (dashed). An arm at its capacity "
                "evicts for every token that comes.",
                [
                    (
                        f"sum by (arm) (arm_model_pool:l2_used_tokens:sum{{{ARMS}}})",
                        "{{arm}} used",
                    ),
                    (
                        f"sum by (arm) (arm_model_pool:l2_capacity_tokens:sum{{{ARMS}}})",
                        "{{arm}} capacity",
                    ),
                ],
                "short",
                dashed="/ capacity$/",
            ),
            lines(
                "Output throughput",
                "Output tokens per second over 2 minutes.",
                [(f"arm_model:output_tokens:rate2m{{{ARMS}}}", "{{arm}}")],
                "suffix:tok/s",
            ),
            lines(
                "Restore latency",
                "Time from the first to the last layer of a restore, median (solid) and 99th "
                "percentile (dashed) over 2 minutes.",
                [
                    (f"arm_model:restore_seconds:p50_2m{{{ARMS}}}", "{{arm}} p50"),
                    (f"arm_model:restore_seconds:p99_2m{{{ARMS}}}", "{{arm}} p99"),
                ],
                "s",
                no_value="no restore yet",
                dashed="/ p99$/",
            ),
        ),
        row(
            7,
            lines(
                "Evicted from L2",
                "Tokens evicted from host memory per second, over 2 minutes: what will have to be "
                "computed again if it is asked for again.",
                [
                    (
                        f"sum by (arm) (arm_model_pool:l2_evicted_tokens:rate2m{{{ARMS}}})",
                        "{{arm}}",
                    )
                ],
                "suffix:tok/s",
                at_least=1,
            ),
            lines(
                "Working-set pressure",
                "Share of L2 that was evicted within 10 minutes. Above 1 (the line) the whole tier "
                "turned over: what is asked for again within 10 minutes does not fit.",
                [
                    (
                        f"max by (arm) (arm_model_pool:working_set_pressure:increase10m{{{ARMS}}})",
                        "{{arm}}",
                    )
                ],
                _TIMES,
                limit=1,
                at_least=1.1,
            ),
            lines(
                "Restored tokens",
                "Tokens read back from host memory per second, on the chosen ranks (the largest): "
                "prefill that was saved.",
                [
                    (
                        f"max by (arm) (rate(hiqcache_restore_tokens_total{{{RANKS}}}[2m]))",
                        "{{arm}}",
                    )
                ],
                "suffix:tok/s",
            ),
        ),
    ]
