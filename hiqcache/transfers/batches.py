"""How a transfer by the copy engine is cut into batches. Plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Batch(NamedTuple):
    """``layers`` layers from ``layer`` on of ``pages`` of a transfer's pages from ``page`` on."""

    layer: int
    layers: int
    page: int
    pages: int


def cut(layers: range, pages: int, chunk: int, most: int) -> Iterator[Batch]:
    """Batches of at most ``most`` bytes that cover ``pages`` pages of ``layers``, in layers' order.

    ``chunk``: bytes of one layer of one page. The first batch is one layer, so that attention (or
    the link) can begin, each next has up to twice as many, and the last is one again, since nothing
    runs beside what follows it. A layer that is too large is cut by pages.
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
