"""What each experiment runs: servers, workloads, how often, and about how long that takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from bench.lab.arms import Arm
from bench.lab.shards import CPU_PAGE_SIZE, GPU_PAGE_SIZE, Shards
from bench.tiers.disk import FETCHED_FROM, PAGE_TOKENS_AT_LEAST, Disk
from hiqcache.geometry import KVGeometry
from hiqcache.record import tokens_in_gigabytes
from loadtest.workloads.base import TOKEN_IDS
from loadtest.workloads.shared_prefix import DEALS, SharedPrefix

#: The last writes tens of gigabytes at a GPU's scale, so it runs where it is asked for.
EXPERIMENTS = ("same-tokens", "same-bytes", "sweep", "l3")
DEFAULT_EXPERIMENTS = EXPERIMENTS[:3]

#: The working set of same-bytes over BF16's capacity: 32 groups of 2,048 tokens over 8 GB of
#: Qwen3-8B's KV (54,254 tokens).
OVERSUBSCRIPTION = 1.2

#: Where BF16 overflows and int8 does not: the sweep compares prefix lengths there.
SWEEP_LENGTHS_AT = 1.5


#: l3 has an L2 hardly larger than L1, which it must exceed, and a disk of so many times L2's bytes.
L3_L2_RATIO = 1.25
L3_DISK_OVER_L2 = 4

#: The working set of l3 over what BF16's disk holds: hardly more than int8's holds. Both disks are
#: full in the end, and what lies on them can be counted.
L3_OVERSUBSCRIPTION = 2.0

#: A guess for one arm's warm-up: a dozen prompts and the compilation of kernels.
WARM_UP_S = 12.0


class Speed(NamedTuple):
    """For a plan before anything is measured; a run's own pace replaces it."""

    start_s: float
    prefill_tokens_per_s: float
    decode_s: float


