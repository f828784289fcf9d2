"""What the adapter of the installed release says of SGLang's own device pools."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hiqcache.codecs import get_codec
from hiqcache.compatibility import UnsupportedError
from hiqcache.sglang.adapters import ADAPTERS, adapter, adapter_for
from hiqcache.sglang.rows import row_dtype
from hiqcache.sglang.source import Source
from hiqcache.sglang.support import require_plain_rows
from tests.sglang.assembled import apart, mha, plain, refused

PACKAGE = Path(__file__).parents[2] / "hiqcache"
#: Where releases are told apart, and where texts for people name some.
KNOW_RELEASES = {"sglang/__init__.py", "sglang/adapters/__init__.py"}
SAY_RELEASES = {"features.py", "settings.py"}
HEADS, DIM, LAYERS = 2, 64, 3


INT8 = get_codec("int8")


def device_pool(dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> MHATokenToKVPool:
    return MHATokenToKVPool(16, 1, dtype, HEADS, DIM, LAYERS, "cpu", False, **kwargs)


def test_the_installed_release_is_served_by_its_own_adapter() -> None:
    source = Source.installed()
    assert source is not None
    assert adapter() is adapter_for(source) is ADAPTERS[source.version]


@pytest.mark.parametrize("width", [DIM, 2 * DIM])
def test_rows_are_the_device_pools_own_memory(width: int) -> None:
    pool = device_pool(v_head_dim=width)
    rows = adapter().rows_of_device_pool(pool)
    require_plain_rows(rows, rows.dtype, INT8)
    assert [buffer.data_ptr() for buffer in rows.buffers.k] == [b.data_ptr() for b in pool.k_buffer]
    assert [buffer.data_ptr() for buffer in rows.buffers.v] == [b.data_ptr() for b in pool.v_buffer]
    for buffers, heads_and_width in (
        (rows.buffers.k, (rows.head_num, rows.head_dim)),
        (rows.buffers.v, (rows.head_num, rows.v_head_dim)),
    ):
        assert len(buffers) == LAYERS
        for buffer in buffers:
            assert (buffer.shape[1:], buffer.dtype) == (heads_and_width, rows.dtype)
            assert buffer.device == rows.device


def _scaled() -> MHATokenToKVPool:
    pool = device_pool()
    pool.k_scale_buffer = pool.v_scale_buffer = [torch.ones(17, HEADS)] * LAYERS
    return pool


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda: device_pool(torch.float8_e4m3fn), "e4m3fn: .*HIQCACHE_CODEC=int4"),
        (lambda: device_pool(kv_cache_layout="hnd"), "layout 'hnd'"),
        (_scaled, "quantised itself"),
    ],
    ids=["fp8", "hnd", "scales"],
)
def test_rows_of_other_kinds_are_told_apart(pool: Any, message: str) -> None:
    device = pool()
    rows = adapter().rows_of_device_pool(device)
    with pytest.raises(UnsupportedError, match=message):
        require_plain_rows(rows, row_dtype(rows, device.dtype), INT8)


def packed(page_size: int) -> CacheInitParams:
    params = plain(page_size)
    params.mtp_draft_device_pools = (mha(1, page_size),)
    return params


def test_drafts_in_the_targets_rows_are_refused_by_sglangs_own_assembly() -> None:
    assert "1 MTP draft layer" in apart(refused, packed)


def _releases_named(source: str) -> Iterator[str]:
    """Strings of ``source`` that hold a release of SGLang, docstrings aside."""
    tree = ast.parse(source)
    told = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) not in told and re.search(r"\b0\.5\.\d+", node.value):
            yield node.value


def test_nothing_but_the_adapters_knows_releases() -> None:
    knowing = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if list(_releases_named(file.read_text()))
    }
    assert knowing - SAY_RELEASES == KNOW_RELEASES
    assert list(_releases_named('"""0.5.23."""\nif version("sglang") == "0.5.22":\n    pass'))
