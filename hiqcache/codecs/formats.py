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


#: int4 takes heads of these widths, and pages of so many tokens.
INT4_WIDTHS = (32, 64, 128, 256)
INT4_PAGES = (32, 64, 128)

#: Codecs that take rotary halves for granted (hiqcache/rotary.py).
BY_HALVES = frozenset({"int4"})

#: Tokens of a page that int4 keeps finer, per head.
INT4_KEPT = 4


def int4_key_row(heads: int, width: int) -> RowFormat:
    """Half a byte an element; per page, head and channel a middle and a step, and what is kept.

    Of a page and head: ``width`` bf16 middles and steps; of each of INT4_KEPT tokens, half of its
    codes of a byte (the other half lies where its others would), a bf16 scale, and its slot.
    """
    kept = INT4_KEPT * (width // 2 + SCALE_BYTES + 1)
    return RowFormat(heads * width // 2, heads * (2 * width * SCALE_BYTES + kept), per_page=True)


def int4_value_row(heads: int, width: int) -> RowFormat:
    """Half a byte an element; a bf16 middle and step a head."""
    return RowFormat(heads * width // 2, heads * 2 * SCALE_BYTES)


def _int4_rows(parts: Sequence[Part]) -> tuple[RowFormat, ...]:
    if [part.name for part in parts] != ["k", "v"]:
        raise ValueError(
            "codec int4 stores K and V each in its own way; this model's rows are "
            f"{' and '.join(part.name for part in parts)}. Use HIQCACHE_CODEC=int8."
        )
    for part in parts:
        if part.width not in INT4_WIDTHS:
            raise ValueError(
                f"codec int4 serves head_dim {', '.join(map(str, INT4_WIDTHS))}; this model's "
                f"{part.name} heads have {part.width}. Use HIQCACHE_CODEC=int8."
            )
    key, value = parts
    return int4_key_row(key.heads, key.width), int4_value_row(value.heads, value.width)


def require_pages(codec: str, page_size: int) -> None:
    """Raise ValueError where ``codec`` stores whole pages, and none of ``page_size`` tokens."""
    if codec == "int4" and page_size not in INT4_PAGES:
        raise ValueError(
            f"codec int4 stores whole pages of {', '.join(map(str, INT4_PAGES))} tokens, and "
            f"these have {page_size}: use --page-size 64, or HIQCACHE_CODEC=int8."
        )


def row_formats(codec: str, parts: Sequence[Part]) -> tuple[RowFormat, ...]:
    """The format of a row of each part under ``codec``.

    Raises ValueError where the codec does not serve a part.
    """
    if codec == "int4":
        return _int4_rows(parts)
    seen = [blocks(part) for part in parts]
    for part in seen:
        if codec == "int8-rot" and part.width & (part.width - 1):
            raise ValueError(
                "codec int8-rot rotates a head by a Walsh-Hadamard matrix, so head_dim must be a "
                f"power of two; this model's {part.name} heads have {part.width}. Use "
                "HIQCACHE_CODEC=int8."
            )
    return tuple(int8_row(part.heads, part.width) for part in seen)
