"""Batches of the copy engine: every layer of every page once, in order, in pieces that fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hiqcache.transfers.batches import Batch, by_layers, by_pages


def moved(batches: list[Batch]) -> list[tuple[int, int]]:
    return [
        (layer, page)
        for batch in batches
        for layer in range(batch.layer, batch.layer + batch.layers)
        for page in range(batch.page, batch.page + batch.pages)
    ]


@given(
    first=st.integers(0, 3),
    layers=st.integers(1, 40),
    pages=st.integers(1, 50),
    chunk=st.integers(1, 10),
    room=st.integers(1, 90),
    edge=st.integers(0, 60),
)
def test_every_layer_of_every_page_is_moved_once(
    first: int, layers: int, pages: int, chunk: int, room: int, edge: int
) -> None:
    most = max(room, chunk)
    batches = list(by_layers(range(first, first + layers), pages, chunk, most, edge))
    assert sorted(moved(batches)) == [
        (layer, page) for layer in range(first, first + layers) for page in range(pages)
    ]
    assert all(0 < batch.layers * batch.pages * chunk <= most for batch in batches)
    # A layer is complete once the batches that begin with it or before have come.
    starts = [batch.layer for batch in batches]
    assert starts == sorted(starts)
    # The first layer waits for no more than the edge, nor is more work left after the copies.
    for batch in (batches[0], batches[-1]):
        assert batch.layers == 1 or batch.layers * batch.pages * chunk <= edge


@given(
    layers=st.integers(1, 40),
    pages=st.integers(1, 50),
    chunk=st.integers(1, 10),
    room=st.integers(1, 900),
)
def test_backups_go_page_by_page(layers: int, pages: int, chunk: int, room: int) -> None:
    most = max(room, chunk)
    batches = list(by_pages(layers, pages, chunk, most))
    assert sorted(moved(batches)) == [
        (layer, page) for layer in range(layers) for page in range(pages)
    ]
    assert all(0 < batch.layers * batch.pages * chunk <= most for batch in batches)
    assert batches[0].pages == 1
    if most >= layers * chunk:
        assert all(batch.layers == layers for batch in batches)


def cut(layers: int, pages: int, most: int, edge: int = 0) -> list[int]:
    return [batch.layers for batch in by_layers(range(layers), pages, 1, most, edge)]


def test_short_transfers_take_few_calls_and_long_ones_small_steps() -> None:
    assert cut(36, 2, 1000) == [1, 4, 16, 14, 1]
    assert cut(36, 2, 1000, edge=15) == [7, 22, 7]
    assert cut(5, 2, 1000, edge=15) == [5]
    assert cut(36, 2, 1000, edge=1000) == [36]
    assert cut(8, 32, 70) == [1, 2, 2, 2, 1]
    assert cut(8, 32, 70, edge=200) == [2, 2, 2, 2]
    assert [batch.pages for batch in by_layers(range(1), 100, 1, 70)] == [50, 50]
