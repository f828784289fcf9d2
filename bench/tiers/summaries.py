"""From the log of runs to the figures of each experiment, with 95 % bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.lab.bootstrap import Interval, Sample, bootstrap, bootstrap_pairs
from bench.lab.server_metrics import FETCHED_TOKENS, WRITTEN_TOKENS
from bench.tiers.runs import Run, turn_of
from loadtest.token_times import tpot

#: Every comparison is against this arm.
CONTROL = "bf16"

#: Where prompt tokens come from: L1, L2 and L3, which runs of before December 2026 do not name.
TIERS = ("device", "host", "storage")

#: Points of the TTFT distribution that are kept for the plot.
QUANTILES = tuple(range(0, 101, 2))


def summarise(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The summary of each experiment that has valid runs, by file name without its suffix.

    Of several runs under one name the last counts; runs marked invalid never do.
    """
    latest = {
        (run["experiment"], run["point"], run["repeat"], run["arm"]): run
        for run in runs
        if not run["invalid"]
    }
    chosen = list(latest.values())
    result: dict[str, dict[str, Any]] = {}
    for experiment, name, build in (
        ("same-tokens", "same_tokens", _same_tokens),
        ("same-bytes", "same_bytes", _same_bytes),
        ("sweep", "sweep", _sweep),
        ("l3", "l3", _l3),
    ):
        own = [run for run in chosen if run["experiment"] == experiment]
        if any(run["arm"] == CONTROL for run in own):
            invalid = sum(bool(run["invalid"]) for run in runs if run["experiment"] == experiment)
            result[name] = {"setup": own[-1]["setup"], "invalid_runs": invalid, **build(own)}
    return result


def _same_tokens(runs: Sequence[Run]) -> dict[str, Any]:
    stock = next(run for run in runs if run["arm"] == CONTROL)
    return {
        "workload": stock["workload"],
        "rows": [
            {
                "arm": run["arm"],
                "l2_tokens": run["l2_tokens"],
                "bytes_per_token": run["bytes_per_token"],
                "l2_bytes": run["l2_tokens"] * run["bytes_per_token"],
                "share_of_bf16": run["bytes_per_token"] / stock["bytes_per_token"],
                **_hits([run]),
                "restored_tokens": run["metrics"].get("sglang:load_back_tokens_total", 0),
                "restored_bytes": run["metrics"].get("sglang:load_back_bytes_total", 0),
            }
            for run in runs
        ],
    }


def _same_bytes(runs: Sequence[Run]) -> dict[str, Any]:
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    others = [arm for arm in arms if arm != CONTROL]
    return {
        "workload": runs[0]["workload"],
        "arms": {arm: _arm([run for run in runs if run["arm"] == arm]) for arm in arms},
        "pairs": [
            {"arm": arm, "repeat": control["repeat"], **_pair(treatment, control)}
            for arm in others
            for treatment, control in _pairs(runs, arm)
        ],
        "pooled": {arm: _pooled(_pairs(runs, arm)) for arm in others if _pairs(runs, arm)},
    }


def _l3(runs: Sequence[Run]) -> dict[str, Any]:
    summary = _same_bytes(runs)
    for name, arm in summary["arms"].items():
        own = [run for run in runs if run["arm"] == name]
        arm["disk"] = _disk(own)
    return summary


def _disk(runs: Sequence[Run]) -> dict[str, float]:
    """What lay on disk after a run, and what SGLang wrote to it and read from it in one: means."""
    disk = runs[0]["disk"]
    page_size, page_bytes = disk["page_size"], disk["page_bytes"]

    def pages(name: str) -> float:
        tokens = float(np.mean([run["metrics"].get(name, 0.0) for run in runs]))
        return tokens / float(page_size)

    return {
        **{name: disk[name] for name in ("cap_bytes", "cap_tokens", "page_bytes")},
        "held_bytes": float(np.mean([run["disk"]["held_bytes"] for run in runs])),
        "held_tokens": float(np.mean([run["disk"]["held_files"] for run in runs])) * page_size,
        "written_bytes": pages(WRITTEN_TOKENS) * page_bytes,
        "fetched_bytes": pages(FETCHED_TOKENS) * page_bytes,
    }


