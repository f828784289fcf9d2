"""Images of pages: the same bytes from both orders of arena, and seals that no change survives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiqcache.record import RecordLayout, RowFormat
from hiqcache.storage.pages import PageImages, holes
from hiqcache.storage.seal import SEAL_BYTES
from hiqcache.transfers.base import Arena

PAGES = 3

row_formats = st.builds(
    RowFormat, st.integers(1, 40), st.sampled_from([0, 2, 4, 6]), per_page=st.just(False)
)
layouts = st.builds(
    RecordLayout,
    layers=st.integers(1, 4),
    page_size=st.sampled_from([1, 3, 8, 16, 17]),
    rows=st.lists(row_formats, min_size=1, max_size=3).map(tuple),
    trailer_bytes=st.just(SEAL_BYTES),
) | st.builds(  # scales of a whole page
    RecordLayout,
    layers=st.integers(1, 4),
    page_size=st.sampled_from([16, 17]),
    rows=st.tuples(row_formats.map(lambda row: row._replace(per_page=True)), row_formats),
    trailer_bytes=st.just(SEAL_BYTES),
)


def filled(layout: RecordLayout, rows: bool = True) -> Arena:
    """An arena of noise; rows alone are the same in every order."""
    noise = torch.randint(0, 256, (layout.arena_bytes(PAGES),), dtype=torch.uint8)
    arena = Arena(noise, layout, PAGES)
    if rows:
        generator = torch.Generator().manual_seed(1)
        for view in rows_of(arena):
            view.copy_(torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8))
    return arena


def rows_of(arena: Arena) -> list[torch.Tensor]:
    return [
        arena.view(plane, torch.uint8, plane.row_bytes)[:, :, : None if plane.slot_stride else 1]
        for planes in arena.planes
        for plane in planes
        if plane.row_bytes
    ]


@given(layouts)
def test_both_orders_make_the_same_images_and_read_each_others(layout: RecordLayout) -> None:
    other = dataclasses.replace(layout, order="layer_first")
    arenas = [filled(layout), filled(other)]
    made = []
    for arena in arenas:
        images = PageImages(arena)
        for page in range(PAGES):
            images.seal(page, f"page {page}")
        made.append([images.image(page).clone() for page in range(PAGES)])
    for one, two in zip(*made, strict=True):
        assert torch.equal(one, two)
    for target in (layout, other):
        arena = filled(target, rows=False)
        images = PageImages(arena)
        images.store(1, made[0][1])
        assert images.sealed(1, "page 1")
        assert not images.sealed(1, "page 2")
        for found, expected in zip(rows_of(arena), rows_of(arenas[0]), strict=True):
            assert torch.equal(found[1], expected[1])


@given(layouts, st.data())
def test_no_changed_byte_passes(layout: RecordLayout, data: st.DataObject) -> None:
    images = PageImages(filled(layout))
    images.seal(0, "this page")
    image = images.image(0)
    assert images.sealed(0, "this page")
    at = data.draw(st.integers(0, layout.page_bytes - 1))
    image[at] ^= data.draw(st.integers(1, 255))
    assert not images.sealed(0, "this page")


@given(layouts)
def test_holes_are_what_rows_leave(layout: RecordLayout) -> None:
    taken = torch.zeros(layout.page_bytes, dtype=torch.bool)
    for planes in layout.planes(1):
        for plane in planes:
            for slot in range(layout.page_size):
                for layer in range(layout.layers):
                    start = plane.offset(slot, layer, layout.page_size)
                    taken[start : start + plane.row_bytes] = True
    for start, stop in holes(layout):
        assert not taken[start:stop].any()
        taken[start:stop] = True
    assert taken[: -layout.trailer_bytes].all()
    assert not taken[-layout.trailer_bytes :].any()


def test_an_image_of_another_size_is_refused() -> None:
    layout = RecordLayout(2, 16, (RowFormat(64, 2),), trailer_bytes=SEAL_BYTES)
    images = PageImages(filled(layout))
    with pytest.raises(ValueError, match="has 2176 B, this image 2303 B"):
        images.store(0, torch.zeros(2303, dtype=torch.uint8))


def test_pages_without_room_for_a_seal_are_refused() -> None:
    with pytest.raises(ValueError, match="16 B for their seal"):
        PageImages(filled(RecordLayout(2, 16, (RowFormat(64, 2),))))
