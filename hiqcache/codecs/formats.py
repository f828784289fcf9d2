"""Row formats of the codecs, in plain Python: a plan needs bytes, not torch."""

from __future__ import annotations

from collections.abc import Sequence

from hiqcache.record import SCALE_BYTES, Part, RowFormat

#: A head that is wider than WIDEST is quantised in blocks of BLOCK elements, each as if it were a
#: head: one scale for the 512 elements of an MLA latent would fit its outliers and little else, and
#: a kernel's rotation by a matrix of that size would not fit a multiprocessor.
WIDEST = 256
BLOCK = 128


def blocks(part: Part) -> Part:
    """``part`` as the codecs see it: heads no wider than WIDEST, over the same elements."""
    if part.width <= WIDEST or part.width % BLOCK:
        return part
    return Part(part.name, part.heads * (part.width // BLOCK), BLOCK)


def int8_row(heads: int, width: int) -> RowFormat:
    """One byte an element, one bf16 scale a head."""
    return RowFormat(codes=heads * width, scales=heads * SCALE_BYTES)


def row_formats(codec: str, parts: Sequence[Part]) -> tuple[RowFormat, ...]:
    """The format of a row of each part under ``codec``.

    Raises ValueError where the codec does not serve a part's width.
    """
    seen = [blocks(part) for part in parts]
    for part in seen:
        if codec == "int8-rot" and part.width & (part.width - 1):
            raise ValueError(
                "codec int8-rot rotates a head by a Walsh-Hadamard matrix, so head_dim must be a "
                f"power of two; this model's {part.name} heads have {part.width}. Use "
                "HIQCACHE_CODEC=int8."
            )
    return tuple(int8_row(part.heads, part.width) for part in seen)
