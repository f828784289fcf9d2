"""What was asked of the transfers, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hiqcache.codecs import TOKEN_CODECS

Row = dict[str, Any]

#: The transfer length that targets are stated for, and the short one.
TOKENS = 2048
SHORT = 128

#: Most bytes of GPU memory that the ring of a dma transfer may take.
RING_BYTES = 32_000_000

#: The transfer that targets were set for, by page size: the one that serves it.
STATED_FOR = {64: "dma", 1: "fused"}

#: What rows of a result lack that was measured before there were pages.
_ONCE = {"page": 1, "host_ms": None, "ms_ahead": None, "kernel": None}


class Target(NamedTuple):
    """A figure that was asked for: the worst of ``values``, by codec, against ``limit``."""

    name: str
    values: Mapping[str, float]
    limit: float
    at_least: bool = False

    @property
    def value(self) -> float:
        """The worst that was measured."""
        return min(self.values.values()) if self.at_least else max(self.values.values())

    @property
    def met(self) -> bool:
        """Whether every value keeps to the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def rows(result: Mapping[str, Any], kind: str = "rows", **wanted: object) -> list[Row]:
    """The rows of a result (or of ``kind`` beside) with these values."""
    every = (_ONCE | row for row in result[kind])
    return [row for row in every if all(row[key] == value for key, value in wanted.items())]


