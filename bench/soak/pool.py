"""The pool soak: a host pool and its transfer, driven as SGLang's controller drives them.

No server. A tree of prefixes grows, is backed up and evicted; loads of several prefixes at once,
merged as SGLang merges them, restore what is not on the device. Backups, restores and the writes of
a forward run on three streams that wait for each other once per round, as slots are given away. A
forward that waits for a layer's event reads that layer's rows, and compares every one with what the
codec's reference makes of the rows that were stored: their values follow from the token's number.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.lab.arms import Arm
from bench.soak.prefixes import Chunk, DeviceSlots
from bench.soak.rows import Judge, Rows
from bench.soak.streams import Streams
from bench.soak.subject import Shape, build

#: Rounds between two looks at what was found; the host waits for the device then.
LOOK_EVERY = 32


@dataclass
class _Load:
    """Restores that were merged into one; ``at``: where their results begin."""

    at: int
    round: int
    prefixes: list[list[Chunk]]


@dataclass
class PoolSoak:
    """One arm's pool under soak. ``counts`` says what was done; ``faults`` what was wrong."""

    arm: Arm
    shape: Shape
    device: torch.device
    seed: int
    checksum: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.chance = random.Random(self.seed)
        size = (shape.device_tokens, shape.heads, shape.dim)
        self.k, self.v = (
            [
                torch.full(size, torch.nan, dtype=torch.bfloat16, device=self.device)
                for _ in range(shape.layers)
            ]
            for _ in range(2)
        )
        self.pool = build(self.arm, shape, self.checksum, self.k, self.v)
        self.rows = Rows(shape.layers, shape.heads, shape.dim, self.device)
        self.judge = Judge(self.arm.codec, shape.heads, shape.dim, shape.page_size)
        self.streams = Streams(self.device, 3)
        self._numbers = 1
        self._chunks: list[Chunk] = []
        self._slots = self._all_slots()
        self._results = torch.zeros(64 * LOOK_EVERY, dtype=torch.int64, device=self.device)
        self._loads: list[_Load] = []
        self._used = 0
        self._released: list[tuple[str, torch.Tensor]] = []
        # All of this was made on a stream that the three do not wait for.
        self.streams.wait()

    def run(self, restores: int) -> None:
        """Rounds until so many restores more were checked, or one was wrong."""
        until = self.counts["checked_restores"] + restores
        while self.counts["checked_restores"] < until and not self.faults:
            self.counts["rounds"] += 1
            self._round()
            if self.counts["rounds"] % LOOK_EVERY == 0:
                self.look()
            if self.chance.random() < 0.001:
                self._flush()
        self.look()

    def close(self) -> None:
        """Give the host memory back."""
        self.streams.wait()
        self.pool.destroy()

    def look(self) -> None:
        """Wait for all that was enqueued, and read what the comparisons found."""
        self.streams.wait()
        wrong = self._results[: self._used].tolist()
        for load in self._loads:
            for number, prefix in enumerate(load.prefixes):
                self._judge(load, prefix, wrong[load.at + number])
        transfer = getattr(self.pool, "transfer", None)
        if self.checksum and self.arm.quantises:
            assert transfer is not None
            transfer.report()
            before = self.counts["checksum_mismatches"]
            self.counts["checksum_mismatches"] = transfer.mismatches
            self.counts["checksum_records"] = transfer.checked
            if transfer.mismatches > before:
                self.faults.append({"records not as stored": transfer.mismatches - before})
        with self.streams.on(0):
            self._results.zero_()
        self._used = 0
        self._loads.clear()

    def _judge(self, load: _Load, prefix: list[Chunk], wrong: int) -> None:
        tokens = sum(chunk.tokens for chunk in prefix)
        self.counts["checked_restores"] += 1
        self.counts["checked_tokens"] += tokens
        if wrong:
            self.counts["mismatches"] += 1
            self.faults.append(
                {
                    "round": load.round,
                    "tokens": tokens,
                    "wrong_elements": wrong,
                    "host_slots": [int(chunk.host[0]) for chunk in prefix],
                    "restores_in_its_load": len(load.prefixes),
                }
            )

    # One round -----------------------------------------------------------------------------------

    def _round(self) -> None:
        for kind, slots in self._released:
            if kind == "host":
                self.pool.free(slots)
            else:
                self._slots.give(slots)
        self._released.clear()
        self.streams.begin_round()
        fresh = [chunk for _ in range(self.chance.randint(1, 4)) if (chunk := self._grow())]
        busy = set(fresh)
        loads = [self._choose(busy) for _ in range(self.chance.randint(2, 4))]
        self._write_and_back_up(fresh)
        for load in loads:
            if load:
                self._load(load)
        self._retract()
        self._abort(fresh)
        self._evict_l1()
        self.streams.end_round()

    def _grow(self) -> Chunk | None:
        """A chunk more: of a new prefix or after another, as chunked prefill makes them."""
        shape, chance = self.shape, self.chance
        parent = None
        if self._chunks and chance.random() < 0.6:
            parent = chance.choice(self._chunks)
            if len(parent.path()) > 6:
                parent = None
        longest = shape.long_pages if chance.random() < 0.05 else shape.short_pages
        tokens = chance.randint(1, longest) * shape.page_size
        above = set(parent.path()) if parent else set()
        device = self._take(tokens, above)
        host = self._room(tokens, above)
        if device is None or host is None:
            if device is not None:
                self._released.append(("device", device))
            if host is not None:
                self._released.append(("host", host))
            return None
        chunk = Chunk(self._numbers, tokens, host, parent, device)
        self._numbers += tokens
        if parent:
            parent.children += 1
        return chunk

    def _room(self, tokens: int, keep: set[Chunk]) -> torch.Tensor | None:
        """Slots of L2, of which leaves were evicted where it was full; theirs are free next round.

        SGLang evicts at once. Here a round's backup may not overwrite what its restores read.
        """
        slots: torch.Tensor | None = self.pool.alloc(tokens)
        if slots is not None and self.pool.available_size() > self.shape.host_tokens // 16:
            return slots
        leaves = [c for c in self._chunks if not c.children and c not in keep]
        for chunk in self.chance.sample(leaves, min(len(leaves), 24)):
            self._forget(chunk)
            self.counts["evicted_tokens"] += chunk.tokens
        return slots

    def _take(self, tokens: int, keep: set[Chunk]) -> torch.Tensor | None:
        slots = self._slots.take(tokens)
        if slots is None:
            self._drop_from_l1(0.7, keep)
        return slots

    def _choose(self, busy: set[Chunk]) -> list[list[Chunk]]:
        """Prefixes for one load, each by the chunks of it that are not in L1."""
        found: list[list[Chunk]] = []
        for _ in range(self.chance.randint(1, 8)):
            if not self._chunks:
                break
            path = self.chance.choice(self._chunks).path()
            missing = [c for c in path if c.device is None and c not in busy]
            if not missing or any(c in busy for c in path if c.device is None):
                continue
            slots = self._take(sum(c.tokens for c in missing), set(path) | busy)
            if slots is None:
                break
            parts = torch.split(slots, [c.tokens for c in missing])
            for chunk, own in zip(missing, parts, strict=True):
                chunk.device = own
            busy.update(path)
            found.append(missing)
        return found

    def _write_and_back_up(self, fresh: list[Chunk]) -> None:
        if not fresh:
            return
        rows = torch.cat([chunk.device for chunk in fresh if chunk.device is not None])
        hosts = torch.cat([chunk.host for chunk in fresh])
        with self.streams.on(0):
            values = self.rows.of(self._numbers_of(fresh))
            there = self.streams.sent(rows)
            for layer in range(self.shape.layers):
                self.k[layer][there] = values[0, layer]
                self.v[layer][there] = values[1, layer]
            written = self.streams.event(0)
        with self.streams.on(1):
            self.streams.follow(1, written)
            host, device = self._given(hosts, rows, "backup")
            self.pool.backup_from_device_all_layer(None, host, device, "kernel")
        self._chunks += fresh
        self.counts["backups"] += 1
        self.counts["backup_tokens"] += len(hosts)

    def _load(self, prefixes: list[list[Chunk]]) -> None:
        """Restore ``prefixes`` as one, layer by layer; compare each layer behind its event."""
        chunks = [chunk for prefix in prefixes for chunk in prefix]
        hosts = torch.cat([chunk.host for chunk in chunks])
        rows = torch.cat([chunk.device for chunk in chunks if chunk.device is not None])
        aborted = self.chance.random() < 0.05
        events = []
        with self.streams.on(2):
            host, device = self._given(hosts, rows, "restore")
            for layer in range(self.shape.layers):
                self.pool.load_to_device_per_layer(None, host, device, layer, "kernel")
                events.append(self.streams.event(2))
        self.counts["loads"] += 1
        if aborted:
            self.counts["aborted_restores"] += len(prefixes)
            for chunk in chunks:
                self._leave_l1(chunk)
            return
        with self.streams.on(0):
            numbers, there = self._numbers_of(chunks), self.streams.sent(rows)
            expected = self.judge.expected(self.rows.of(numbers))
            wrong = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
            for layer, event in enumerate(events):
                self.streams.follow(0, event)
                for side, buffers in enumerate((self.k, self.v)):
                    restored = buffers[layer][there]
                    wrong += self.judge.wrong(side, expected[side, layer], restored)
            labels = self.streams.sent(
                torch.repeat_interleave(
                    torch.arange(len(prefixes)),
                    torch.tensor([sum(c.tokens for c in prefix) for prefix in prefixes]),
                )
            )
            results = self._results[self._used : self._used + len(prefixes)]
            results.index_add_(0, labels, wrong)
        self._loads.append(_Load(self._used, self.counts["rounds"], prefixes))
        self._used += len(prefixes)
        for chunk in chunks:
            if self.chance.random() < 0.8:
                self._leave_l1(chunk)

    def _retract(self) -> None:
        """A request is retracted: rows were written and are given up, never backed up."""
        if self.chance.random() > 0.3:
            return
        slots = self._slots.take(self.shape.page_size * self.chance.randint(1, 8))
        if slots is None:
            return
        with self.streams.on(0):
            there = self.streams.sent(slots)
            for buffers in (self.k, self.v):
                for buffer in buffers:
                    buffer[there] = torch.inf
        self._released.append(("device", slots))
        self.counts["retracted_tokens"] += len(slots)

    def _abort(self, fresh: list[Chunk]) -> None:
        """A request is aborted: what was just backed up is given up."""
        for chunk in fresh:
            if not chunk.children and self.chance.random() < 0.05:
                self._forget(chunk)
                self.counts["aborted_backups"] += 1

    def _evict_l1(self) -> None:
        self._drop_from_l1(0.3, set())

    def _drop_from_l1(self, share: float, keep: set[Chunk]) -> None:
        for chunk in self._chunks:
            if chunk.device is not None and chunk not in keep and self.chance.random() < share:
                self._leave_l1(chunk)

    def _leave_l1(self, chunk: Chunk) -> None:
        if chunk.device is not None:
            self._released.append(("device", chunk.device))
            chunk.device = None

    def _forget(self, chunk: Chunk) -> None:
        """Evict a leaf from both tiers."""
        self._leave_l1(chunk)
        self._released.append(("host", chunk.host))
        self._chunks.remove(chunk)
        if chunk.parent:
            chunk.parent.children -= 1

    def _flush(self) -> None:
        self.look()
        self.pool.clear()
        self._chunks.clear()
        self._released.clear()
        self._slots = self._all_slots()
        self.counts["flushes"] += 1

    # Streams and indices -------------------------------------------------------------------------

    def _all_slots(self) -> DeviceSlots:
        shape = self.shape
        return DeviceSlots(shape.device_tokens // shape.page_size, shape.page_size, self.chance)

    def _given(
        self, host: torch.Tensor, rows: torch.Tensor, direction: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices where SGLang leaves them, or, for a transfer of ours, on the CPU as well."""
        if self.arm.quantises:
            # SGLang hands dma its slots on the CPU; on the device it leaves them to the kernels.
            on_cpu = self.chance.random() < (0.9 if self.arm.transfer == "dma" else 0.5)
        else:
            on_cpu = direction == "backup" and bool(self.pool.can_use_write_back_jit)
        return (host if on_cpu else self.streams.sent(host)), self.streams.sent(rows)

    def _numbers_of(self, chunks: list[Chunk]) -> torch.Tensor:
        numbers = [torch.arange(chunk.first, chunk.first + chunk.tokens) for chunk in chunks]
        return self.streams.sent(torch.cat(numbers))
