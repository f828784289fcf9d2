"""`hiqcache plan`: how many tokens a host pool holds, for SGLang's own rows and for each codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hiqcache.codecs import CODEC_NAMES
from hiqcache.codecs.formats import require_pages, row_formats
from hiqcache.compatibility import Family
from hiqcache.geometry import KVGeometry
from hiqcache.model import Model
from hiqcache.record import RecordLayout, format_of, tokens_in_gigabytes
from hiqcache.settings import STOCK
from hiqcache.transfers.auto import auto_transfer

#: Tokens per page where nothing else is asked for: what SGLang's documentation recommends for
#: HiCache on a GPU. SGLang's own default (--page-size) is 1.
PAGE_SIZE = 64

#: Codecs by transfer, in the order of a plan: on a GPU whose driver has batched copies.
WAYS: tuple[tuple[str, str], ...] = (
    (STOCK, "stock"),
    *((codec, auto_transfer(codec, "cuda")) for codec in CODEC_NAMES),
    ("int8", "mover"),
)


@dataclass(frozen=True)
class Row:
    """One line of a plan. ``refused`` says why a codec does not serve the model."""

    pool: str
    codec: str
    transfer: str
    bytes_per_token: int
    tokens: int
    gain: float
    refused: str = ""


def layout_for(
    geometry: KVGeometry,
    codec: str,
    page_size: int = 1,
    transfer: str | None = None,
    trailer_bytes: int = 0,
) -> RecordLayout:
    """The record layout of ``codec`` under ``transfer`` (None: the package's own choice).

    trailer_bytes: of each page, for its seal where there is an L3. Raises ValueError where the
    codec does not serve a width or the pages, and where a transfer's records are no pages to seal.
    """
    rows = row_formats(codec, geometry.parts)
    require_pages(codec, page_size)
    return RecordLayout(
        geometry.layers,
        page_size,
        rows,
        format=format_of(transfer, rows),
        trailer_bytes=trailer_bytes,
    )


def factor_of(family: Family, codec: str = "int8", page_size: int = PAGE_SIZE) -> float | None:
    """How many times the tokens of its example ``family`` would hold in the same bytes.

    Rows that stay SGLang's own count on both sides. None where the family has no example.
    """
    example = family.example
    if example is None:
        return None
    stock = sum(rows.stock_bytes_per_token for rows in example.pools)
    ours = sum(layout_for(rows, codec, page_size).bytes_per_token for rows in example.pools)
    return (stock + example.kept_bytes) / (ours + example.kept_bytes)


def gigabytes_of(model: Model, host_gb: float) -> list[float]:
    """What SGLang gives each pool of ``model`` of ``--hicache-size``: by bytes on the device.

    SGLang 0.5.23's _split_hicache_size (hybrid_pool_assembler.py). Recurrent state takes its
    share first.
    """
    device = [pool.token_share * pool.geometry.stock_bytes_per_token for pool in model.pools]
    return [host_gb * size / (sum(device) * (1 + model.state_share)) for size in device]


def plan(model: Model, host_gb: float, page_size: int = PAGE_SIZE) -> list[Row]:
    """Capacities of one rank's pools, ``host_gb`` decimal GB together, as SGLang sizes them.

    All pools of a model grow by one factor over SGLang's own, recurrent state included: a window
    or a state is of use only with the rest of its prefix. Raises ValueError for a size or page
    size that is not positive.
    """
    if host_gb <= 0:
        raise ValueError(f"the pool's size must be positive, not {host_gb:g} GB.")
    if page_size < 1:
        raise ValueError(f"the page size must be at least 1, not {page_size}.")
    shares = gigabytes_of(model, host_gb)
    rows: list[Row] = []
    for codec, transfer in WAYS:
        refusal, kept = model.refusal(codec), []
        refused = refusal.reason if refusal else ""
        for pool in model.pools:
            try:
                kept.append(_bytes_per_token(pool.geometry, codec, page_size, transfer))
            except ValueError as error:
                refused = str(error)
        if refused:
            rows += [Row(pool.label, codec, transfer, 0, 0, 0.0, refused) for pool in model.pools]
            continue
        stock = [pool.geometry.stock_bytes_per_token for pool in model.pools]
        sizes = [gb * ours / own for gb, ours, own in zip(shares, kept, stock, strict=True)]
        growth = host_gb / (host_gb - sum(shares) + sum(sizes))
        for pool, size, ours, own, gb in zip(model.pools, sizes, kept, stock, shares, strict=True):
            tokens = tokens_in_gigabytes(size * growth, ours, page_size)
            gain = tokens / tokens_in_gigabytes(gb, own, page_size)
            rows.append(Row(pool.label, codec, transfer, ours, tokens, gain))
    return sorted(rows, key=lambda row: [pool.label for pool in model.pools].index(row.pool))


def _bytes_per_token(geometry: KVGeometry, codec: str, page_size: int, transfer: str) -> int:
    if codec == STOCK:
        return geometry.stock_bytes_per_token
    return layout_for(geometry, codec, page_size, transfer).bytes_per_token


def as_table(rows: Sequence[Row]) -> str:
    """``rows`` as text, a line each under a header; the pool's name where there are several."""
    several = len({row.pool for row in rows}) > 1

    def line(pool: str, codec: str, transfer: str) -> str:
        return f"{pool:<6}{codec:<10}{transfer:<10}" if several else f"{codec:<10}{transfer:<10}"

    head = line("pool", "codec", "transfer")
    lines = [f"{head}{'B per token':>12}{'tokens':>14}{'gain':>8}"]
    for row in rows:
        head = line(row.pool, row.codec, row.transfer)
        if row.refused:
            lines.append(f"{head}not served: {row.refused}")
        else:
            lines.append(f"{head}{row.bytes_per_token:>12,}{row.tokens:>14,}{row.gain:>7.3f}x")
    return "\n".join(lines)


def as_json(model: Model, rows: Sequence[Row], host_gb: float, page_size: int) -> object:
    """``rows`` and what they were planned for, ready for json.dumps."""
    return {
        "model": str(model.path),
        "family": model.family.key,
        "refused": model.family.refused,
        "source": model.source,
        "notes": list(model.notes),
        "pools": [
            {
                "label": pool.label,
                "gigabytes": gigabytes,
                "layers": pool.geometry.layers,
                "parts": [part._asdict() for part in pool.geometry.parts],
                "dtype": pool.geometry.dtype,
            }
            for pool, gigabytes in zip(model.pools, gigabytes_of(model, host_gb), strict=True)
        ],
        "host_gb": host_gb,
        "page_size": page_size,
        "rows": [asdict(row) for row in rows],
    }
