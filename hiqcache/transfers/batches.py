"""How transfers by the copy engine are cut into batches. Plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Batch(NamedTuple):
    """``layers`` layers from ``layer`` on of ``pages`` of a transfer's pages from ``page`` on."""

    layer: int
    layers: int
    page: int
    pages: int


#: What the first batch of a restore and the last hold at most, where a layer is less: some 40 us of
#: a PCIe 5 link, about what the CPU takes to enqueue a batch.
EDGE_BYTES = 2_000_000
#: How many times the layers of a batch the next may have.
GROWTH = 4


def by_layers(
    layers: range, pages: int, chunk: int, most: int, edge: int = EDGE_BYTES
) -> Iterator[Batch]:
    """Batches of at most ``most`` bytes that cover ``pages`` pages of ``layers``, in layers' order.

    ``chunk``: bytes of one layer of one page. The first batch is small, so that attention begins,
    each next has up to GROWTH times as many layers, and the last is small again, since nothing runs
    beside what follows it: one layer, or as many as ``edge`` bytes hold. A layer that is too large
    is cut by pages.
    """
    fitting = most // chunk
    if pages > fitting:
        parts = -(-pages // fitting)
        for layer in layers:
            for part in range(parts):
                start = pages * part // parts
                yield Batch(layer, 1, start, pages * (part + 1) // parts - start)
        return
    longest = fitting // pages
    small = min(max(1, edge // (pages * chunk)), longest)
    layer, group = layers.start, small
    while layer < layers.stop:
        left = layers.stop - layer
        count = min(group, left if left <= small else left - small, longest)
        yield Batch(layer, count, 0, pages)
        layer += count
        group *= GROWTH


def by_pages(layers: int, pages: int, chunk: int, most: int) -> Iterator[Batch]:
    """As by_layers, of all layers, in pages' order: a page's layers follow each other.

    So a batch has few pieces, and those are large. The first is one page, so that the link can
    begin. A page that is too large is cut by layers, evenly.
    """
    runs = -(-layers // (most // chunk))
    longest = -(-layers // runs)
    fitting = most // (longest * chunk)
    page = 0
    while page < pages:
        count = min(fitting, pages - page) if page else 1
        for layer in range(0, layers, longest):
            yield Batch(layer, min(longest, layers - layer), page, count)
        page += count
