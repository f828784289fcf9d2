"""`hiqcache plan`: how many tokens a host pool holds, for SGLang's own rows and for each codec."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hiqcache.codecs import CODEC_NAMES
from hiqcache.codecs.formats import row_formats
from hiqcache.geometry import KVGeometry
from hiqcache.record import Format, RecordLayout, kv_parts, tokens_in_gigabytes
from hiqcache.settings import STOCK


@dataclass(frozen=True)
class Row:
    """One line of a plan. ``refused`` says why a codec does not serve the model."""

    codec: str
    transfer: str
    bytes_per_token: int
    tokens: int
    gain: float
    refused: str = ""


def layout_for(
    geometry: KVGeometry, codec: str, page_size: int = 1, record_format: Format = "packed"
) -> RecordLayout:
    """The record layout of ``codec``. Raises ValueError where it does not serve the head_dim."""
    rows = row_formats(codec, kv_parts(geometry.heads, geometry.head_dim))
    return RecordLayout(geometry.layers, page_size, rows, format=record_format)


def plan(geometry: KVGeometry, host_gb: float, page_size: int = 1) -> list[Row]:
    """Capacities of one rank's pool of ``host_gb`` decimal GB, as SGLang sizes it.

    Raises ValueError for a size or page size that is not positive.
    """
    if host_gb <= 0:
        raise ValueError(f"the pool's size must be positive, not {host_gb:g} GB.")
    if page_size < 1:
        raise ValueError(f"the page size must be at least 1, not {page_size}.")
    stock = geometry.stock_bytes_per_token
    stock_tokens = tokens_in_gigabytes(host_gb, stock, page_size)
    rows = [Row(STOCK, "stock", stock, stock_tokens, 1.0)]
    ways: list[tuple[str, str, Format]] = [(name, "fused", "packed") for name in CODEC_NAMES]
    for codec, transfer, record_format in [*ways, ("int8", "mover", "padded")]:
        try:
            layout = layout_for(geometry, codec, page_size, record_format)
        except ValueError as error:
            rows.append(Row(codec, transfer, 0, 0, 0.0, str(error)))
            continue
        tokens = tokens_in_gigabytes(host_gb, layout.bytes_per_token, page_size)
        rows.append(Row(codec, transfer, layout.bytes_per_token, tokens, tokens / stock_tokens))
    return rows


def as_table(rows: list[Row]) -> str:
    """``rows`` as text, a line each under a header."""
    lines = [f"{'codec':<10}{'transfer':<10}{'B per token':>12}{'tokens':>14}{'gain':>8}"]
    for row in rows:
        head = f"{row.codec:<10}{row.transfer:<10}"
        if row.refused:
            lines.append(f"{head}not served: {row.refused}")
        else:
            lines.append(f"{head}{row.bytes_per_token:>12,}{row.tokens:>14,}{row.gain:>7.3f}x")
    return "\n".join(lines)


def as_json(geometry: KVGeometry, rows: list[Row], host_gb: float, page_size: int) -> object:
    """``rows`` and what they were planned for, ready for json.dumps."""
    return {
        "geometry": asdict(geometry),
        "host_gb": host_gb,
        "page_size": page_size,
        "rows": [asdict(row) for row in rows],
    }
