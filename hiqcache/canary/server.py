"""What the canary asks of a server: scores with a cache report, and how full its tiers are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiqcache import direct_http
from hiqcache.canary.divergence import Listed
from hiqcache.scraped import samples

#: Most probable tokens that an answer lists at each position.
TOP = 20


class ServerError(OSError):
    """A server answered something that the canary cannot use; the text says what is missing."""


@dataclass(frozen=True)
class Scored:
    """One asking.

    positions: the most probable tokens at each scored position: of the suffix's second token, and
        so on to the token after the suffix.
    wanted: at each position the tokens that were asked for by number, if any.
    device, host, storage: tokens of the prefix that came from L1, L2 and L3.
    seconds: from sending to the whole answer, as the server counts it.
    weights: the version of the weights, where the server names one.
    """

    positions: tuple[Listed, ...]
    wanted: tuple[Listed, ...]
    device: int
    host: int
    storage: int
    seconds: float
    weights: str


@dataclass(frozen=True)
class Facts:
    """What does not change while a server runs."""

    model: str
    page_size: int
    data_parallel: int
    longest: int


@dataclass(frozen=True)
class Tiers:
    """Tokens, of one replica.

    l1, l2: capacities. l2_used: slots of L2 in use. evicted: ever evicted from L1. stored: ever
    copied to L2.
    """

    l1: int
    l2: int
    l2_used: int
    evicted: int
    stored: int


_TIERS = {
    "sglang:max_total_num_tokens": "l1",
    "sglang:hicache_host_total_tokens": "l2",
    "sglang:hicache_host_used_tokens": "l2_used",
    "sglang:evicted_tokens_total": "evicted",
    "sglang:hicache_backup_tokens_total": "stored",
}


@dataclass
class Client:
    """A server at ``url``. Every method raises direct_http.HttpError and ServerError."""

    url: str
    timeout: float = 120
    api_key: str = ""
    _data_parallel: int = 1

    def facts(self) -> Facts:
        """Its model's name, page size, replicas and longest request in tokens."""
        info = self._json(direct_http.get(self._at("server_info"), **self._how()))
        try:
            found = Facts(
                str(info["served_model_name"]),
                int(info["page_size"]),
                int(info["dp_size"]),
                int(info["max_req_input_len"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}/server_info lacks {error}: is it SGLang's?") from error
        self._data_parallel = found.data_parallel
        return found

    def tokens(self, text: str) -> list[int]:
        """``text`` in the server's tokens, without special ones."""
        sent = {"prompt": text, "add_special_tokens": False}
        answer = self._json(direct_http.post(self._at("tokenize"), sent, **self._how()))
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}/tokenize sent no tokens") from error

    def fill(self, tokens: Sequence[int], key: str) -> int:
        """Have ``tokens`` computed and stored under the cache key; how many were there before."""
        answer = self._generate(tokens, key, {})
        return int(answer["meta_info"]["cached_tokens"])

    def score(
        self, tokens: Sequence[int], prefix: int, key: str, wanted: Collection[int] = ()
    ) -> Scored:
        """Score what follows the first ``prefix`` tokens, which alone may come from the cache.

        The TOP best at each position, and the tokens ``wanted``, whatever their probability.
        """
        more: dict[str, Any] = {
            "return_logprob": True,
            "logprob_start_len": prefix,
            "top_logprobs_num": TOP,
        }
        if wanted:
            more["token_ids_logprob"] = sorted(wanted)
        meta = self._generate(tokens, key, more)["meta_info"]
        scored = len(tokens) - prefix
        positions = self._listed(meta, "top_logprobs", scored)
        asked = self._listed(meta, "token_ids_logprobs", scored) if wanted else ()
        details: Mapping[str, Any] | None = meta.get("cached_tokens_details")
        if details is None and meta.get("cached_tokens"):
            raise ServerError(
                f"{self.url} does not say where cached tokens came from: start it with "
                "--enable-cache-report."
            )
        found = details or {}
        return Scored(
            positions,
            asked,
            int(found.get("device") or 0),
            int(found.get("host") or 0),
            int(found.get("storage") or 0),
            float(meta.get("e2e_latency") or 0.0),
            str(meta.get("weight_version") or ""),
        )

    def _listed(self, meta: Mapping[str, Any], what: str, scored: int) -> tuple[Listed, ...]:
        try:
            # The suffix's first token is predicted by the prefix, which was not computed.
            rows = [*meta[f"input_{what}"][1:], *meta[f"output_{what}"][:1]]
            found = tuple({int(entry[1]): float(entry[0]) for entry in row} for row in rows)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ServerError(f"{self.url}/generate sent no {what}") from error
        if len(found) != scored:
            raise ServerError(f"{self.url}/generate scored {len(found)} of {scored} positions")
        return found

    def tiers(self) -> Tiers:
        """How full its tiers are, and what passed through them."""
        page = direct_http.get(self._at("metrics"), **self._how()).text
        return tiers_of(page, self.url)

    def _generate(self, tokens: Sequence[int], key: str, more: dict[str, Any]) -> dict[str, Any]:
        sent: dict[str, Any] = {
            "input_ids": list(tokens),
            "extra_key": key,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            **more,
        }
        if self._data_parallel > 1:
            # Each replica has tiers of its own.
            sent["routed_dp_rank"] = 0
        answer = self._json(direct_http.post(self._at("generate"), sent, **self._how()))
        if not isinstance(answer, dict) or "meta_info" not in answer:
            raise ServerError(f"{self.url}/generate sent no answer of SGLang's")
        return answer

    def _at(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def _how(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"timeout": self.timeout, "headers": headers}

    def _json(self, answer: direct_http.Answer) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            raise ServerError(f"{self.url} answered something that is no JSON: {error}") from error


def tiers_of(page: str, url: str) -> Tiers:
    """The tiers of replica 0 from a server's /metrics. Raises ServerError where it has no L2.

    Every TP and PP rank holds its share of the same tokens: the largest stands for all.
    """
    found: dict[str, float] = {}
    for sample in samples(page, _TIERS):
        if sample.labels.get("dp_rank", "") in ("", "0"):
            name = _TIERS[sample.name]
            found[name] = max(found.get(name, 0.0), sample.value)
    if not found.get("l1"):
        raise ServerError(f"{url}/metrics shows no L1: start it with --enable-metrics.")
    if not found.get("l2"):
        raise ServerError(
            f"{url}/metrics shows no L2: start it with --enable-hierarchical-cache, or wait for "
            "its first request."
        )
    return Tiers(*(int(found.get(name, 0)) for name in _TIERS.values()))