def _sweep(runs: Sequence[Run]) -> dict[str, Any]:
    arms = [arm for arm in dict.fromkeys(run["arm"] for run in runs) if arm != CONTROL]
    rows, fitting = [], {arm: list[tuple[Run, Run]]() for arm in arms}
    for point in dict.fromkeys(run["point"] for run in runs):
        for arm in arms:
            pairs = _pairs([run for run in runs if run["point"] == point], arm)
            if not pairs:
                continue
            control = pairs[0][1]
            workload = control["workload"]
            # What a run leaves in L2: every prefix, and each request's own suffix and output.
            own = workload["suffix"] + workload["output"]
            held = workload["groups"] * (workload["prefix"] + workload["suffix"])
            working_set = held + workload["requests"] * own
            fits = working_set <= control["l2_tokens"]
            if fits:
                fitting[arm] += pairs
            rows.append(
                {
                    "point": point,
                    "arm": arm,
                    "prefix": workload["prefix"],
                    "groups": workload["groups"],
                    "prefix_share": workload["groups"] * workload["prefix"] / control["l2_tokens"],
                    "working_set_tokens": working_set,
                    "fits": fits,
                    "bf16_hit_ratio": _hits([pair[1] for pair in pairs])["hit_ratio"],
                    "hit_ratio": _hits([pair[0] for pair in pairs])["hit_ratio"],
                    "bf16_host": _hits([pair[1] for pair in pairs])["host"],
                    "bf16_ttft_ms": float(np.mean(_field([p[1] for p in pairs], "ttft_ms"))),
                    "ttft_ms": float(np.mean(_field([pair[0] for pair in pairs], "ttft_ms"))),
                    **_pooled(pairs),
                }
            )
    return {
        "turn": runs[-1]["workload"].get("turn"),
        "rows": rows,
        "fits_ttft_ratio": {
            arm: _pooled(pairs)["ttft_ratio"] for arm, pairs in fitting.items() if pairs
        },
    }


def _arm(runs: Sequence[Run]) -> dict[str, Any]:
    samples = [np.asarray([request["ttft_ms"] for request in run["requests"]]) for run in runs]
    metrics = [run["metrics"] for run in runs]

    def total(name: str) -> float:
        return float(sum(metric.get(name, 0.0) for metric in metrics))

    restored = total("sglang:load_back_tokens_total")
    # HiQCache's exporter times both arms alike, on every rank; SGLang's own times transfers on CUDA
    # alone, and counts those of one rank.
    seconds, timed = total("hiqcache_restore_seconds_sum"), total("hiqcache_restore_tokens_total")
    return {
        "runs": len(runs),
        "requests": sum(len(run["requests"]) for run in runs),
        "l1_tokens": runs[0]["l1_tokens"],
        "l2_tokens": runs[0]["l2_tokens"],
        "bytes_per_token": runs[0]["bytes_per_token"],
        "l2_bytes": runs[0]["l2_tokens"] * runs[0]["bytes_per_token"],
        **_hits(runs),
        "ttft_ms": _spread(samples),
        "tpot_ms": _spread([np.asarray(_tpot(run)) for run in runs]),
        "itl_ms": _spread(
            [np.asarray([g for r in run["requests"] for g in r["itl_ms"]]) for run in runs]
        ),
        "output_tokens_per_s": float(np.mean([_throughput(run) for run in runs])),
        "restored_tokens": restored,
        "restore_s": seconds,
        "restore_ms_per_1000_tokens": seconds * 1e6 / timed if timed and seconds else None,
        "ttft_quantiles_ms": np.percentile(np.concatenate(samples), QUANTILES).tolist(),
    }


