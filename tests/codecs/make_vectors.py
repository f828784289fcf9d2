"""Writes vectors.json, the fixed inputs and bytes that pin the stored format.

    python tests/codecs/make_vectors.py

Run it only for a new codec: bytes that change are a new format, under a new name.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from hiqcache.codecs import CODEC_NAMES, get_codec
from hiqcache.codecs.base import DTYPES
from hiqcache.record import kv_parts

FILE = Path(__file__).with_name("vectors.json")
HEADS, DIM = 3, 64


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """[8, 3, 64] rows: normal, tiny, huge, outliers, zeros, halves of a step, non-finite."""
    generator = torch.Generator().manual_seed(20261130)
    rows = torch.randn(8, HEADS, DIM, generator=generator)
    largest = torch.finfo(dtype).max
    rows[1] *= 1e-6
    rows[2] *= largest / 8
    rows[3, :, 5] *= 250
    rows[4] = 0
    rows[5] = torch.arange(DIM) - 31.5
    rows[6, 0, 3], rows[6, 1, 4], rows[6, 2, 5] = torch.nan, torch.inf, -torch.inf
    rows[7] = torch.where(rows[7] > 0, largest, -largest)
    safe = torch.where(rows.isfinite(), rows.clamp(-largest, largest), rows)
    return safe.to(dtype)


def pages(dtype: torch.dtype) -> torch.Tensor:
    """[2, 32, 3, 64] rows: a page with a constant, outliers, zeros and sinks; one of all kinds."""
    generator = torch.Generator().manual_seed(20261203)
    rows = torch.randn(2, 32, HEADS, DIM, generator=generator)
    rows[0, ..., 3] += 40
    rows[0, ..., 9] *= 30
    rows[0, ..., 11] = 0
    rows[0, :2] /= 50
    rows = rows.to(dtype)
    rows[1, 4:12] = inputs(dtype)
    return rows


def as_hex(tensor: torch.Tensor) -> str:
    """The bytes of ``tensor``, little-endian, in order."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes().hex()


def vectors() -> list[dict[str, Any]]:
    """A vector for each codec, dtype and kind of row: rows, codes, scales and restored rows."""
    found = []
    for name in CODEC_NAMES:
        codec = get_codec(name)
        kinds = dict(zip(codec.row_formats(kv_parts(HEADS, DIM)), ("k", "v"), strict=True))
        for (row, part), dtype in itertools.product(kinds.items(), DTYPES):
            rows = inputs(dtype) if codec.page_sizes is None else pages(dtype)
            codes, scales = codec.of(row).encode(rows)
            found.append(
                {
                    "codec": name,
                    "part": part if len(kinds) > 1 else "all",
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": list(rows.shape),
                    "rows": as_hex(rows),
                    "codes": as_hex(codes),
                    "scales": as_hex(scales),
                    "restored": as_hex(codec.of(row).decode(codes, scales, dtype)),
                }
            )
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n")
