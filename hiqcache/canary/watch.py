"""One arm under watch: fills, references, waits for the server's own evictions, compares."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field

from hiqcache.canary.budget import Budget
from hiqcache.canary.divergence import Listed, best, lumped_kl
from hiqcache.canary.metrics import ArmMetrics, CanaryMetrics
from hiqcache.canary.prompts import Prompt, prompts
from hiqcache.canary.push import Push
from hiqcache.canary.server import Client, Facts, Scored, ServerError, Tiers

logger = logging.getLogger(__name__)

#: How often an asking is repeated until it gives the same bits twice.
REPEATS = 5


@dataclass(frozen=True)
class Plan:
    """What the operator asked for: see the command's options."""

    share: float
    prefix: int
    scored: int
    push_per_hour: int
    slo: float
    texts: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """One restored asking against its reference: KL at each position, in nats, and top tokens."""

    prompt: str
    divergences: tuple[float, ...]
    agreeing: int
    identical: bool


@dataclass
class Probe:
    """A prompt, and where it stands.

    key: the cache key of this fill; "" before the first.
    reference: the answer from L1; None where the prompt must be filled (again).
    evicted: tokens that the server had evicted from L1 when it last used the prompt.
    turn: the number of the last visit that was its; 0 before the first.
    """

    prompt: Prompt
    key: str = ""
    reference: tuple[Listed, ...] | None = None
    weights: str = ""
    evicted: int = 0
    turn: int = 0


