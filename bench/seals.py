"""What a page's seal costs on its way to storage and back, beside copying the page.

    python -m bench.seals [--out FILE]

Pages of Qwen3-8B's shape (int8). ``seal`` and ``prove`` are what each written and each read page
pays on a CPU core: XXH3 over its bytes. ``crc32`` is zlib's, for comparison, and ``copy`` a copy of
the page in memory. ``gather`` is what a layer_first pool pays more, to bring a page into the order
that storage keeps. Times are medians, in microseconds per page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.lab.shapes import QWEN3_8B
from hiqcache.codecs.formats import row_formats
from hiqcache.record import Order, RecordLayout
from hiqcache.storage.pages import PageImages
from hiqcache.storage.seal import SEAL_BYTES, sealed
from hiqcache.transfers.base import Arena

PAGE_SIZES = (1, 16, 64)
#: Pages that take turns, so that none is found in a cache.
ARENA_BYTES = 256 * 2**20
IDENTITY = "hiq1-int8-000000000000 kv " + "0" * 64


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.seals", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--repeats", type=int, default=200, help="pages of each (default 200)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # "a core": copies would take several
    figures = {
        "command": "python -m bench.seals",
        "environment": environment.describe(),
        "pages": [measure(size, given.repeats) for size in PAGE_SIZES],
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    return 0


def measure(page_size: int, repeats: int) -> dict[str, Any]:
    """Microseconds per page of ``page_size`` tokens, and what they are of the page's bytes."""
    images = _images(page_size, "page_first")
    pages = ARENA_BYTES // images.page_bytes
    scattered = _images(page_size, "layer_first")
    spare = torch.empty(images.page_bytes, dtype=torch.uint8)

    def each(work: Callable[[int], object]) -> float:
        times = []
        for turn in range(repeats):
            start = time.perf_counter()
            work(turn % pages)
            times.append(time.perf_counter() - start)
        return round(statistics.median(times) * 1e6, 2)

    found = {
        "seal": each(lambda page: images.seal(page, IDENTITY)),
        "prove": each(lambda page: sealed(IDENTITY, images.image(page))),
        "crc32": each(lambda page: zlib.crc32(images.image(page).numpy().data)),
        "copy": each(lambda page: spare.copy_(images.image(page))),
        "gather": each(lambda page: scattered.image(page)),
    }
    return {
        "page_size": page_size,
        "page_bytes": images.page_bytes,
        "us": found,
        "prove_gb_s": round(images.page_bytes / found["prove"] / 1e3, 2),
    }


def _images(page_size: int, order: Order) -> PageImages:
    rows = row_formats("int8", QWEN3_8B.parts)
    layout = RecordLayout(QWEN3_8B.layers, page_size, rows, order, trailer_bytes=SEAL_BYTES)
    pages = ARENA_BYTES // layout.page_bytes
    buffer = torch.randint(0, 256, (layout.arena_bytes(pages),), dtype=torch.uint8)
    return PageImages(Arena(buffer, layout, pages))


if __name__ == "__main__":
    sys.exit(main())
