"""Load: what the load generator sent, and what came back, measured at the token."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.frame import RANKS, Row, choice, frame, in_rows, row
from monitoring.dashboards.panels import BAD, GOOD, PLAIN, Steps, lines, number

_SENT = 'arm=~"$arm", workload=~"$workload"'
_NEUTRAL: Steps = [(None, PLAIN)]


def _per_second(metric: str, more: str = "", by: str = "arm") -> str:
    return f"sum by ({by}) (rate({metric}{{{_SENT}{more}}}[1m]))"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, {_per_second(metric + '_bucket', by='arm, le')})"


def build() -> Dashboard:
    """The dashboard."""
    board = frame(
        "hiqcache-load",
        "HiQCache: Load",
        "What Locust sends and what comes back. Latencies are taken at the token; failed "
        "requests are counted, and enter no latency.",
    ).with_variable(choice("workload", "Workload", "hiqcache_load_running", "workload"))
    return in_rows(board, _numbers(), _traffic(), *_latencies()).build()


def _numbers() -> Row:
    total = f"sum by (arm) (increase(hiqcache_load_requests_total{{{_SENT}}}[5m]))"
    failed = f'increase(hiqcache_load_requests_total{{{_SENT}, outcome!="ok"}}[5m])'
    return row(
        4,
        number(
            "Load",
            "Whether a load runs right now.",
            [("max(hiqcache_load_running) or vector(0)", "")],
            "none",
            [(None, PLAIN), (1, GOOD)],
            states={"1": ("running", GOOD), "0": ("idle", PLAIN)},
        ),
        number(
            "Users",
            "Simulated users, each with at most one request in flight.",
            [("sum(hiqcache_load_users) or vector(0)", "")],
            "none",
            _NEUTRAL,
            graph=True,
        ),
        number(
            "Requests in 5 minutes",
            "Requests that ended within 5 minutes, whatever their outcome.",
            [(total, "{{arm}}")],
            "none",
            _NEUTRAL,
            decimals=0,
            no_value="none yet",
        ),
        number(
            "Failed",
            "Share of requests that ended in an error, a time-out or a broken stream, within 5 "
            "minutes.",
            [(f"sum by (arm) ({failed}) / ({total})", "{{arm}}")],
            "percentunit",
            [(None, GOOD), (0.01, BAD)],
            decimals=1,
            no_value="none yet",
        ),
    )


def _traffic() -> Row:
    return row(
        8,
        lines(
            "Requests",
            "Requests that ended well, per second, over a minute.",
            [(_per_second("hiqcache_load_requests_total", ', outcome="ok"'), "{{arm}}")],
            "reqps",
            no_value="no load yet",
        ),
        lines(
            "Failures",
            "Requests that ended badly, per second, by what went wrong.",
            [
                (
                    _per_second("hiqcache_load_requests_total", ', outcome!="ok"', "arm, outcome"),
                    "{{arm}} {{outcome}}",
                )
            ],
            "reqps",
            at_least=0.1,
            no_value="no load yet",
        ),
        lines(
            "Tokens",
            "Prompt tokens sent (dashed) and output tokens received, per second.",
            [
                (_per_second("hiqcache_load_output_tokens_total"), "{{arm}} output"),
                (_per_second("hiqcache_load_prompt_tokens_total"), "{{arm}} prompt"),
            ],
            "suffix:tok/s",
            no_value="no load yet",
            dashed="/ prompt$/",
        ),
    )


def _latencies() -> list[Row]:
    def latency(title: str, text: str, metric: str) -> timeseries.Panel:
        return lines(
            title,
            f"{text} Median (solid) and 99th percentile (dashed), over a minute.",
            [
                (_quantile(0.5, metric), "{{arm}} p50"),
                (_quantile(0.99, metric), "{{arm}} p99"),
            ],
            "s",
            no_value="no load yet",
            dashed="/ p99$/",
        )

    return [
        row(
            8,
            latency(
                "Time to first token (TTFT)",
                "From sending a request to its first token.",
                "hiqcache_load_ttft_seconds",
            ),
            latency(
                "Time per output token (TPOT)",
                "Mean time per token after the first, one value per request.",
                "hiqcache_load_tpot_seconds",
            ),
        ),
        row(
            8,
            latency(
                "Inter-token latency (ITL)",
                "Gaps between consecutive tokens.",
                "hiqcache_load_itl_seconds",
            ),
            latency(
                "End to end",
                "From sending a request to the end of its answer.",
                "hiqcache_load_e2e_seconds",
            ),
            lines(
                "In the servers",
                "Requests that run and that wait (dashed) in each server.",
                [
                    (f"max by (arm) (sglang:num_running_reqs{{{RANKS}}})", "{{arm}} running"),
                    (f"max by (arm) (sglang:num_queue_reqs{{{RANKS}}})", "{{arm}} waiting"),
                ],
                "none",
                dashed="/ waiting$/",
            ),
        ),
    ]
