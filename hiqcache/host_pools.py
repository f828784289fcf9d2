"""What a model is to the host pools: its family, and the pools of KV rows that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hiqcache.codecs import FP8_CODECS
from hiqcache.codecs.formats import BY_HALVES
from hiqcache.compatibility import Entry, Family
from hiqcache.features import FEATURES
from hiqcache.geometry import KV_CACHE_DTYPES, GeometryError, KVGeometry
from hiqcache.settings import STOCK


@dataclass(frozen=True)
class HostPool:
    """One host pool of KV rows that SGLang builds for a rank.

    label: SGLang's name for it: kv, or full and swa.
    token_share: tokens of its device pool for each token of the model's first pool.
    """

    label: str
    geometry: KVGeometry
    token_share: float = 1.0


class Refusal(NamedTuple):
    """An entry of the table that a model falls under, and what of the model does."""

    found: str
    entry: Entry

    @property
    def reason(self) -> str:
        """What was found and why that is refused, in a sentence."""
        return f"{self.found}: {self.entry.refused}"


@dataclass(frozen=True)
class Model:
    """A model as one rank of SGLang serves it.

    path: the model's folder.
    family: its line in the table of what is served.
    pools: its host pools of KV rows; empty where only SGLang's own reading could tell them.
    state_share: device bytes of recurrent state for each byte of KV (hybrids).
    source: what was read.
    rotary: why codecs that take rotary halves for granted do not serve its K; empty where they do.
    notes: what the reading rests on that may be wrong, in sentences; empty for SGLang's own.
    """

    path: Path
    family: Family
    pools: tuple[HostPool, ...]
    source: str
    rotary: str = ""
    state_share: float = 0.0
    notes: tuple[str, ...] = ()

    def refusal(self, codec: str) -> Refusal | None:
        """Why ``codec`` does not serve it, as far as that is no matter of widths; None: it does."""
        if codec != STOCK and self.family.refused:
            return Refusal(self.family.name, self.family)
        for pool in self.pools:
            if codec not in (STOCK, *FP8_CODECS) and pool.geometry.item_bytes == 1:
                return Refusal(f"rows of {pool.geometry.dtype}", FEATURES["narrow_fp8"])
        if codec in BY_HALVES and self.rotary:
            return Refusal(self.rotary, FEATURES["rotary"])
        return None

    def cached_as(self, kv_cache_dtype: str) -> Model:
        """The model under SGLang's --kv-cache-dtype. Raises GeometryError for one not known."""
        if kv_cache_dtype == "auto":
            return self
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise GeometryError(
                f"--kv-cache-dtype {kv_cache_dtype}: HiQCache serves auto, "
                f"{', '.join(KV_CACHE_DTYPES)}."
            )
        dtype = KV_CACHE_DTYPES[kv_cache_dtype]
        pools = [replace(pool, geometry=replace(pool.geometry, dtype=dtype)) for pool in self.pools]
        return replace(self, pools=tuple(pools))

    @property
    def geometry(self) -> KVGeometry:
        """The rows of its only pool. Raises GeometryError where it has several, or unknown ones."""
        if len(self.pools) != 1:
            pools = ", ".join(pool.label for pool in self.pools) or "unknown here"
            raise GeometryError(
                f"{self.path}: a model of the kind '{self.family.name}', whose host pools are "
                f"{pools}; one pool of KV rows is needed here."
            )
        return self.pools[0].geometry


def split(kv_heads: int, tp: int) -> int:
    """KV heads of one of ``tp`` ranks: split, or replicated where there are fewer than ranks.

    Raises GeometryError where they cannot be split evenly.
    """
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise GeometryError(
            f"{kv_heads} KV heads cannot be split over --tp {tp}: choose a divisor or a multiple "
            f"of {kv_heads}."
        )
    return max(1, kv_heads // tp)
