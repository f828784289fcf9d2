"""The stored format, byte for byte, on every device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiqcache.codecs import CODEC_NAMES, get_codec

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())


def from_hex(text: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, so that NaN equals NaN."""
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['codec']}-{v['dtype']}")
def test_the_same_bytes_everywhere(vector: dict[str, Any], device: torch.device) -> None:
    codec, dtype = get_codec(vector["codec"]), getattr(torch, vector["dtype"])
    shape = vector["shape"]
    rows = from_hex(vector["rows"], dtype, shape)
    codes, scales = codec.encode(rows.to(device))
    assert torch.equal(bits(codes), bits(from_hex(vector["codes"], torch.int8, shape)))
    expected = from_hex(vector["scales"], torch.bfloat16, shape[:-1])
    assert torch.equal(bits(scales), bits(expected))
    restored = codec.decode(codes, scales, dtype)
    wanted = from_hex(vector["restored"], dtype, shape)
    # A NaN's payload is the hardware's; that it is a NaN is the format's.
    assert torch.equal(restored.isnan().cpu(), wanted.isnan())
    assert torch.equal(restored.nan_to_num(nan=0).cpu(), wanted.nan_to_num(nan=0))


def test_every_codec_and_dtype_has_a_vector() -> None:
    named = {(v["codec"], v["dtype"]) for v in VECTORS}
    assert named == {(c, d) for c in CODEC_NAMES for d in ("bfloat16", "float16")}
