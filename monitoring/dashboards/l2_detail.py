"""L2 detail: what a host pool holds, moves, evicts, and loses."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.frame import ARM, MODEL, RANK, choice, frame
from monitoring.dashboards.panels import BAD, FAIR, GOOD, PLAIN, Steps, heat, lines, number

_ARMS = 'arm=~"$arm", model_name=~"$model"'
_RANKS = f'{_ARMS}, tp_rank=~"$rank"'
_POOL = "{{arm}} {{pool}}"
_NEUTRAL: Steps = [(None, PLAIN)]


def _most(metric: str, by: str = "arm, pool") -> str:
    """One value a pool: ranks hold shares of the same tokens, so the largest stands for all."""
    return f"max by ({by}) ({metric}{{{_RANKS}}})"


def _error(share: float) -> str:
    # Since the start, not over a window: samples are rare.
    buckets = f"hiqcache_codec_relative_error_bucket{{{_RANKS}}}"
    return f"histogram_quantile({share}, sum by (arm, le) ({buckets}))"


def build() -> Dashboard:
    """The dashboard."""
    board = (
        frame(
            "hiqcache-l2",
            "HiQCache: L2 detail",
            "The host tier (L2): occupancy, evictions, transfers and their speed, codec error, "
            "staging and host memory, by arm and rank; and what restored prefixes cost in quality.",
        )
        .with_variable(choice(*ARM))
        .with_variable(choice(*MODEL))
        .with_variable(choice(*RANK))
    )
    return _canary(_moved(_held(_numbers(board)))).build()


def _numbers(board: builders.Dashboard) -> builders.Dashboard:
    return (
        board.with_panel(
            number(
                "Capacity",
                "Tokens that each host pool holds when full.",
                (0, 0, 4, 4),
                [(_most("hiqcache_l2_capacity_tokens"), _POOL)],
                "short",
                _NEUTRAL,
            )
        )
        .with_panel(
            number(
                "Host memory",
                "Bytes that each arm's host pools take, over the chosen ranks.",
                (4, 0, 4, 4),
                [(f"sum by (arm) (hiqcache_l2_capacity_bytes{{{_RANKS}}})", "{{arm}}")],
                "decbytes",
                _NEUTRAL,
            )
        )
        .with_panel(
            number(
                "Bytes a token",
                "Host memory that a token takes over the chosen ranks: codes, scales, rounding.",
                (8, 0, 4, 4),
                [
                    (
                        f"sum by (arm, pool) (hiqcache_l2_bytes_per_token{{{_RANKS}}})",
                        _POOL,
                    )
                ],
                "suffix:B",
                _NEUTRAL,
            )
        )
        .with_panel(
            number(
                "Full",
                "Share of the host pool in use. Full is its normal state: it keeps what it can. "
                "Full and evicting much is what hurts.",
                (12, 0, 4, 4),
                [
                    (
                        f"{_most('hiqcache_l2_used_tokens')} / "
                        f"{_most('hiqcache_l2_capacity_tokens')}",
                        _POOL,
                    )
                ],
                "percentunit",
                [(None, GOOD), (0.9, FAIR)],
                decimals=0,
            )
        )
        .with_panel(
            number(
                "Damaged rows",
                "Sampled rows that restored further from the GPU's than the codec can cause. "
                "Anything but 0 means damaged rows: see the alert's text.",
                (16, 0, 4, 4),
                [(f"sum by (arm) (hiqcache_codec_excess_rows_total{{{_RANKS}}})", "{{arm}}")],
                "none",
                [(None, GOOD), (1, BAD)],
            )
        )
        .with_panel(
            number(
                "Transfer",
                "How rows move, and which codec: stock is SGLang's own transfer, copy its stand-in "
                "on CPUs, the others are HiQCache's.",
                (20, 0, 4, 4),
                [
                    (
                        f"max by (arm, codec, transfer) (hiqcache_build_info{{{_RANKS}}})",
                        "{{arm}}: {{codec}} by {{transfer}}",
                    )
                ],
                "none",
                _NEUTRAL,
                names_only=True,
            )
        )
    )


def _held(board: builders.Dashboard) -> builders.Dashboard:
    return (
        board.with_panel(
            lines(
                "Occupancy",
                "Tokens in each host pool (solid) and its capacity (dashed).",
                (0, 4, 8, 8),
                [
                    (_most("hiqcache_l2_used_tokens"), f"{_POOL} used"),
                    (_most("hiqcache_l2_capacity_tokens"), f"{_POOL} capacity"),
                ],
                "short",
                dashed="/ capacity$/",
            )
        )
        .with_panel(
            lines(
                "Evicted",
                "Tokens evicted a second to make room, over a minute.",
                (8, 4, 8, 8),
                [
                    (
                        "max by (arm, pool) "
                        f"(rate(hiqcache_l2_evicted_tokens_total{{{_RANKS}}}[1m]))",
                        _POOL,
                    )
                ],
                "suffix:tok/s",
                at_least=1,
            )
        )
        .with_panel(
            lines(
                "Working-set pressure",
                "Share of L2 that was evicted within 10 minutes. Above 1 (the line) the whole tier "
                "turned over within them.",
                (16, 4, 8, 8),
                [
                    (
                        "max by (arm, pool) "
                        f"(arm_model_pool:working_set_pressure:increase10m{{{_ARMS}}})",
                        _POOL,
                    )
                ],
                "suffix:×",
                limit=1,
                at_least=1.1,
            )
        )
    )


def _moved(board: builders.Dashboard) -> builders.Dashboard:
    def rate(metric: str) -> str:
        return f"max by (arm) (rate({metric}{{{_RANKS}}}[1m]))"

    def speed(way: str) -> str:
        moved = f"sum by (arm) (rate(hiqcache_{way}_bytes_total{{{_RANKS}}}[2m]))"
        busy = f"sum by (arm) (rate(hiqcache_{way}_seconds_sum{{{_RANKS}}}[2m]))"
        return f"{moved} / {busy}"

    def buckets(way: str) -> str:
        return f"sum by (le) (increase(hiqcache_{way}_seconds_bucket{{{_RANKS}}}[1m]))"

    return (
        board.with_panel(
            lines(
                "Tokens moved",
                "Tokens a second to host memory (backup) and from it (restore, dashed), over a "
                "minute.",
                (0, 12, 8, 8),
                [
                    (rate("hiqcache_backup_tokens_total"), "{{arm}} backup"),
                    (rate("hiqcache_restore_tokens_total"), "{{arm}} restore"),
                ],
                "suffix:tok/s",
                dashed="/ restore$/",
            )
        )
        .with_panel(
            lines(
                "Bandwidth while copying",
                "Stored bytes a second of copying time, over 2 minutes. A PCIe 5 x16 link carries "
                "about 55 GB/s each way.",
                (8, 12, 8, 8),
                [
                    (speed("backup"), "{{arm}} backup"),
                    (speed("restore"), "{{arm}} restore"),
                ],
                "Bps",
                no_value="no transfer yet",
                dashed="/ restore$/",
            )
        )
        .with_panel(
            lines(
                "Codec error",
                "Norm of a stored row's error over the row's own norm, sampled from host memory: "
                "median and 99th percentile since the server started. 0 is an exact copy; INT8 "
                "stays below 7 % (the line) in the worst case.",
                (16, 12, 8, 8),
                [(_error(0.5), "{{arm}} p50"), (_error(0.99), "{{arm}} p99")],
                "percentunit",
                limit=0.07,
                at_least=0.02,
                no_value="no sample yet",
                dashed="/ p99$/",
            )
        )
        .with_panel(
            heat(
                "Restore latency",
                "Restores a minute by how long they took, of the chosen arms together. Two bands "
                "are short and long prefixes; a band that climbs is a link that fills up.",
                (0, 20, 12, 9),
                buckets("restore"),
                "s",
                no_value="no restore yet",
            )
        )
        .with_panel(
            heat(
                "Backup latency",
                "Backups a minute by how long they took, of the chosen arms together.",
                (12, 20, 12, 9),
                buckets("backup"),
                "s",
                no_value="no backup yet",
            )
        )
        .with_panel(
            lines(
                "Staging",
                "GPU memory that transfers hold for staging, over the chosen ranks. The transfers "
                "fused and torch need none.",
                (0, 29, 12, 7),
                [(f"sum by (arm) (hiqcache_staging_bytes{{{_RANKS}}})", "{{arm}}")],
                "bytes",
                at_least=2**20,
            )
        )
        .with_panel(
            lines(
                "Host memory left",
                "Bytes that the server may still take before its cgroup's or the machine's limit; "
                "below 1 GB (the line) the kernel may soon kill it.",
                (12, 29, 12, 7),
                [
                    (
                        f"min by (arm) (hiqcache_host_memory_available_bytes{{{_RANKS}}})",
                        "{{arm}}",
                    )
                ],
                "decbytes",
                steps=[(None, BAD), (1e9, GOOD)],
            )
        )
    )


def _canary(board: builders.Dashboard) -> builders.Dashboard:
    return (
        board.with_panel(
            lines(
                "Canary: KL per token",
                "How far answers on restored prefixes diverge from the same answers on the prefix "
                "as computed, over an hour: mean and 99th percentile per scored token, and the "
                "operator's objective (dashed). A copy shows 0.",
                (0, 36, 8, 8),
                [
                    (f"arm_model:canary_kl_nats:mean1h{{{_ARMS}}}", "{{arm}} mean"),
                    (f"arm_model:canary_kl_nats:p99_1h{{{_ARMS}}}", "{{arm}} p99"),
                    (f"max by (arm) (hiqcache_canary_slo_kl_nats{{{_ARMS}}})", "{{arm}} objective"),
                ],
                "suffix:nats",
                at_least=0.001,
                no_value="no comparison yet",
                dashed="/ objective$/",
            )
        )
        .with_panel(
            lines(
                "Canary: top token unchanged",
                "Share of scored tokens whose most probable token restoring left as it was, over "
                "the last 100 restored prompts.",
                (8, 36, 8, 8),
                [(f"hiqcache_canary_top1_agreement{{{_ARMS}}}", "{{arm}}")],
                "percentunit",
                top=1,
                no_value="no comparison yet",
            )
        )
        .with_panel(
            lines(
                "Canary: askings",
                "Prompts asked again after they had left L1, over an hour: restored from L2 and "
                "compared, or not (dashed) and why. lost: L2 had evicted them. unsteady: other "
                "requests shared their batches.",
                (16, 36, 8, 8),
                [
                    (
                        f"sum by (arm) (increase(hiqcache_canary_restored_total{{{_ARMS}}}[1h]))",
                        "{{arm}} restored",
                    ),
                    (
                        "sum by (arm, reason) "
                        f"(increase(hiqcache_canary_not_restored_total{{{_ARMS}}}[1h])) > 0",
                        "{{arm}} not: {{reason}}",
                    ),
                ],
                "short",
                at_least=1,
                no_value="no canary yet",
                dashed="/ not: /",
            )
        )
    )
