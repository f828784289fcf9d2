"""When the tokens of one stream came: the one clock of the load generator and of the bench.

What counts is what sglang.bench_serving 0.5.23 counts (benchmark/serving.py), so that figures can
be laid beside its own:

- TTFT ends at the first chunk that holds a token.
- ITL: a later chunk of n tokens counts as n equal gaps; further tokens of the first chunk came at
  its moment and add no gap.
- E2E ends when the stream does, at [DONE], and so does TPOT: (E2E - TTFT) / (tokens - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TokenTimes:
    """Times of one request, in seconds from sending it.

    ttft: until the first token.
    itl: gaps between tokens after the first chunk.
    e2e: until the end of the stream; 0 until then.
    output_tokens: tokens so far.
    """

    ttft: float = 0.0
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    latest: float = field(default=0.0, repr=False)

    def chunk(self, tokens: int, now: float) -> None:
        """A chunk came ``now``, after which the server has sent ``tokens`` tokens in all."""
        fresh = tokens - self.output_tokens
        if fresh <= 0:
            return
        if self.output_tokens:
            self.itl += [(now - self.latest) / fresh] * fresh
        else:
            self.ttft = now
        self.output_tokens = tokens
        self.latest = now

    def end(self, now: float) -> None:
        """The stream ended ``now``."""
        self.e2e = now

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there was only one."""
        return tpot(self.ttft, self.e2e, self.output_tokens)


def tpot(ttft: float, e2e: float, tokens: int) -> float | None:
    """Time per output token after the first, in the unit of ``ttft`` and ``e2e``.

    None where there was only one.
    """
    return (e2e - ttft) / (tokens - 1) if tokens > 1 else None
