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


def by_layers(layers: range, pages: int, chunk: int, most: int) -> Iterator[Batch]:
    """Batches of at most ``most`` bytes that cover ``pages`` pages of ``layers``, in layers' order.

    ``chunk``: bytes of one layer of one page. The first batch is one layer, so that attention can
    begin, each next has up to twice as many, and the last is one again, since nothing runs beside
    what follows it. A layer that is too large is cut by pages.
    """
    fitting = most // chunk
    if pages > fitting:
        parts = -(-pages // fitting)
        for layer in layers:
            for part in range(parts):
                start = pages * part // parts
                yield Batch(layer, 1, start, pages * (part + 1) // parts - start)
        return
    layer, group = layers.start, 1
    while layer < layers.stop:
        left = layers.stop - layer
        count = min(group, left - 1 if left > 1 and group > 1 else left, fitting // pages)
        yield Batch(layer, count, 0, pages)
        layer += count
        group *= 2


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