def _pair(treatment: Run, control: Run) -> dict[str, float]:
    left, right = _hits([treatment]), _hits([control])
    return {
        "hit_ratio": left["hit_ratio"],
        "bf16_hit_ratio": right["hit_ratio"],
        "hit_gain_points": 100 * (left["hit_ratio"] - right["hit_ratio"]),
        "ttft_ms": float(_field([treatment], "ttft_ms").mean()),
        "bf16_ttft_ms": float(_field([control], "ttft_ms").mean()),
        "ttft_ratio": float(
            _field([treatment], "ttft_ms").mean() / _field([control], "ttft_ms").mean()
        ),
        "throughput_ratio": _throughput(treatment) / _throughput(control),
    }


def _pooled(pairs: Sequence[tuple[Run, Run]]) -> dict[str, dict[str, float]]:
    """Differences over all pairs, each with its interval."""
    turn = pairs[0][0]["workload"].get("turn") or 1

    def compare(values: Callable[[Run], Sample], statistic: Callable[..., float]) -> Interval:
        return bootstrap_pairs([(values(a), values(b)) for a, b in pairs], statistic, turn=turn)

    def ttft(run: Run) -> Sample:
        return _field([run], "ttft_ms")

    def cached_and_prompt(run: Run) -> Sample:
        rows = [(_cached(request), request["prompt"]) for request in run["requests"]]
        return np.asarray(rows, dtype=np.float64)

    def hit_gain(left: Sample, right: Sample) -> float:
        ratios = [rows[:, 0].sum() / rows[:, 1].sum() for rows in (left, right)]
        return 100 * float(ratios[0] - ratios[1])

    def of_means(left: Sample, right: Sample) -> float:
        return float(left.mean() / right.mean())

    return {
        "hit_gain_points": compare(cached_and_prompt, hit_gain).as_dict(),
        "ttft_ratio": compare(ttft, of_means).as_dict(),
    }


def _pairs(runs: Sequence[Run], arm: str) -> list[tuple[Run, Run]]:
    """(run of ``arm``, run of the control) of each repeat that has both.

    Where arms take turns, of those that took them with each other.
    """
    by_name = {(run["point"], run["repeat"], run["arm"]): run for run in runs}
    return [
        (by_name[point, repeat, arm], run)
        for (point, repeat, name), run in by_name.items()
        if name == CONTROL
        and (point, repeat, arm) in by_name
        and turn_of(by_name[point, repeat, arm]) == turn_of(run)
    ]


def _hits(runs: Sequence[Run]) -> dict[str, float]:
    requests = [request for run in runs for request in run["requests"]]
    prompt = sum(request["prompt"] for request in requests)
    tiers = {tier: sum(request.get(tier, 0) for request in requests) / prompt for tier in TIERS}
    return {"hit_ratio": sum(map(_cached, requests)) / prompt, **tiers}


def _cached(request: Mapping[str, Any]) -> int:
    """Prompt tokens of a request that came from any tier."""
    return sum(request.get(tier, 0) for tier in TIERS)


def _field(runs: Sequence[Run], name: str) -> Sample:
    return np.asarray([request[name] for run in runs for request in run["requests"]], np.float64)


def _tpot(run: Run) -> list[float]:
    """Milliseconds per token after the first, of requests that had more than one."""
    times = (tpot(each["ttft_ms"], each["e2e_ms"], each["output"]) for each in run["requests"])
    return [time for time in times if time is not None]


def _throughput(run: Run) -> float:
    return float(sum(request["output"] for request in run["requests"]) / run["seconds"])


def _spread(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Mean, median and p99 over all runs; the intervals draw whole runs."""
    filled = [sample for sample in samples if len(sample)]
    if not filled:
        return None
    return {
        "mean": bootstrap(filled, lambda x: float(x.mean())).as_dict(),
        "p50": bootstrap(filled, lambda x: float(np.percentile(x, 50))).as_dict(),
        "p99": bootstrap(filled, lambda x: float(np.percentile(x, 99))).as_dict(),
    }