@dataclass(frozen=True)
class Scale:
    """Sizes that fit a machine.

    shards: how servers cut KV; tokens are those of a server, bytes those of a rank.
    l2_gigabytes: ``--hicache-size``; None: ``l2_ratio`` times L1 in BF16's bytes.
    prefix, suffix, output: tokens of a request; requests: of one measured run of the sweep (the
        other experiments deal every group DEALS).
    shares, prefixes: the sweep's working sets over BF16's capacity, and its prefix lengths.
    """

    l1_tokens: int
    shards: Shards
    l2_gigabytes: int | None
    l2_ratio: float
    prefix: int
    suffix: int
    output: int
    requests: int
    concurrency: int
    shares: tuple[float, ...]
    prefixes: tuple[int, ...]
    speed: Speed

    @property
    def page_size(self) -> int:
        """Tokens per page, of both tiers."""
        return self.shards.page_size

    def stock_tokens(self, geometry: KVGeometry) -> int:
        """Tokens that BF16 holds in L2."""
        if self.l2_gigabytes is not None:
            stock = geometry.stock_bytes_per_token
            return tokens_in_gigabytes(self.l2_gigabytes, stock, self.page_size)
        return self.pages(self.l1_tokens * self.l2_ratio)

    def pages(self, tokens: float) -> int:
        """Tokens of a pool that SGLang sizes for ``tokens``: whole pages, and one to pad."""
        return (int(tokens) // self.page_size + 1) * self.page_size


#: An H200 with Qwen3-8B; the speeds are rough, from a prototype's runs there.
GPU = Scale(
    l1_tokens=16_384,
    shards=Shards(GPU_PAGE_SIZE),
    l2_gigabytes=8,
    l2_ratio=0.0,
    prefix=2048,
    suffix=128,
    output=64,
    requests=128,
    concurrency=8,
    shares=(0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0),
    prefixes=(512, 1024, 4096, 8192, 16_384),
    speed=Speed(95, 22_000, 0.011),
)
#: Two cores with SmolLM2-135M.
CPU = Scale(
    l1_tokens=1024,
    shards=Shards(CPU_PAGE_SIZE),
    l2_gigabytes=None,
    l2_ratio=3.0,
    prefix=256,
    suffix=16,
    output=4,
    requests=48,
    concurrency=2,
    shares=(0.5, 1.0, 1.5, 3.0),
    prefixes=(128, 512),
    speed=Speed(35, 450, 0.12),
)


@dataclass(frozen=True)
class Point:
    """One workload: ``requests`` requests over ``groups`` prefixes.

    choice: how a request's prefix is chosen, as in SharedPrefix.
    turn: how many requests an arm answers before the next arm has its turn, so that a host that is
        slower for a second is so for all; None: all of a run's.
    fill: have every prefix computed once before measuring, so that what is measured is the
        returning traffic; otherwise a run measures its cold misses too.
    """

    name: str
    groups: int
    prefix: int
    suffix: int
    output: int
    requests: int
    concurrency: int
    fill: bool
    repeats: int
    choice: Literal["uniform", "dealt"] = "uniform"
    turn: int | None = None

    def prompts(self, seed: int) -> tuple[list[list[int]], list[list[int]]]:
        """The prompts of the fill and of the measured part, the same for the same seed."""
        workload = SharedPrefix(
            seed=seed,
            groups=self.groups,
            prefix_tokens=self.prefix,
            suffix_tokens=self.suffix,
            output_tokens=self.output,
            choice=self.choice,
        )
        extra = workload.rng("fill")
        fill = [
            [*prefix, *extra.choices(TOKEN_IDS, k=self.suffix)]
            for prefix in (workload.prefixes if self.fill else ())
        ]
        drawn = itertools.islice(workload.conversations(), self.requests)
        measured = [list(next(each.turns).tokens or ()) for each in drawn]
        return fill, measured

    def seconds(self, speed: Speed, capacity: int) -> float:
        """About how long one run takes on a server whose L2 holds ``capacity`` tokens."""
        hits = min(1.0, capacity / (self.groups * self.prefix))
        cold = self.groups * self.prefix
        again = max(0, self.requests - (0 if self.fill else self.groups)) * self.prefix * (1 - hits)
        suffixes = self.suffix * (self.requests + (self.groups if self.fill else 0))
        prefill = (cold + again + suffixes) / speed.prefill_tokens_per_s
        steps = self.requests * self.output / self.concurrency + self.groups * self.fill / 4
        return prefill + steps * speed.decode_s + 1


@dataclass(frozen=True)
class Experiment:
    """``points`` on servers that are all up at once and take load one at a time."""

    name: str
    arms: tuple[Arm, ...]
    l1_tokens: int
    same_tokens: bool
    points: tuple[Point, ...]
    scale: Scale
    disk: Disk | None = None

    def server_args(self, arm: Arm, geometry: KVGeometry) -> tuple[str, ...]:
        """The SGLang arguments that set the sizes of both tiers."""
        return (
            *self.scale.shards.args,
            *("--max-total-tokens", str(self.l1_of(arm))),
            *self._l2_args(arm, geometry),
            *arm.args,
        )

    def server_env(self, arm: Arm) -> dict[str, str]:
        """The HIQCACHE_ variables of an arm in this experiment."""
        sizing = {"HIQCACHE_SIZING": "tokens"} if self.same_tokens and arm.quantises else {}
        return {**arm.env, **sizing}

    def l1_of(self, arm: Arm) -> int:
        """L1 in tokens: the same bytes for every arm, so more tokens where the GPU keeps FP8."""
        return self.l1_tokens * 2 // arm.kv_item_bytes

    def _l2_args(self, arm: Arm, geometry: KVGeometry) -> tuple[str, str]:
        if self.scale.l2_gigabytes is not None and not self.same_tokens:
            return ("--hicache-size", str(self.scale.l2_gigabytes))
        return ("--hicache-ratio", repr(self._ratio(arm, geometry)))

    def _ratio(self, arm: Arm, geometry: KVGeometry) -> float:
        # Of the arm's own L1 for the same tokens; of BF16's for the same bytes.
        l1_tokens = self.l1_of(arm) if self.same_tokens else self.l1_tokens
        # The half keeps the product's whole part clear of rounding; SGLang adds one page.
        tokens = self.scale.stock_tokens(geometry) - self.scale.page_size + 0.5
        return tokens / l1_tokens

    def bytes_per_token(self, arm: Arm, geometry: KVGeometry) -> int:
        """Bytes of L2 that the arm's layout gives a token at this page size."""
        return arm.bytes_per_token(geometry, self.scale.page_size, self.disk is not None)

    def capacity(self, arm: Arm, geometry: KVGeometry) -> int:
        """Tokens that the arm's L2 must hold; a run on any other number is invalid."""
        stock = self.scale.stock_tokens(geometry)
        if self.same_tokens:
            return stock
        if self.scale.l2_gigabytes is not None:
            ours, size = self.bytes_per_token(arm, geometry), self.scale.page_size
            return tokens_in_gigabytes(self.scale.l2_gigabytes, ours, size)
        # HiQCache has SGLang size the pool by a ratio that is as much larger as its tokens are
        # smaller (hiqcache/sglang/sizing.py); the page that pads it is one of its own.
        ours = self.bytes_per_token(arm, geometry)
        growth = geometry.stock_bytes_per_token / ours if arm.quantises else 1
        return self.scale.pages(self.l1_of(arm) * (self._ratio(arm, geometry) * growth))

    def only(self, names: Sequence[str]) -> Experiment:
        """The experiment with the points of these names, in its order; with none given, all.

        Raises ValueError for a name that none of its points has.
        """
        known = {point.name for point in self.points}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"experiment {self.name} has no point {', '.join(unknown)}: choose from "
                f"{', '.join(point.name for point in self.points)}."
            )
        chosen = tuple(point for point in self.points if not names or point.name in names)
        return replace(self, points=chosen)

    def keeps(self, arm: Arm, geometry: KVGeometry) -> int:
        """Tokens of the arm's largest tier below the GPU: L3 holds what L2 does."""
        return max(self.capacity(arm, geometry), self.disk_tokens(arm, geometry))

    def disk_tokens(self, arm: Arm, geometry: KVGeometry) -> int:
        """Tokens that the arm's share of the disk holds, in whole pages; none without L3."""
        if self.disk is None:
            return 0
        page = self.bytes_per_token(arm, geometry) * self.scale.page_size
        return self.disk.nbytes // page * self.scale.page_size

    def seconds(self, geometry: KVGeometry) -> float:
        """About how long all of it takes, servers included."""
        runs = sum(
            point.repeats * point.seconds(self.scale.speed, self.keeps(arm, geometry))
            for point in self.points
            for arm in self.arms
        )
        return self.scale.speed.start_s + len(self.arms) * WARM_UP_S + runs


