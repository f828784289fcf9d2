"""The releases of SGLang that are served, and what each does otherwise than the rest."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from hiqcache.sglang.adapters import v0_5_22, v0_5_23
from hiqcache.sglang.adapters.base import Adapter
from hiqcache.sglang.source import Source

#: The served releases, the newest first.
ADAPTERS: dict[str, Adapter] = {"0.5.23": v0_5_23, "0.5.22": v0_5_22}
SERVED = tuple(ADAPTERS)


def adapter_for(source: Source) -> Adapter:
    """The adapter of a release; of one that is not served, the one that it lacks least for."""

    def lacking(adapter: Adapter) -> int:
        return sum(1 for need in adapter.NEEDS for _ in need.breaches(source))

    return ADAPTERS.get(source.version) or min(ADAPTERS.values(), key=lacking)


@cache
def adapter() -> Adapter:
    """The adapter of the installed SGLang."""
    served = ADAPTERS.get(version("sglang"))
    if served is not None:
        return served
    source = Source.installed()
    assert source is not None
    return adapter_for(source)
