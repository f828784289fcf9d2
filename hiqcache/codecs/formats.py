"""Row formats of the codecs, in plain Python: a plan needs bytes, not torch."""

from __future__ import annotations

from hiqcache.record import SCALE_BYTES, RowFormat


def int8_row(heads: int, head_dim: int) -> RowFormat:
    """One byte an element, one bf16 scale a head."""
    return RowFormat(codes=heads * head_dim, scales=heads * SCALE_BYTES)


def row_formats(codec: str, heads: int, head_dim: int) -> tuple[RowFormat, RowFormat]:
    """The formats of a K row and of a V row under ``codec``.

    Raises ValueError where the codec does not serve ``head_dim``.
    """
    if codec == "int8-rot" and head_dim & (head_dim - 1):
        raise ValueError(
            "codec int8-rot rotates a head by a Walsh-Hadamard matrix, so head_dim must be a "
            f"power of two; this model's is {head_dim}. Use HIQCACHE_CODEC=int8."
        )
    row = int8_row(heads, head_dim)
    return row, row