def experiment(
    name: str, arms: tuple[Arm, ...], scale: Scale, geometry: KVGeometry, repeats: int
) -> Experiment:
    """The experiment called ``name``.

    same-tokens: in every arm's L2; requests one at a time, so that hits are comparable.
    same-bytes: of every arm's L2; a working set between BF16's capacity and int8's, from empty
        caches.
    sweep: the same bytes; working sets from what fits everywhere to what fits nowhere, then prefix
        lengths, after every prefix was computed once.
    l3: the same bytes of a disk behind the same bytes of L2; a working set of twice what BF16's
        disk holds, hardly more than int8's, and far beyond either L2.
    Raises ValueError for an unknown name, and for pages too small for l3.
    """
    disk, oversubscription = None, OVERSUBSCRIPTION
    if name == "l3":
        if scale.page_size < PAGE_TOKENS_AT_LEAST:
            raise ValueError(
                f"l3 writes a file per page, and pages of {scale.page_size} are too small for "
                "that: give --page-size 64."
            )
        scale = replace(scale, l2_gigabytes=None, l2_ratio=L3_L2_RATIO)
        disk_tokens = L3_DISK_OVER_L2 * scale.stock_tokens(geometry)
        disk = Disk(
            disk_tokens * geometry.stock_bytes_per_token, min(FETCHED_FROM, scale.prefix // 4)
        )
        oversubscription = L3_OVERSUBSCRIPTION
    capacity = disk_tokens if disk else scale.stock_tokens(geometry)
    groups = math.ceil(oversubscription * capacity / scale.prefix)
    base = Point(
        "oversubscribed",
        groups,
        scale.prefix,
        scale.suffix,
        scale.output,
        scale.requests,
        scale.concurrency,
        False,
        repeats,
    )
    if name == "sweep":
        longest = max(scale.prefixes) + scale.suffix + scale.output
        l1_tokens = max(scale.l1_tokens, math.ceil(1.2 * longest / 1024) * 1024)
        return Experiment(name, arms, l1_tokens, False, _sweep(base, capacity, scale), scale)
    # Every group returns equally often; otherwise chance decides how much there is to hit.
    base = replace(base, choice="dealt", requests=DEALS * groups)
    if name == "same-tokens":
        point = replace(base, output=1, concurrency=1, repeats=1)
        return Experiment(name, arms, scale.l1_tokens, True, (point,), scale)
    if name in ("same-bytes", "l3"):
        return Experiment(name, arms, scale.l1_tokens, False, (base,), scale, disk)
    raise ValueError(f"there is no experiment {name!r}: choose from {', '.join(EXPERIMENTS)}.")


def _sweep(base: Point, capacity: int, scale: Scale) -> tuple[Point, ...]:
    """Few output tokens: TTFT is what the sweep is about.

    Where all fits, only many runs show that nothing is lost; elsewhere the gain is large, and half
    as many do. All have the same length, so that those of a turn, as many as run at once, end
    about together.
    """
    output = max(1, base.output // 8)

    def at(name: str, share: float, prefix: int) -> Point:
        # Whole groups that stay within the share, so that "fits" means fits.
        groups = max(2, int(share * capacity / (prefix + 2 * base.suffix)))
        requests = max(base.requests // 2, min(groups, base.requests))
        return replace(
            base,
            name=name,
            groups=groups,
            prefix=prefix,
            output=output,
            requests=requests,
            fill=True,
            turn=base.concurrency,
            repeats=base.repeats if share <= 1 else max(1, base.repeats // 2),
        )

    shares = [at(f"share {share:g}", share, base.prefix) for share in scale.shares]
    lengths = [at(f"prefix {prefix}", SWEEP_LENGTHS_AT, prefix) for prefix in scale.prefixes]
    return (*shares, *lengths)