def find(given: Iterable[Row], **wanted: object) -> Row:
    """The one row with these values. Raises LookupError if there is none or more than one."""
    found = [row for row in given if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {wanted}")
    return found[0]


def pages(result: Mapping[str, Any]) -> list[int]:
    """The page sizes that were measured, the largest first."""
    return sorted({row["page"] for row in rows(result)}, reverse=True)


def layouts(result: Mapping[str, Any], page: int) -> list[str]:
    """The layouts that were measured at a page size, SGLang's default first."""
    found = {row["layout"] for row in rows(result, page=page, tokens=TOKENS)}
    return sorted(found, key=lambda layout: (layout != "page_first", layout))


def targets(result: Mapping[str, Any], page: int, layout: str) -> list[Target]:
    """The targets at a page size, in ``layout``; the worse slot order counts.

    What runs beside a transfer is measured in one layout, page_first, and so are short transfers:
    it has those targets alone. A page size has none where none were set, or where the transfer that
    they were set for was left out.
    """
    setting = Setting(result, page, layout)
    stated = _TARGETS.get(STATED_FOR.get(page, ""))
    if stated is None or all(row["transfer"] != STATED_FOR[page] for row in setting.given):
        return []
    return list(stated(setting))


class Setting:
    """The rows of a page size and a layout, and their quotients."""

    def __init__(self, result: Mapping[str, Any], page: int, layout: str) -> None:
        self.given = rows(result, page=page, layout=layout)
        self.beside = rows(result, "beside", page=page) if layout == "page_first" else []
        self.page_first = layout == "page_first"
        self.codecs = list(
            dict.fromkeys(row["codec"] for row in self.given if row["codec"] != "bf16")
        )

    def ratio(
        self,
        direction: str,
        ours: tuple[str, str],
        theirs: tuple[str, str] = ("bf16", "stock"),
        tokens: int = TOKENS,
        slots: str | None = None,
    ) -> float:
        """The worst quotient of medians, over slot orders or in ``slots``."""
        quotients: list[float] = []
        for order in sorted({row["slots"] for row in self.given} if slots is None else {slots}):
            at = {"direction": direction, "slots": order, "tokens": tokens}
            mine, other = (
                find(self.given, codec=codec, transfer=transfer, **at)
                for codec, transfer in (ours, theirs)
            )
            quotients.append(mine["ms_median"] / other["ms_median"])
        return max(quotients)

    def share(self, direction: str, codec: str, transfer: str) -> float:
        """The smallest share of the link's ceiling."""
        own = {"codec": codec, "transfer": transfer, "direction": direction, "tokens": TOKENS}
        return min(
            float(row["pcie_share"])
            for row in self.given
            if all(row[key] == value for key, value in own.items())
        )

    def held(self, codec: str, transfer: str) -> float:
        """GPU memory in MB, at any length."""
        return max(
            float(row["staging_bytes"] / 1e6)
            for row in self.given
            if (row["codec"], row["transfer"]) == (codec, transfer)
        )

    def slowdown(self, work: str, direction: str, codec: str, transfer: str) -> float:
        """How many times as long ``work`` takes beside transfers."""
        at = {"beside": work, "direction": direction, "codec": codec, "transfer": transfer}
        slowdown: float = find(self.beside, **at)["slowdown"]
        return slowdown


#: int4's restores and backups over stock's, at most, at pages of 64.
_OF_INT4 = (("restore", 0.30), ("backup", 0.33))

#: Slowdowns at pages of 64, at most; a decode step never loses more than beside stock either.
_SLOWED = (
    ("gemm", "restore", 1.02),
    ("gemm", "backup", 1.02),
    ("decode step", "restore", 1.06),
    ("decode step", "backup", 1.04),
)


def _of_dma(at: Setting) -> Iterator[Target]:
    """What the copy engine was built for: pages of 64."""
    codecs = [codec for codec in at.codecs if codec in TOKEN_CODECS]
    for direction, limit in (("restore", 0.48), ("backup", 0.51)):
        quotients = {codec: at.ratio(direction, (codec, "dma")) for codec in codecs}
        yield Target(f"{direction} / stock", quotients, limit)
    for direction, limit in _OF_INT4 if "int4" in at.codecs else ():
        quotients = {"int4": at.ratio(direction, ("int4", "dma"))}
        yield Target(f"{direction} of int4 / stock", quotients, limit)
    shares = {codec: at.share("restore", codec, "dma") for codec in codecs}
    yield Target("restore, share of the PCIe ceiling", shares, 0.96, at_least=True)
    held = {codec: at.held(codec, "dma") for codec in codecs}
    yield Target("GPU memory held, MB", held, RING_BYTES / 1e6)
    if not at.page_first:
        return
    for direction in ("restore", "backup"):
        quotients = {codec: at.ratio(direction, (codec, "dma"), tokens=SHORT) for codec in codecs}
        yield Target(f"{direction} of {SHORT} tokens / stock", quotients, 0.55)
    for work, direction, limit in _SLOWED if at.beside else ():
        name = f"{work} beside a {direction}, slowed"
        if work == "decode step":
            stock = at.slowdown(work, direction, "bf16", "stock")
            name, limit = f"{name} (stock: {stock:.3f})", min(limit, stock)
        slowed = {codec: at.slowdown(work, direction, codec, "dma") for codec in codecs}
        yield Target(name, slowed, limit)


def _of_fused(at: Setting) -> Iterator[Target]:
    """What fused was held to when pages of one token were all that was measured."""
    int8 = ("int8", "fused")
    yield Target("restore / stock", {"int8": at.ratio("restore", int8)}, 0.54)
    yield Target("backup / stock", {"int8": at.ratio("backup", int8)}, 0.55)
    random = at.ratio("backup", int8, slots="random")
    yield Target("backup, random slots / stock", {"int8": random}, 0.45)
    for direction in ("backup", "restore"):
        rotated = at.ratio(direction, ("int8-rot", "fused"), int8)
        yield Target(f"{direction}, int8-rot / int8", {"int8-rot": rotated}, 1.10)
        share = {"int8": at.share(direction, *int8)}
        yield Target(f"{direction}, share of the PCIe ceiling", share, 0.85, at_least=True)
    yield Target("GPU memory held, MB", {"int8": at.held(*int8)}, 0)
    for work in dict.fromkeys(row["beside"] for row in at.beside):
        limit = at.slowdown(work, "restore", "bf16", "stock")
        slowed = {"int8": at.slowdown(work, "restore", *int8)}
        yield Target(f"{work} beside a restore, slowed (limit: stock's)", slowed, limit)


_TARGETS: Mapping[str, Callable[[Setting], Iterator[Target]]] = {
    "dma": _of_dma,
    "fused": _of_fused,
}