@dataclass
class Watch:
    """One arm. ``visit`` does one thing at a time; ``comparisons`` is all that was compared."""

    arm: str
    client: Client
    plan: Plan
    families: CanaryMetrics
    budget: Budget = field(init=False)
    comparisons: list[Comparison] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    _facts: Facts | None = None
    _metrics: ArmMetrics | None = None
    _push: Push | None = None
    _seen: Tiers | None = None
    _failed: bool = False
    _turn: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.plan.share)

    def visit(self) -> bool:
        """Do what is next: compare a prompt that has left L1, fill one, push, or nothing.

        Whether anything was asked of the server. A server that fails is noted, not raised.
        """
        try:
            busy = self._visit()
        except OSError as error:
            if not self._failed:
                logger.warning("arm %s: %s", self.arm, error)
            self._failed = True
            if self._metrics is not None:
                self._metrics.up.set(0)
                self._metrics.not_restored["error"].inc()
            return False
        if self._failed:
            logger.info("arm %s answers again", self.arm)
        self._failed = False
        return busy

    def _visit(self) -> bool:
        if self._facts is None:
            self._meet()
        metrics = self._bound()
        tiers = self.client.tiers()
        if self._seen and (tiers.evicted < self._seen.evicted or tiers.stored < self._seen.stored):
            logger.info("arm %s was started anew", self.arm)
            self._start_anew()
            return self._visit()
        self._seen = tiers
        metrics.up.set(1)
        self._choose(tiers)
        busy = self._next(tiers)
        metrics.l2_tokens.set(self.budget.taken(tiers))
        metrics.l2_allowed.set(self.budget.allowed(tiers))
        return busy

    def _next(self, tiers: Tiers) -> bool:
        ready = [
            probe
            for probe in self.probes
            if (
                self.budget.fits(len(probe.prompt.tokens), tiers)
                if probe.reference is None
                else _left_l1(probe, tiers)
            )
        ]
        if ready:
            # By turns: where L1 turns over between two visits, some prompt has always left it, and
            # the others would never be filled.
            probe = min(ready, key=lambda probe: probe.turn)
            self._turn += 1
            probe.turn = self._turn
            if probe.reference is None:
                self._fill(probe)
            else:
                self._compare(probe)
            return True
        waiting = [probe for probe in self.probes if probe.reference]
        if self._push is None or not waiting:
            return False
        return self._push_out(waiting, tiers)

    def _meet(self) -> None:
        """Learn what the server is, and put the prompts into its tokens."""
        facts = self.client.facts()
        plan = self.plan
        found = prompts(plan.texts, self.client, facts.page_size, plan.prefix, plan.scored)
        tiers = self.client.tiers()
        self._metrics = self.families.of(self.arm, facts.model)
        self._metrics.slo.set(plan.slo)
        self._facts = facts
        self._push = Push.of(plan.push_per_hour, found, facts, tiers)
        self.probes = [Probe(prompt) for prompt in found]
        logger.info(
            "arm %s: %s, L1 %d and L2 %d tokens; %d prompts of %d + %d tokens",
            *(self.arm, facts.model, tiers.l1, tiers.l2),
            *(len(found), found[0].prefix, plan.scored),
        )

    def _choose(self, tiers: Tiers) -> None:
        """Keep the prompts that L2's share holds at once, beside what is pushed."""
        assert self._facts is not None
        size = len(self.probes[0].prompt.tokens)
        room = self.budget.allowed(tiers) - (self._push.tokens if self._push else 0)
        fitting = max(0, min(len(self.probes), room // size))
        self._bound().prompts.set(fitting)
        if fitting == 0:
            pushed = f" beside {self._push.tokens} to push" if self._push else ""
            raise ServerError(
                f"{self.plan.share:g} of L2's {tiers.l2} tokens holds no prompt of {size}{pushed}: "
                "raise --l2-share, lower --prefix-tokens" + (", or do not push." if pushed else ".")
            )
        del self.probes[fitting:]

    def _start_anew(self) -> None:
        self._facts = self._seen = None
        self.probes = []
        self.budget.forget_all()

    def _fill(self, probe: Probe) -> None:
        """Have a prompt's prefix computed under a key of its own, and take the reference."""
        metrics = self._bound()
        prompt = probe.prompt
        probe.key = f"hiqcache-canary/{prompt.name}/{secrets.token_hex(8)}"
        # Twice: write_through_selective stores what is asked for again.
        for _ in range(2):
            self.client.fill(prompt.tokens[: prompt.prefix], probe.key)
        metrics.tokens["fill"].inc(prompt.prefix + 1)
        answers = self._ask(probe)
        self._touch(probe)
        from_l1 = all(answer.device == prompt.prefix for answer in answers)
        if not (from_l1 and _steady(answers)):
            metrics.not_restored["no_reference"].inc()
            return
        probe.reference, probe.weights = answers[-1].positions, answers[-1].weights
        metrics.seconds["L1"].observe(answers[-1].seconds)

    def _compare(self, probe: Probe) -> None:
        """Score a prompt that must have left L1, and compare it where all of it came from L2."""
        metrics = self._bound()
        prefix = probe.prompt.prefix
        answers = self._ask(probe)
        self._touch(probe)
        first = answers[0]
        reference = probe.reference
        assert reference is not None
        if first.weights != probe.weights:
            probe.reference, reason = None, "no_reference"
        elif first.storage:
            probe.reference, reason = None, "storage"
        elif first.host == prefix:
            reason = "" if _steady(answers) else "unsteady"
        elif first.host:
            reason = "partial"
        elif first.device == prefix:
            reason = "l1"
        else:
            probe.reference, reason = None, "lost"
        if reason:
            metrics.not_restored[reason].inc()
            return
        metrics.seconds["L2"].observe(first.seconds)
        last = answers[-1]
        found = Comparison(
            probe.prompt.name,
            # Rounding may leave less than nothing of two sums that are nearly equal.
            tuple(max(0.0, lumped_kl(*pair)) for pair in zip(reference, last.wanted, strict=True)),
            sum(best(p) == best(q) for p, q in zip(reference, last.positions, strict=True)),
            reference == last.positions,
        )
        self.comparisons.append(found)
        metrics.compared(found.divergences, found.agreeing, found.identical)

    def _ask(self, probe: Probe) -> list[Scored]:
        """Ask until two answers in a row are the same bits, REPEATS times at most.

        Where there is a reference, every token that it lists anywhere is asked for.
        """
        prompt = probe.prompt
        wanted = {token for listed in probe.reference or () for token in listed}
        answers: list[Scored] = []
        while len(answers) < REPEATS and not _steady(answers):
            answers.append(self.client.score(prompt.tokens, prompt.prefix, probe.key, wanted))
        self._bound().tokens["ask"].inc(len(answers) * (len(prompt.tokens) - prompt.prefix))
        return answers

    def _touch(self, probe: Probe) -> None:
        tiers = self._seen = self.client.tiers()
        probe.evicted = tiers.evicted
        self.budget.use(probe.key, len(probe.prompt.tokens), tiers)

    def _push_out(self, waiting: list[Probe], tiers: Tiers) -> bool:
        """Ask for prompts of the canary's own until one that waits must have left L1."""
        assert self._push is not None
        pushed = False
        while not any(_left_l1(probe, tiers) for probe in waiting):
            filler = self._push.next(time.monotonic())
            if filler is None:
                return pushed
            self.client.fill(filler.tokens, filler.name)
            self._bound().tokens["push"].inc(len(filler.tokens))
            tiers = self._seen = self.client.tiers()
            self.budget.use(filler.name, len(filler.tokens), tiers)
            pushed = True
        return pushed

    def _bound(self) -> ArmMetrics:
        assert self._metrics is not None
        return self._metrics


def _left_l1(probe: Probe, tiers: Tiers) -> bool:
    """Whether a prompt must have left L1: as many tokens as it holds were evicted since.

    L1 evicts what was used longest ago, and less than its whole was used before the prompt was.
    Asking earlier would make the prompt the newest again.
    """
    return tiers.evicted - probe.evicted >= tiers.l1


def _steady(answers: list[Scored]) -> bool:
    return len(answers) > 1 and answers[-1].positions == answers[-2].positions
