"""What must not be in an arm's figures, an arm that is not what it is called included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.lab.arms import Arm
from bench.lab.shards import Shards
from bench.verify.stages import Sizes
from hiqcache.host_pools import HostPool

STAGES = ("capacity", "exact", "pressure")


def problems(
    arm: Arm, found: Mapping[str, Any], sizes: Sizes, pools: tuple[HostPool, ...], cut: Shards
) -> list[str]:
    """Why an arm's figures prove nothing, or what they prove is wrong; empty where all is well.

    sizes, cut: what was asked for. pools: the model's host pools, of one rank.
    """
    missing = [stage for stage in STAGES if stage not in found]
    wrong = [*_layout(arm, found["capacity"], pools, cut)] if "capacity" in found else []
    wrong += [*_exact(arm, found["exact"])] if "exact" in found else []
    if "pressure" in found:
        wrong += [*_pressure(found["pressure"], found["capacity"], sizes, cut.page_size)]
    if missing:
        wrong.append(f"it was cut short: no figures of {', '.join(missing)}")
    return [f"{arm.name}: {each}" for each in wrong]


def _layout(
    arm: Arm, found: Mapping[str, Any], pools: tuple[HostPool, ...], cut: Shards
) -> Iterator[str]:
    expected = {pool.label: arm.bytes_per_token(pool.geometry, cut.page_size) for pool in pools}
    if not expected:
        yield "which host pools this model has is not known, so no layout can be checked"
    if (served := Shards(found["page_size"], found["tp_size"])) != cut:
        yield f"it serves {served}, where {cut} was asked for"
    if len(found["ranks"]) != cut.tp_size:
        yield f"{len(found['ranks'])} ranks report a pool, of {cut.tp_size}"
    for rank, reported in found["ranks"].items():
        for label, nbytes in expected.items():
            pool = reported.get(label, {})
            seen = pool.get("bytes_per_token")
            if seen != nbytes:
                yield (
                    f"rank {rank}, pool {label}: {seen} bytes per token, where the layout has "
                    f"{nbytes}"
                )
            named = {"codec": arm.codec, "transfer": arm.transfer}
            for what, name in named.items():
                if name not in (None, "auto", pool.get(what)):
                    yield (f"rank {rank}, pool {label}: its {what} is {pool.get(what)}, not {name}")


def _exact(arm: Arm, found: Mapping[str, Any]) -> Iterator[str]:
    compared, equal = found["compared"], found["equal"]
    if not compared:
        yield "no long prompt was restored"
    elif arm.quantises and equal == compared:
        yield f"all {equal} restored answers are bit-equal to L1's, so nothing was quantised"
    elif not arm.quantises and equal != compared:
        yield f"{compared - equal} of {compared} restored answers differ from L1's"


def _pressure(
    found: Mapping[str, Any], tier: Mapping[str, Any], sizes: Sizes, page_size: int
) -> Iterator[str]:
    # Of a prompt, whole pages are kept.
    kept = found["prompts"] * (found["prompt_tokens"] // page_size * page_size)
    if kept <= (holds := tier["host_total_tokens"]):
        yield (
            f"L2 holds {holds:.0f} tokens and {found['prompts']} prompts leave {kept} "
            "there, so nothing had to leave: take more or longer ones (--short)"
        )
    if found["requests"] != sizes.requests:
        yield f"{found['requests']} requests under pressure, of {sizes.requests}"
    if not found["restored_requests"]:
        yield "nothing was restored under pressure"
    if not found["bound"] > 0:
        yield "the weights answer every prompt alike, so the check sees nothing"
    if found["mismatches"]:
        yield f"{found['mismatches']} mismatches under pressure"
