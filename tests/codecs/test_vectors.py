"""The stored format, byte for byte; where a GPU sums a rotation, within the codec's bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiqcache.codecs import CODEC_NAMES, get_codec
from hiqcache.record import kv_parts

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())


def from_hex(text: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, so that NaN equals NaN."""
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['codec']}-{v['part']}-{v['dtype']}")
def test_the_same_bytes_everywhere(vector: dict[str, Any], device: torch.device) -> None:
    codec, dtype = get_codec(vector["codec"]), getattr(torch, vector["dtype"])
    shape = vector["shape"]
    formats = codec.row_formats(kv_parts(*shape[-2:]))
    stores = codec.of(formats[vector["part"] == "v"])
    stored = stores.stored(*shape[-2:])
    rows = from_hex(vector["rows"], dtype, shape)
    codes, scales = stores.encode(rows.to(device))
    assert (codes.dtype, scales.dtype) == (stored.codes_dtype, stored.scales_dtype)
    if device.type != "cpu" and codec.name != "int8":
        # A sum in another order may round to a neighbouring code or scale (RowCodec).
        restored = stores.decode(codes, scales, dtype).cpu()
        # Of what holds a NaN or an infinity it is NaN.
        assert not (stores.excess(rows, restored) > 0).any()
        assert torch.equal(restored.isnan(), from_hex(vector["restored"], dtype, shape).isnan())
        return
    lead = shape[:-2]
    wanted = from_hex(vector["codes"], stored.codes_dtype, [*lead, *stored.codes])
    assert torch.equal(bits(codes), bits(wanted))
    lead = lead[:-1] if formats[vector["part"] == "v"].per_page else lead
    wanted = from_hex(vector["scales"], stored.scales_dtype, [*lead, *stored.scales])
    assert torch.equal(bits(scales), bits(wanted))
    restored = stores.decode(codes, scales, dtype)
    wanted = from_hex(vector["restored"], dtype, shape)
    # A NaN's payload is the hardware's; that it is a NaN is the format's.
    assert torch.equal(restored.isnan().cpu(), wanted.isnan())
    assert torch.equal(restored.nan_to_num(nan=0).cpu(), wanted.nan_to_num(nan=0))


def test_every_codec_and_dtype_has_a_vector() -> None:
    named = {(v["codec"], v["dtype"]) for v in VECTORS}
    assert named == {(c, d) for c in CODEC_NAMES for d in ("bfloat16", "float16")}
