"""Record layouts: published sizes, and rows that never overlap nor leave the arena."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs.formats import int8_row
from hiqcache.record import CHUNK_TOKENS, RecordLayout, RowFormat, tokens_in_gigabytes

QWEN3_8B = int8_row(heads=8, width=128)


@pytest.mark.parametrize(
    ("record_format", "bytes_per_token", "tokens"),
    [("packed", 74_880, 106_838), ("padded", 82_944, 96_451)],
)
@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_published_sizes_of_qwen3_8b(
    record_format: str, bytes_per_token: int, tokens: int, order: str, page_size: int
) -> None:
    layout = RecordLayout(36, page_size, (QWEN3_8B, QWEN3_8B), order, record_format)  # type: ignore[arg-type]
    assert layout.bytes_per_token == bytes_per_token
    if page_size == 1:
        assert tokens_in_gigabytes(8, layout.bytes_per_token) == tokens


def test_a_padded_record_is_1152_bytes() -> None:
    layout = RecordLayout(1, 1, (QWEN3_8B, QWEN3_8B), format="padded")
    assert layout.page_bytes == 2 * 1152


@pytest.mark.parametrize(("page_size", "record_format"), [(1, "packed"), (64, "padded")])
def test_a_page_shares_scales_only_where_it_is_a_chunk(page_size: int, record_format: str) -> None:
    with pytest.raises(ValueError, match="packed pages of 16 tokens or more"):
        RecordLayout(1, page_size, (RowFormat(8, 4, per_page=True),), format=record_format)  # type: ignore[arg-type]


def test_stock_capacity() -> None:
    assert tokens_in_gigabytes(8, 147_456) == 54_254


def row_spans(layout: RecordLayout, pages: int) -> Iterator[tuple[int, int]]:
    """(start, end) of every code and scale row of an arena; a row of a page once for each slot."""
    for plane in itertools.chain(*layout.planes(pages)):
        for slot in range(pages * layout.page_size):
            for layer in range(layout.layers):
                start = plane.offset(slot, layer, layout.page_size)
                yield start, start + plane.row_bytes


formats = st.builds(
    RowFormat, st.integers(1, 300), st.integers(1, 9).map(lambda n: 2 * n), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 5),
    page_size=st.sampled_from([1, 2, 3, 16, 48]),
    pages=st.integers(1, 4),
    rows=st.lists(formats, min_size=1, max_size=3),
    order=st.sampled_from(["page_first", "layer_first"]),
    record_format=st.sampled_from(["packed", "padded"]),
)
def test_rows_never_overlap_and_never_leave_the_arena(
    layers: int,
    page_size: int,
    pages: int,
    rows: list[RowFormat],
    order: str,
    record_format: str,
) -> None:
    if record_format == "padded" or page_size < CHUNK_TOKENS:
        rows = [row._replace(per_page=False) for row in rows]
    layout = RecordLayout(layers, page_size, tuple(rows), order, record_format)  # type: ignore[arg-type]
    spans = sorted(set(row_spans(layout, pages)))
    shared = sum(row.per_page for row in rows)
    slots = pages * page_size
    assert len(spans) == layers * (slots * (2 * len(rows) - shared) + pages * shared)
    assert spans[0][0] >= 0
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.arena_bytes(pages)
    # Scale rows hold bf16, which SGLang's bytes per token must not misalign.
    planes = layout.planes(pages)
    for plane in (part.scales for part in planes):
        strides = (plane.base, plane.page_stride, plane.layer_stride, plane.slot_stride)
        assert all(stride % 2 == 0 for stride in strides)
    assert layout.page_bytes % 128 == 0
    assert layout.page_bytes == layout.bytes_per_token * page_size
    if order == "page_first" and record_format == "packed":
        # A page is one span: page i's rows lie in [i, i + 1) * page_bytes.
        for plane in itertools.chain(*planes):
            assert plane.page_stride == layout.page_bytes


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_code_rows_stay_aligned_to_what_a_warp_loads(heads: int, head_dim: int) -> None:
    row = int8_row(heads, head_dim)
    unit = min(row.codes & -row.codes, 128)
    for order in ("page_first", "layer_first"):
        planes = RecordLayout(3, 4, (row, row), order).planes(5)  # type: ignore[arg-type]
        for plane in (part.codes for part in planes):
            assert all(plane.offset(s, layer, 4) % unit == 0 for s in range(20) for layer in (0, 2))


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_a_layer_of_a_page_of_sixteen_tokens_or_more_is_one_chunk(
    page_size: int, order: str
) -> None:
    """So the copy engine moves it as one piece; page_first: any run of a page's layers too."""
    rows = (RowFormat(80, 10), RowFormat(64, 2))
    layout = RecordLayout(5, page_size, rows, order)  # type: ignore[arg-type]
    used = page_size * (80 + 10 + 64 + 2)
    assert used <= layout.chunk_bytes < used + 16
    for page, layer in itertools.product(range(3), range(5)):
        first = layout.planes(3)[0].codes.offset(page * page_size, layer, page_size)
        assert first % 16 == 0
        at = page * layout.page_bytes + layer * layout.chunk_bytes
        assert first == (at if order == "page_first" else (layer * 3 + page) * layout.chunk_bytes)
        for plane in itertools.chain(*layout.planes(3)):
            for slot in range(page * page_size, (page + 1) * page_size):
                start = plane.offset(slot, layer, page_size)
                assert first <= start
                assert start + plane.row_bytes <= first + used


def test_k_and_v_rows_may_differ() -> None:
    layout = RecordLayout(2, 1, (RowFormat(64, 2), RowFormat(32, 4)))
    assert layout.page_bytes == 256  # 2 * (64 + 2 + 32 + 4) = 204, rounded up


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        RecordLayout(0, 1, (QWEN3_8B, QWEN3_8B))
