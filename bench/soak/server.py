"""The server soak: a real server of a tiny model under everything that happens to L2 at once.

Prompts of short and long prefixes, shared by some, more than L2 holds; clients that hang up or
abort in the middle of a stream, long answers that are retracted (SGLANG_TEST_RETRACT), prefill in
chunks, flushes of both tiers. Every other answer is compared with its prompt's reference, taken
while the prefix was in L1, by the log-probabilities of fixed token ids at the first position.
A fault is an answer further off than half of what it takes to be another prompt's, or to have
sixteen tokens in the middle replaced (the median): rounding and a codec's error lie well below.

A codec of whole pages restores whole pages, and errs by more than what two suffixes of one prefix
are apart. Its bound is half of what it takes to have a page replaced (the median), on a model whose
K weighs less. ``replaced`` and ``replaced_seen`` count how many replacements the bound tells.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import tiny_model
from bench.lab.arms import Arm
from bench.lab.hang_up import abort, hang_up
from bench.lab.server_metrics import scrape
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server
from bench.verify.answers import Reply, ask, closest, distance
from bench.verify.prompts import RandomPrompts
from hiqcache import direct_http
from hiqcache.codecs import get_codec

#: Of a hundred requests: so many are checked; the others hang up, abort, or answer at length.
CHECKED, HANG_UP, ABORT = 90, 3, 3
#: Tokens of long answers; with others beside them they are retracted.
LONG_ANSWER = 96
#: Tokens whose replacement an answer must show, where a codec stores tokens one by one.
REPLACED = 16
#: What K's projections are multiplied by for a codec of whole pages: int4's error then moves the
#: answers of 150 prompts by 0.7 at most, and a replaced page of 64 tokens those by 3.5 (median).
WHOLE_PAGE_KEYS = 0.2


@dataclass(frozen=True)
class Load:
    """Prompts and tiers. L2 holds some four times what L1 does, and not all prompts."""

    prompts: int
    l1_tokens: int
    groups: int
    short: int = 48
    long: int = 640
    suffix: int = 40


GPU = Load(prompts=1200, l1_tokens=24_576, groups=60)
CPU = Load(prompts=60, l1_tokens=2048, groups=12)


class ServerSoak:
    """One arm's server under soak; ``counts`` and ``faults`` as PoolSoak's. Starts the server."""

    def __init__(
        self,
        arm: Arm,
        seed: int,
        checksum: bool,
        cpu: bool,
        concurrency: int,
        page_size: int,
        layout: str = "page_first",
        args: Sequence[str] = (),
        load: Load | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self._load = load or (CPU if cpu else GPU)
        self._chance = random.Random(seed)
        self._concurrency = concurrency if not cpu else min(concurrency, 4)
        self._checksum = checksum and arm.quantises
        # bf16 is a copy, and no codec's name.
        whole = arm.quantises and get_codec(arm.codec).page_sizes is not None
        self._replaced = page_size if whole else REPLACED
        self._whole_pages = whole
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._prompts = RandomPrompts()
        env = {
            **(CPU_ENV if cpu else {}),
            **arm.env,
            **({"HIQCACHE_CHECKSUM": "1"} if self._checksum else {}),
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "64",
        }
        self.server = Server(
            f"the {arm.name} server",
            tiny_model.write(folder / "model", WHOLE_PAGE_KEYS if whole else 1.0),
            folder / "server.log",
            (
                *(CPU_ARGS if cpu else ()),
                *tiny_model.ARGS,
                *("--max-total-tokens", str(self._load.l1_tokens), "--hicache-ratio", "4"),
                *("--page-size", str(page_size), "--hicache-mem-layout", layout),
                *("--chunked-prefill-size", "256"),
                *("--skip-server-warmup", *arm.args, *args),
            ),
            env,
        )
        self.server.start()
        try:
            self.server.wait(600)
            self._learn()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        self.server.stop()
        self._folder.cleanup()

    def run(self, restores: int) -> None:
        """Ask until so many restored answers more were checked, or one was wrong."""
        until = self.counts["checked_restores"] + restores
        with ThreadPoolExecutor(self._concurrency) as pool:
            while self.counts["checked_restores"] < until and not self.faults:
                actions = [self._action() for _ in range(16 * self._concurrency)]
                try:
                    list(pool.map(lambda action: action(), actions))
                    if self._chance.random() < 0.05:
                        direct_http.post(f"{self.server.url}/flush_cache?timeout=60", timeout=90)
                        self.counts["flushes"] += 1
                    self._read_metrics()
                except OSError as error:
                    self.faults.append({"server": str(error), "log": self.server.tail()})

    # ---------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Draw prompts, take their references, and see how far apart they lie."""
        load, prompts = self._load, self._prompts
        long_prefixes = prompts.draw(load.groups // 3, load.long, self._chance.randrange(2**31))
        short_prefixes = prompts.draw(
            load.groups - len(long_prefixes), load.short, self._chance.randrange(2**31)
        )
        prefixes = [*long_prefixes, *short_prefixes]
        suffixes = prompts.draw(load.prompts, load.suffix, self._chance.randrange(2**31))
        drawn = [
            [*self._chance.choice(prefixes), *suffix[: self._chance.randint(8, load.suffix)]]
            for suffix in suffixes
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            asked = list(zip(drawn, pool.map(self._reference, drawn), strict=True))
            kept = [(prompt, reply) for prompt, reply in asked if reply is not None]
            if len(kept) < len(drawn) // 2:
                raise RuntimeError(
                    f"only {len(kept)} of {len(drawn)} prompts could be asked for twice within L1: "
                    "lower the concurrency."
                )
            self._texts = [prompt for prompt, _ in kept]
            self._references = [reply for _, reply in kept]
            sample = self._chance.sample(range(len(kept)), min(64, len(kept)))
            changed = [
                distance(one, self._references[index])
                for index, one in zip(
                    sample, pool.map(lambda index: self._changed(index), sample), strict=True
                )
            ]
        bound = float(np.median(changed)) / 2
        if not self._whole_pages:
            bound = min(bound, closest([reply.values[0] for reply in self._references]) / 2)
        self.bound = bound
        self.counts["prompts"] = len(kept)
        self.counts["replaced"] = len(changed)
        self.counts["replaced_seen"] = sum(change > bound for change in changed)

    def _reference(self, prompt: list[int]) -> Reply | None:
        for _ in range(3):
            self._ask(prompt[:-1])
            reply = self._ask(prompt)
            if reply.device and not reply.host:
                return reply
        return None

    def _changed(self, index: int) -> Reply:
        other = list(self._texts[index])
        start = max(0, len(other) // 2 - self._replaced)
        for place in range(start, min(start + self._replaced, len(other))):
            other[place] = self._prompts.other(other[place])
        return self._ask(other)

    def _ask(self, prompt: list[int]) -> Reply:
        return ask(self.server, prompt, self._prompts.watched, 1)

    def _action(self) -> Callable[[], None]:
        kind, index = self._chance.randrange(100), self._chance.randrange(len(self._texts))
        prompt = self._texts[index]
        if kind < CHECKED:
            return lambda: self._check(index)
        if kind < CHECKED + HANG_UP:
            events = self._chance.randint(1, 8)
            return lambda: self._count("hung_up", hang_up(self.server.url, prompt, 256, events))
        if kind < CHECKED + HANG_UP + ABORT:
            return lambda: self._count("aborted", abort(self.server.url, prompt))
        return lambda: self._answer(prompt)

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self.counts[name] += more

    def _answer(self, prompt: list[int]) -> None:
        ask(self.server, prompt, self._prompts.watched[:1], LONG_ANSWER)
        self._count("long_answers", 1)

    def _check(self, index: int) -> None:
        reply = self._ask(self._texts[index])
        change = distance(reply, self._references[index])
        self._count("checked_restores" if reply.host else "checked_others", 1)
        self._count("restored_tokens", reply.host)
        if not change <= self.bound:
            self._count("mismatches", 1)
            self.faults.append(
                {
                    "change": change,
                    "bound": self.bound,
                    "prompt_tokens": len(self._texts[index]),
                    "device": reply.device,
                    "host": reply.host,
                }
            )

    def _read_metrics(self) -> None:
        found = scrape(self.server)
        for name, metric in (
            ("retracted_requests", "sglang:num_retracted_requests_total"),
            ("evicted_tokens", "hiqcache_l2_evicted_tokens_total"),
            ("checksum_records", "hiqcache_checksum_records_total"),
            ("checksum_mismatches", "hiqcache_checksum_mismatches_total"),
            ("excess_rows", "hiqcache_codec_excess_rows_total"),
        ):
            self.counts[name] = int(found.get(metric, 0))
        for name in ("checksum_mismatches", "excess_rows"):
            if self.counts[name]:
                self.faults.append({name: self.counts[name]})
