"""Record layouts: published sizes, and rows that never overlap nor leave the arena."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs.formats import int8_row
from hiqcache.record import RecordLayout, RowFormat, tokens_in_gigabytes

QWEN3_8B = int8_row(heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("record_format", "bytes_per_token", "tokens"),
    [("packed", 74_880, 106_838), ("padded", 82_944, 96_451)],
)
@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_published_sizes_of_qwen3_8b(
    record_format: str, bytes_per_token: int, tokens: int, order: str, page_size: int
) -> None:
    layout = RecordLayout(36, page_size, QWEN3_8B, QWEN3_8B, order, record_format)  # type: ignore[arg-type]
    assert layout.bytes_per_token == bytes_per_token
    if page_size == 1:
        assert tokens_in_gigabytes(8, layout.bytes_per_token) == tokens


def test_a_padded_record_is_1152_bytes() -> None:
    layout = RecordLayout(1, 1, QWEN3_8B, QWEN3_8B, format="padded")
    assert layout.page_bytes == 2 * 1152


def test_stock_capacity() -> None:
    assert tokens_in_gigabytes(8, 147_456) == 54_254


def row_spans(layout: RecordLayout, pages: int) -> Iterator[tuple[int, int]]:
    """(start, end) of every code and scale row of an arena."""
    for plane in layout.planes(pages):
        for slot in range(pages * layout.page_size):
            for layer in range(layout.layers):
                start = plane.offset(slot, layer, layout.page_size)
                yield start, start + plane.row_bytes


formats = st.builds(RowFormat, st.integers(1, 300), st.integers(1, 9).map(lambda n: 2 * n))


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 5),
    page_size=st.sampled_from([1, 2, 3, 16, 48]),
    pages=st.integers(1, 4),
    k=formats,
    v=formats,
    order=st.sampled_from(["page_first", "layer_first"]),
    record_format=st.sampled_from(["packed", "padded"]),
)
def test_rows_never_overlap_and_never_leave_the_arena(
    layers: int,
    page_size: int,
    pages: int,
    k: RowFormat,
    v: RowFormat,
    order: str,
    record_format: str,
) -> None:
    layout = RecordLayout(layers, page_size, k, v, order, record_format)  # type: ignore[arg-type]
    spans = sorted(row_spans(layout, pages))
    assert spans[0][0] >= 0
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.arena_bytes(pages)
    # Scale rows hold bf16, which SGLang's bytes per token must not misalign.
    planes = layout.planes(pages)
    for plane in (planes.k_scales, planes.v_scales):
        strides = (plane.base, plane.page_stride, plane.layer_stride, plane.slot_stride)
        assert all(stride % 2 == 0 for stride in strides)
    assert layout.page_bytes % 128 == 0
    assert layout.page_bytes == layout.bytes_per_token * page_size
    if order == "page_first" and record_format == "packed":
        # A page is one span: page i's rows lie in [i, i + 1) * page_bytes.
        for plane in planes:
            assert plane.page_stride == layout.page_bytes


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_code_rows_stay_aligned_to_what_a_warp_loads(heads: int, head_dim: int) -> None:
    row = int8_row(heads, head_dim)
    unit = min(row.codes & -row.codes, 128)
    for order in ("page_first", "layer_first"):
        planes = RecordLayout(3, 4, row, row, order).planes(5)  # type: ignore[arg-type]
        for plane in (planes.k_codes, planes.v_codes):
            assert all(plane.offset(s, layer, 4) % unit == 0 for s in range(20) for layer in (0, 2))


def test_k_and_v_rows_may_differ() -> None:
    layout = RecordLayout(2, 1, RowFormat(64, 2), RowFormat(32, 4))
    assert layout.page_bytes == 256  # 2 * (64 + 2 + 32 + 4) = 204, rounded up


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        RecordLayout(0, 1, QWEN3_8B, QWEN3_8B)
