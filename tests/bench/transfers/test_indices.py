"""What a timed transfer moves: whole pages, each once."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench.transfers.indices import INDEX_SETS, SLOTS, Slots, index_sets


def whole_pages(slots: torch.Tensor, page: int) -> list[int]:
    """The pages that ``slots`` name in their slots' order."""
    found = slots.view(-1, page)
    assert torch.equal(found, found[:, :1] + torch.arange(page))
    assert not (found[:, 0] % page).any()
    return (found[:, 0] // page).tolist()


@pytest.mark.parametrize(
    ("slots", "page", "tokens"), [*itertools.product(SLOTS, (64, 16, 1), (128, 2048))]
)
def test_sets_name_whole_pages_once(slots: Slots, page: int, tokens: int) -> None:
    host_slots, device_slots = 27_136, 16_384
    sets = index_sets(tokens, slots, host_slots, device_slots, page, "cpu")
    assert len(sets) == INDEX_SETS
    for chosen in sets:
        assert torch.equal(chosen.host, chosen.host_on_cpu)
        for found, of in ((chosen.host, host_slots), (chosen.rows, device_slots)):
            assert found.dtype == torch.int64
            pages = whole_pages(found, page)
            assert len(set(pages)) == tokens // page
            assert 0 <= min(pages) <= max(pages) < of // page
            in_sequence = pages == list(range(pages[0], pages[0] + len(pages)))
            assert in_sequence == (slots == "sequential")
    assert len({tuple(chosen.host.tolist()) for chosen in sets}) == INDEX_SETS
    assert len({tuple(chosen.rows.tolist()) for chosen in sets}) == INDEX_SETS


def test_host_and_device_pages_are_chosen_apart() -> None:
    chosen = index_sets(2048, "random", 16_384, 16_384, 64, "cpu")[0]
    assert not torch.equal(chosen.host, chosen.rows)


@pytest.mark.parametrize("tokens", [100, 16_448])
def test_parts_of_pages_and_pools_that_are_too_small_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="whole pages of 64"):
        index_sets(tokens, "random", 27_136, 16_384, 64, "cpu")
