"""L2 detail: what a host pool holds, moves, evicts, and loses."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.frame import ARMS, RANKS, Row, frame, in_rows, row
from monitoring.dashboards.panels import BAD, FAIR, GOOD, PLAIN, Steps, heat, lines, number

_POOL = "{{arm}} {{pool}}"
_NEUTRAL: Steps = [(None, PLAIN)]


def _most(metric: str, by: str = "arm, pool") -> str:
    """One value a pool: ranks hold shares of the same tokens, so the largest stands for all."""
    return f"max by ({by}) ({metric}{{{RANKS}}})"


def _error(share: float) -> str:
    # Since the start, not over a window: samples are rare.
    buckets = f"hiqcache_codec_relative_error_bucket{{{RANKS}}}"
    return f"histogram_quantile({share}, sum by (arm, le) ({buckets}))"


def build() -> Dashboard:
    """The dashboard."""
    board = frame(
        "hiqcache-l2",
        "HiQCache: L2 detail",
        "The host tier (L2): occupancy, evictions, transfers and their speed, codec error, "
        "staging and host memory, pages in storage (L3), by arm and rank; and what restored "
        "prefixes cost in quality.",
    )
    return in_rows(board, _numbers(), _held(), *_moved(), _stored(), _canary()).build()


def _numbers() -> Row:
    return row(
        4,
        number(
            "Capacity",
            "Tokens that each host pool holds when full.",
            [(_most("hiqcache_l2_capacity_tokens"), _POOL)],
            "short",
            _NEUTRAL,
        ),
        number(
            "Host memory",
            "Bytes that each arm's host pools take, over the chosen ranks.",
            [(f"sum by (arm) (hiqcache_l2_capacity_bytes{{{RANKS}}})", "{{arm}}")],
            "decbytes",
            _NEUTRAL,
        ),
        number(
            "Bytes per token",
            "Host memory that one token takes over the chosen ranks: codes, scales, rounding.",
            [
                (
                    f"sum by (arm, pool) (hiqcache_l2_bytes_per_token{{{RANKS}}})",
                    _POOL,
                )
            ],
            "suffix:B",
            _NEUTRAL,
        ),
        number(
            "Full",
            "Share of the host pool in use. Full is its normal state: it keeps what it can. "
            "Full and evicting much is what hurts.",
            [
                (
                    f"{_most('hiqcache_l2_used_tokens')} / {_most('hiqcache_l2_capacity_tokens')}",
                    _POOL,
                )
            ],
            "percentunit",
            [(None, GOOD), (0.9, FAIR)],
            decimals=0,
        ),
        number(
            "Damaged rows",
            "Sampled rows that restored further from the GPU's than the codec can cause. "
            "Anything but 0 means damaged rows: see the alert's text.",
            [(f"sum by (arm) (hiqcache_codec_excess_rows_total{{{RANKS}}})", "{{arm}}")],
            "none",
            [(None, GOOD), (1, BAD)],
        ),
        number(
            "Transfer",
            "How rows move, and which codec: stock is SGLang's own transfer, copy its stand-in "
            "on CPUs, the others are HiQCache's.",
            [
                (
                    f"max by (arm, codec, transfer) (hiqcache_build_info{{{RANKS}}})",
                    "{{arm}}: {{codec}} by {{transfer}}",
                )
            ],
            "none",
            _NEUTRAL,
            names_only=True,
        ),
    )


def _held() -> Row:
    return row(
        8,
        lines(
            "Occupancy",
            "Tokens in each host pool (solid) and its capacity (dashed).",
            [
                (_most("hiqcache_l2_used_tokens"), f"{_POOL} used"),
                (_most("hiqcache_l2_capacity_tokens"), f"{_POOL} capacity"),
            ],
            "short",
            dashed="/ capacity$/",
        ),
        lines(
            "Evicted",
            "Tokens evicted per second to make room, over a minute.",
            [
                (
                    f"max by (arm, pool) (rate(hiqcache_l2_evicted_tokens_total{{{RANKS}}}[1m]))",
                    _POOL,
                )
            ],
            "suffix:tok/s",
            at_least=1,
        ),
        lines(
            "Working-set pressure",
            "Share of L2 that was evicted within 10 minutes. Above 1 (the line) the whole tier "
            "turned over within them.",
            [
                (
                    "max by (arm, pool) "
                    f"(arm_model_pool:working_set_pressure:increase10m{{{ARMS}}})",
                    _POOL,
                )
            ],
            "suffix:×",
            limit=1,
            at_least=1.1,
        ),
    )


def _moved() -> list[Row]:
    def rate(metric: str) -> str:
        return f"max by (arm) (rate({metric}{{{RANKS}}}[1m]))"

    def speed(way: str) -> str:
        moved = f"sum by (arm) (rate(hiqcache_{way}_bytes_total{{{RANKS}}}[2m]))"
        busy = f"sum by (arm) (rate(hiqcache_{way}_seconds_sum{{{RANKS}}}[2m]))"
        return f"{moved} / {busy}"

    def buckets(way: str) -> str:
        return f"sum by (le) (increase(hiqcache_{way}_seconds_bucket{{{RANKS}}}[1m]))"

    return [
        row(
            8,
            lines(
                "Tokens moved",
                "Tokens per second to host memory (backup) and from it (restore, dashed), over a "
                "minute.",
                [
                    (rate("hiqcache_backup_tokens_total"), "{{arm}} backup"),
                    (rate("hiqcache_restore_tokens_total"), "{{arm}} restore"),
                ],
                "suffix:tok/s",
                dashed="/ restore$/",
            ),
            lines(
                "Bandwidth while copying",
                "Stored bytes per second of copying time, over 2 minutes. A PCIe 5 x16 link "
                "carries about 55 GB/s each way.",
                [
                    (speed("backup"), "{{arm}} backup"),
                    (speed("restore"), "{{arm}} restore"),
                ],
                "Bps",
                no_value="no transfer yet",
                dashed="/ restore$/",
            ),
            lines(
                "Codec error",
                "Norm of a stored row's error over the row's own norm, sampled from host memory: "
                "median and 99th percentile since the server started. 0 is an exact copy; INT8 "
                "stays below 7 % (the line) in the worst case.",
                [(_error(0.5), "{{arm}} p50"), (_error(0.99), "{{arm}} p99")],
                "percentunit",
                limit=0.07,
                at_least=0.02,
                no_value="no sample yet",
                dashed="/ p99$/",
            ),
        ),
        row(
            9,
            heat(
                "Restore latency",
                "Restores per minute by how long they took, of the chosen arms together. Two bands "
                "are short and long prefixes; a band that climbs is a link that fills up.",
                buckets("restore"),
                "s",
                no_value="no restore yet",
            ),
            heat(
                "Backup latency",
                "Backups per minute by how long they took, of the chosen arms together.",
                buckets("backup"),
                "s",
                no_value="no backup yet",
            ),
        ),
        row(
            7,
            lines(
                "Staging",
                "GPU memory that transfers hold for staging, over the chosen ranks. The transfers "
                "fused and torch need none.",
                [(f"sum by (arm) (hiqcache_staging_bytes{{{RANKS}}})", "{{arm}}")],
                "bytes",
                at_least=2**20,
            ),
            lines(
                "Host memory left",
                "Bytes that the server may still take before its cgroup's or the machine's limit; "
                "below 1 GB (the line) the kernel may soon kill it.",
                [
                    (
                        f"min by (arm) (hiqcache_host_memory_available_bytes{{{RANKS}}})",
                        "{{arm}}",
                    )
                ],
                "decbytes",
                steps=[(None, BAD), (1e9, GOOD)],
            ),
        ),
    ]


def _stored() -> Row:
    none = "no storage (--hicache-storage-backend)"

    def rate(metric: str) -> str:
        return f"sum by (arm) (rate({metric}{{{RANKS}}}[1m]))"

    return row(
        7,
        lines(
            "Storage (L3)",
            "Bytes per second that storage takes from the host pool, and gives back (dashed), over "
            "a minute, as stored: codes, scales and checksums.",
            [
                (rate("hiqcache_l3_written_bytes_total"), "{{arm}} written"),
                (rate("hiqcache_l3_read_bytes_total"), "{{arm}} read"),
            ],
            "Bps",
            at_least=1e6,
            no_value=none,
            dashed="/ read$/",
        ),
        lines(
            "Cached tokens by tier",
            "Prompt tokens per second that were not computed, by the tier that they came from: "
            "device is L1, host L2, storage L3.",
            [
                (
                    "sum by (arm, cache_source) "
                    f"(rate(sglang:cached_tokens_total{{{ARMS}, cache_source!='total'}}[1m]))",
                    "{{arm}} {{cache_source}}",
                )
            ],
            "short",
            at_least=1,
        ),
        lines(
            "Corrupt pages and failed batches",
            "Pages from storage that failed their checksum (each is a miss, none is served), and "
            "batches that storage refused or failed (dashed), over 15 minutes.",
            [
                (
                    f"sum by (arm) (increase(hiqcache_l3_corrupt_pages_total{{{RANKS}}}[15m]))",
                    "{{arm}} corrupt",
                ),
                (
                    f"sum by (arm) (increase(hiqcache_l3_failed_operations_total{{{RANKS}}}[15m]))",
                    "{{arm}} failed",
                ),
            ],
            "short",
            limit=1,
            at_least=1,
            no_value=none,
            dashed="/ failed$/",
        ),
    )


def _canary() -> Row:
    return row(
        8,
        lines(
            "Canary: KL per token",
            "How far answers on restored prefixes diverge from the same answers on the prefix "
            "as computed, over an hour: mean and 99th percentile per scored token, and the "
            "operator's objective (dashed). A copy shows 0.",
            [
                (f"arm_model:canary_kl_nats:mean1h{{{ARMS}}}", "{{arm}} mean"),
                (f"arm_model:canary_kl_nats:p99_1h{{{ARMS}}}", "{{arm}} p99"),
                (f"max by (arm) (hiqcache_canary_slo_kl_nats{{{ARMS}}})", "{{arm}} objective"),
            ],
            "suffix:nats",
            at_least=0.001,
            no_value="no comparison yet",
            dashed="/ objective$/",
        ),
        lines(
            "Canary: top token unchanged",
            "Share of scored tokens whose most probable token restoring left as it was, over "
            "the last 100 restored prompts.",
            [(f"hiqcache_canary_top1_agreement{{{ARMS}}}", "{{arm}}")],
            "percentunit",
            top=1,
            no_value="no comparison yet",
        ),
        lines(
            "Canary: askings",
            "Prompts asked again after they had left L1, over an hour: restored from L2 and "
            "compared, or not (dashed) and why. lost: L2 had evicted them. unsteady: other "
            "requests shared their batches.",
            [
                (
                    f"sum by (arm) (increase(hiqcache_canary_restored_total{{{ARMS}}}[1h]))",
                    "{{arm}} restored",
                ),
                (
                    "sum by (arm, reason) "
                    f"(increase(hiqcache_canary_not_restored_total{{{ARMS}}}[1h])) > 0",
                    "{{arm}} not: {{reason}}",
                ),
            ],
            "short",
            at_least=1,
            no_value="no canary yet",
            dashed="/ not: /",
        ),
    )
