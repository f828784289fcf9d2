"""How much of L2 the canary's own prompts take, counted so that it can only be too high."""

from __future__ import annotations

from dataclasses import dataclass, field

from hiqcache.canary.server import Tiers


@dataclass
class Budget:
    """Tokens of the canary's in L2, and the share that they may reach.

    L2 evicts what was used longest ago. So an entry that was last used when the server had stored
    n tokens is gone at the latest when it has stored n + L2's capacity + what was on its way then,
    which L1 held. Until then it counts, known to be lost or not; L2's slots in use bound the sum.
    """

    share: float
    _entries: dict[str, tuple[int, int]] = field(default_factory=dict)

    def use(self, key: str, tokens: int, tiers: Tiers) -> None:
        """Note that the entry ``key`` of so many tokens was stored or used now."""
        self._entries[key] = (tokens, tiers.stored)

    def forget_all(self) -> None:
        """The server was started anew."""
        self._entries.clear()

    def taken(self, tiers: Tiers) -> int:
        """Tokens of L2 that the canary may be taking now, at most."""
        self._entries = {
            key: (tokens, stored)
            for key, (tokens, stored) in self._entries.items()
            if tiers.stored - stored < tiers.l2 + tiers.l1
        }
        return min(sum(tokens for tokens, _ in self._entries.values()), tiers.l2_used)

    def allowed(self, tiers: Tiers) -> int:
        """Tokens that the canary may take at any time."""
        return int(self.share * tiers.l2)

    def fits(self, tokens: int, tiers: Tiers) -> bool:
        """Whether so many tokens more stay within the share."""
        return self.taken(tiers) + tokens <= self.allowed(tiers)
