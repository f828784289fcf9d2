"""What the canary exports. Pure prometheus_client, one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: Zero stands alone: it is what a copy shows. INT8 of the models tried lies at 1e-4 to 1e-2 nats
#: per token, an FP8 cache at 1e-2 to 3e-2.
KL_BUCKETS = (
    *(0.0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3),
    *(1.0, 3.0, 10.0),
)
SECOND_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

#: Why an asking gave no comparison.
REASONS = {
    "l1": "the prefix was still in L1",
    "lost": "it was in no tier any more",
    "partial": "only a part of it came from L2",
    "storage": "it came from L3",
    "unsteady": "repeated askings gave different bits, as other requests shared their batches",
    "no_reference": "the prefix left L1 before the reference was taken, the reference was "
    "unsteady, or it is of other weights",
    "error": "the server failed",
}

#: How many restored prompts the agreement looks back on.
AGREEMENT_WINDOW = 100

_LABELS = ("arm", "model_name")


class CanaryMetrics:
    """The families of one canary."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"hiqcache_canary_{name}", text, (*_LABELS, *more), registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"hiqcache_canary_{name}", text, _LABELS, registry=registry)

        self.kl = Histogram(
            "hiqcache_canary_kl_nats",
            "KL divergence per scored token between the answers on a prefix as computed and on the "
            "prefix restored from L2, in nats. A copy (BF16) shows 0.",
            _LABELS,
            buckets=KL_BUCKETS,
            registry=registry,
        )
        self.seconds = Histogram(
            "hiqcache_canary_seconds",
            "Time of an asking, as the server counts it, by the tier that held its prefix.",
            (*_LABELS, "tier"),
            buckets=SECOND_BUCKETS,
            registry=registry,
        )
        self.agreement = gauge(
            "top1_agreement",
            "Share of scored tokens whose most probable token a restored prefix left as it was, "
            f"over the last {AGREEMENT_WINDOW} restored prompts.",
        )
        self.restored = counter(
            "restored", "Askings whose whole prefix came from L2 and that were compared."
        )
        self.different = counter(
            "different", "Of those, the ones not equal to their reference bit by bit: 0 for a copy."
        )
        self.not_restored = counter(
            "not_restored", "Askings that gave no comparison, by reason.", "reason"
        )
        self.tokens = counter(
            "tokens",
            "Tokens that the canary had computed: fill (prefixes), ask (scored tokens), push.",
            "use",
        )
        self.l2_tokens = gauge(
            "l2_tokens", "Tokens of L2 that the canary's prompts may be taking, at most."
        )
        self.l2_allowed = gauge("l2_allowed_tokens", "Tokens of L2 that they may take, as told.")
        self.prompts = gauge("prompts", "Prompts in rotation; 0 where the share of L2 holds none.")
        self.up = gauge("up", "Whether the server answered the canary's last visit.")
        self.slo = gauge("slo_kl_nats", "The KL per token in nats that the operator allows.")

    def of(self, arm: str, model: str) -> ArmMetrics:
        """One arm's; every series exists from here on."""
        return ArmMetrics(self, arm, model)


class ArmMetrics:
    """The families of CanaryMetrics, bound to an arm and its model."""

    def __init__(self, families: CanaryMetrics, arm: str, model: str) -> None:
        self.kl = families.kl.labels(arm, model)
        self.seconds = {tier: families.seconds.labels(arm, model, tier) for tier in ("L1", "L2")}
        self._agreement = families.agreement.labels(arm, model)
        self.restored = families.restored.labels(arm, model)
        self.different = families.different.labels(arm, model)
        self.not_restored = {
            reason: families.not_restored.labels(arm, model, reason) for reason in REASONS
        }
        self.tokens = {
            use: families.tokens.labels(arm, model, use) for use in ("fill", "ask", "push")
        }
        self.l2_tokens = families.l2_tokens.labels(arm, model)
        self.l2_allowed = families.l2_allowed.labels(arm, model)
        self.prompts = families.prompts.labels(arm, model)
        self.up = families.up.labels(arm, model)
        self.slo = families.slo.labels(arm, model)
        self._agreed: deque[tuple[int, int]] = deque(maxlen=AGREEMENT_WINDOW)
        # No value before the first comparison: neither 0 nor 1 was seen.
        self._agreement.set(float("nan"))

    def compared(self, divergences: Sequence[float], agreeing: int, identical: bool) -> None:
        """Note one restored asking: KL at each position, and how many top tokens agreed."""
        for value in divergences:
            self.kl.observe(value)
        self.restored.inc()
        self.different.inc(not identical)
        self._agreed.append((agreeing, len(divergences)))
        positions = sum(total for _, total in self._agreed)
        self._agreement.set(sum(same for same, _ in self._agreed) / positions)
