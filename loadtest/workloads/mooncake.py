"""Replays a trace in Mooncake's JSONL format: arrival times, lengths and block hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

from loadtest.workloads.base import TOKEN_IDS, Conversation, Request, Workload, single

#: Mooncake's traces hash prompts in blocks of 512 tokens; equal hashes are equal prefixes.
BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace that is no Mooncake JSONL; the text names the line."""


class Line(NamedTuple):
    """One request of a trace; ``timestamp`` in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass
class Trace(Workload):
    """The requests of ``path``, at their times divided by ``speed``.

    max_input_tokens, max_output_tokens: longer ones are cut, so that a trace recorded with a large
        context can be replayed on a small one; prompts that shared a prefix still do. None: as is.
    A block's tokens are drawn from its hash and the seed, so equal hashes are equal tokens.
    Raises TraceError for a file that is no trace.
    """

    name: ClassVar[str] = "trace"

    path: Path
    seed: int = 0
    speed: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed must be above 0, not {self.speed}")
        for cap in (self.max_input_tokens, self.max_output_tokens):
            if cap is not None and cap < 1:
                raise ValueError(f"a length cap must be at least 1, not {cap}")

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The trace's requests, by time. Raises TraceError."""
        rows = self.path.read_text(encoding="utf-8").splitlines()
        lines = [self._line(number, row) for number, row in enumerate(rows, 1) if row.strip()]
        if not lines:
            raise TraceError(f"{self.path}: holds no request")
        return tuple(sorted(lines, key=lambda line: line.timestamp))

    def _line(self, number: int, row: str) -> Line:
        try:
            data = json.loads(row)
            line = Line(
                float(data["timestamp"]),
                int(data["input_length"]),
                int(data["output_length"]),
                tuple(int(block) for block in data["hash_ids"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(
                f"{self.path}, line {number}: a request has timestamp (ms), input_length, "
                f"output_length and hash_ids; {type(error).__name__}: {error}"
            ) from error
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if line.input_length < 1 or line.output_length < 1 or len(line.hash_ids) < blocks:
            raise TraceError(
                f"{self.path}, line {number}: lengths must be at least 1, and {line.input_length} "
                f"input tokens need {blocks} hash_ids of {BLOCK_TOKENS} tokens; it has "
                f"{len(line.hash_ids)}."
            )
        return line

    def conversations(self, stream: int = 0) -> Iterator[Conversation]:
        """The trace once, in order, as stream 0; other streams are empty, lest they repeat it."""
        if stream:
            return
        first = self.lines[0].timestamp
        for line in self.lines:
            at = (line.timestamp - first) / 1000 / self.speed
            yield Conversation(single(self.request(line)), at)

    def request(self, line: Line) -> Request:
        """The request that stands for a line."""
        length = min(line.input_length, self.max_input_tokens or line.input_length)
        tokens: list[int] = []
        for block in line.hash_ids:
            if len(tokens) >= length:
                break
            tokens.extend(self.block(block))
        outputs = min(line.output_length, self.max_output_tokens or line.output_length)
        return Request(outputs, tokens=tuple(tokens[:length]))

    def block(self, block: int) -> list[int]:
        """The tokens of the block with this hash."""
        return self.rng("block", block).choices(TOKEN_IDS, k=BLOCK_TOKENS)
