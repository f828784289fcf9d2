"""The host pools on SGLang's real base class: sizes, round trips, slots under pressure."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.codecs import TOKEN_CODECS, get_codec
from hiqcache.codecs.base import DTYPES, FP8_DTYPES
from hiqcache.compatibility import UnsupportedError
from hiqcache.record import kv_parts
from hiqcache.sglang.copying_pool import MHATokenToKVPoolHostCopy
from tests.sglang.builders import DIM, HEADS, LAYERS, buffer_info, host_pool, needs_accounts

STOCK_BYTES = 2 * LAYERS * HEADS * DIM * 2


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")


def arena_bytes(pool: MHATokenToKVPoolHost) -> int:
    return int(pool.kv_buffer.numel() * pool.kv_buffer.element_size())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_the_bytes_per_token_are_the_arenas(layout: str, page_size: int) -> None:
    info = buffer_info(page_size=page_size)
    stock = host_pool(info, page_size=page_size, layout=layout, cls=MHATokenToKVPoolHostCopy)
    ours = host_pool(info, page_size=page_size, layout=layout)
    assert ours.size == stock.size == ours.page_num * page_size
    assert ours.size_per_token * ours.size == arena_bytes(ours)
    # 384 B against 198 B per row, and what a page is rounded up by.
    assert 198 / 384 <= arena_bytes(ours) / arena_bytes(stock) < 0.6


def test_a_size_in_gigabytes_means_bytes() -> None:
    pool = host_pool(buffer_info(), size_gb=0.001)
    assert pool.size == int(1e6 // pool.size_per_token) + 1


@needs_accounts
def test_a_capacity_that_sglang_fixes_is_kept() -> None:
    assert host_pool(buffer_info(), host_token_capacity=40).size == 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("codec", TOKEN_CODECS)
def test_rows_come_back_as_the_codec_leaves_them_and_nothing_else_moves(
    codec: str, layout: str, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", codec)
    info = buffer_info(96, dtype=dtype, page_size=page_size)
    pool = host_pool(info, layout=layout, page_size=page_size, tokens=96)
    k = [t.clone() for t in info.buffers.k]
    v = [t.clone() for t in info.buffers.v]
    source = torch.randperm(96)[:32]
    slots = pool.alloc(64)[torch.randperm(64)[:32]]
    before = pool.kv_buffer.clone().fill_(0xA5)
    pool.kv_buffer.copy_(before)
    pool.backup_from_device_all_layer(None, slots, source, "kernel")

    # Only the named slots' rows changed.
    touched = torch.zeros_like(before, dtype=torch.bool)
    for plane in itertools.chain(*pool.layout_of_records.planes(pool.page_num)):
        for slot in slots.tolist():
            for layer in range(LAYERS):
                start = plane.offset(slot, layer, page_size)
                touched[start : start + plane.row_bytes] = True
    assert torch.equal(pool.kv_buffer[~touched], before[~touched])

    target = torch.arange(96)[torch.randperm(96)][:32]
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, target, layer, "kernel")
    reference = get_codec(codec)
    untouched = torch.ones(96, dtype=torch.bool)
    untouched[target] = False
    for buffers, originals in ((info.buffers.k, k), (info.buffers.v, v)):
        for now, then in zip(buffers, originals, strict=True):
            expected = reference.decode(*reference.encode(then[source]), dtype)
            assert torch.equal(now[target], expected)
            assert torch.equal(now[untouched], then[untouched])


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_whole_pages_of_an_fp8_l1_come_back_as_int4_leaves_them(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_whole_pages_come_back_as_int4_leaves_them(layout, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_whole_pages_come_back_as_int4_leaves_them(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int4")
    info = buffer_info(96, dtype=dtype, page_size=32)
    pool = host_pool(info, layout=layout, page_size=32, tokens=96, kv_dtype=dtype)
    source, target = torch.arange(64), torch.arange(95, 31, -1)
    rows = [buffer[source].clone() for side in (info.buffers.k, info.buffers.v) for buffer in side]
    slots = pool.alloc(64).view(2, 32).flip(0).flatten()
    pool.backup_from_device_all_layer(None, slots, source, "kernel")
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, target, layer, "kernel")
    buffers = [buffer for side in (info.buffers.k, info.buffers.v) for buffer in side]
    stores = get_codec("int4").stores(kv_parts(HEADS, DIM))
    for number, (buffer, then) in enumerate(zip(buffers, rows, strict=True)):
        codec = stores[number // LAYERS]
        # SGLang keeps fp8 in buffers of bytes.
        want = codec.decode(*codec.encode(then.view(dtype).view(2, 32, HEADS, DIM)), dtype)
        assert torch.equal(buffer[target], want.view(buffer.dtype).view(64, HEADS, DIM))


def test_int4_says_which_pages_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int4")
    with pytest.raises(UnsupportedError, match=r"32, 64, 128 tokens.*have 16.*--page-size 64"):
        host_pool(buffer_info(page_size=16), page_size=16)
    pool = host_pool(buffer_info(96, page_size=32), page_size=32, tokens=96)
    with pytest.raises(ValueError, match="whole pages of 32 tokens, and these are not: 31 slots"):
        pool.backup_from_device_all_layer(None, pool.alloc(32)[:31], torch.arange(31), "kernel")


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_k_and_v_of_different_widths(layout: str) -> None:
    info = buffer_info(64, v_head_dim=128)
    pool = host_pool(info, layout=layout)
    sides = (info.buffers.k, info.buffers.v)
    expected = [
        get_codec("int8").decode(*get_codec("int8").encode(b[:8]), b.dtype)
        for s in sides
        for b in s
    ]
    pool.backup_from_device_all_layer(None, slots := pool.alloc(8), torch.arange(8), "kernel")
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, torch.arange(20, 28), layer, "kernel")
    found = [b[20:28] for s in sides for b in s]
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_layers_of_a_draft_model_are_left_to_it() -> None:
    pool = host_pool(buffer_info())
    slots = pool.alloc(4)
    pool.backup_from_device_all_layer(None, slots, torch.arange(4), "kernel")
    pool.load_to_device_per_layer(None, slots, torch.arange(4), LAYERS, "kernel")  # no error


def test_no_tokens_is_no_work() -> None:
    pool = host_pool(buffer_info())
    none = torch.empty(0, dtype=torch.int64)
    pool.backup_from_device_all_layer(None, none, none, "kernel")
    pool.load_to_device_per_layer(None, none, none, 0, "kernel")


@pytest.mark.parametrize("codec", TOKEN_CODECS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_thousands_of_backups_frees_and_restores_never_mix_prefixes(
    codec: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random cycles at full occupancy, against a plain-Python record of who owns which slot."""
    monkeypatch.setenv("HIQCACHE_CODEC", codec)
    tokens = 32
    info = buffer_info(tokens, page_size=page_size)
    pool = host_pool(info, ratio=3, page_size=page_size, tokens=tokens)
    reference = get_codec(codec)
    chance = random.Random(5)
    held: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    restored = 0
    for step in range(3000):
        if held and chance.random() < 0.4:
            slots, expected = held[chance.choice(list(held))]
            rows = torch.tensor(chance.sample(range(tokens), len(slots)))
            for layer in range(LAYERS):
                pool.load_to_device_per_layer(None, slots, rows, layer, "kernel")
            found = [b[rows] for b in (*info.buffers.k, *info.buffers.v)]
            assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
            restored += 1
            continue
        count = page_size * chance.randint(1, 8 // page_size)
        while (slots := pool.alloc(count)) is None:
            victim = chance.choice(list(held))
            pool.free(held.pop(victim)[0])
        rows = torch.tensor(chance.sample(range(tokens), count))
        for buffer in (*info.buffers.k, *info.buffers.v):
            buffer[rows] = torch.randn(count, HEADS, DIM).to(torch.bfloat16)
        pool.backup_from_device_all_layer(None, slots, rows, "kernel")
        expected = [
            reference.decode(*reference.encode(b[rows]), torch.bfloat16)
            for b in (*info.buffers.k, *info.buffers.v)
        ]
        held[step] = (slots, expected)
    assert restored > 500


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_the_copying_pool_restores_bf16_exactly(layout: str, page_size: int) -> None:
    info = buffer_info(64, page_size=page_size)
    pool = host_pool(info, layout=layout, page_size=page_size, cls=MHATokenToKVPoolHostCopy)
    originals = [b.clone() for b in (*info.buffers.k, *info.buffers.v)]
    slots, rows = pool.alloc(32).flip(0), torch.arange(16, 48)
    pool.backup_from_device_all_layer(None, slots, rows, "kernel")
    for buffer in (*info.buffers.k, *info.buffers.v):
        buffer.fill_(-1)
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, rows, layer, "kernel")
    for now, then in zip((*info.buffers.k, *info.buffers.v), originals, strict=True):
        assert torch.equal(now[rows], then[rows])
        assert (now[:16] == -1).all()
    assert pool.get_size_per_token() == STOCK_BYTES
