"""Host pools of latent rows (MLA) on SGLang's real base class: sizes, round trips, ranks."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from hiqcache.codecs import TOKEN_CODECS, get_codec
from hiqcache.compatibility import UnsupportedError
from hiqcache.sglang.copying_pool import MLATokenToKVPoolHostCopy
from hiqcache.sglang.host_pool import QuantisedMLATokenToKVPoolHost
from hiqcache.transfers.base import in_blocks
from tests.sglang.builders import (
    LATENT,
    LAYERS,
    ROPE,
    host_pool,
    latent_info,
    needs_latent_rows,
)

pytestmark = needs_latent_rows

LAYOUTS = ["page_first", "page_first_direct", "layer_first"]


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")


def latent_pool(info: Any, cls: type = QuantisedMLATokenToKVPoolHost, **kwargs: Any) -> Any:
    return host_pool(info, cls=cls, target_layer_num=LAYERS, **kwargs)


def restored(codec: str, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[n, 1, 576]`` as the codec leaves them: latent and rope apart."""
    reference = get_codec(codec)
    parts = []
    for part in rows.split([LATENT, ROPE], dim=-1):
        back = reference.decode(*reference.encode(in_blocks(part)), rows.dtype)
        parts.append(back.reshape(part.shape))
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_per_token_are_the_arenas(layout: str, page_size: int) -> None:
    info = latent_info(64, page_size=page_size)
    stock = latent_pool(info, MLATokenToKVPoolHostCopy, page_size=page_size, layout=layout)
    ours = latent_pool(info, page_size=page_size, layout=layout)
    assert ours.size == stock.size == ours.page_num * page_size
    arenas = [int(pool.kv_buffer.nbytes) for pool in (ours, stock)]
    assert ours.size_per_token * ours.size == arenas[0]
    assert stock.size_per_token == LAYERS * 1152
    # 512 + 64 codes, a scale for each block of 128 and one for the rope: 586 B per layer.
    assert LAYERS * 586 <= ours.size_per_token <= LAYERS * 586 + 128 // page_size
    if page_size == 64:
        assert arenas[1] / arenas[0] == pytest.approx(1.966, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", TOKEN_CODECS)
def test_rows_come_back_as_the_codec_leaves_them_and_nothing_else_moves(
    codec: str, layout: str, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", codec)
    info = latent_info(96, dtype=dtype, page_size=page_size)
    pool = latent_pool(info, layout=layout, page_size=page_size, tokens=96)
    originals = [rows.clone() for rows in info.buffers]
    source = torch.randperm(96)[:32]
    slots = pool.alloc(64)[torch.randperm(64)[:32]]
    pool.kv_buffer.fill_(0xA5)
    before = pool.kv_buffer.clone()
    pool.backup_from_device_all_layer(None, slots, source, "kernel")

    touched = torch.zeros_like(before, dtype=torch.bool)
    for plane in itertools.chain(*pool.layout_of_records.planes(pool.page_num)):
        for slot in slots.tolist():
            for layer in range(LAYERS):
                start = plane.offset(slot, layer, page_size)
                touched[start : start + plane.row_bytes] = True
    assert torch.equal(pool.kv_buffer[~touched], before[~touched])

    target = torch.randperm(96)[:32]
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, target, layer, "kernel")
    untouched = torch.ones(96, dtype=torch.bool)
    untouched[target] = False
    for now, then in zip(info.buffers, originals, strict=True):
        assert torch.equal(now[target], restored(codec, then[source]))
        assert torch.equal(now[untouched], then[untouched])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copying_pool_restores_bf16_exactly(layout: str, page_size: int) -> None:
    info = latent_info(64, page_size=page_size)
    pool = latent_pool(info, MLATokenToKVPoolHostCopy, layout=layout, page_size=page_size)
    originals = [rows.clone() for rows in info.buffers]
    slots, rows = pool.alloc(32).flip(0), torch.arange(16, 48)
    pool.backup_from_device_all_layer(None, slots, rows, "kernel")
    for buffer in info.buffers:
        buffer.fill_(-1)
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, slots, rows, layer, "kernel")
    for now, then in zip(info.buffers, originals, strict=True):
        assert torch.equal(now[rows], then[rows])
        assert (now[:16] == -1).all()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_ranks_that_share_a_page_keep_their_slots_of_it(layout: str) -> None:
    """Decode context parallelism: of each page's slots, a rank holds every second here."""
    shared = 32  # slots of a page as the radix cache counts them
    slots, rows = torch.arange(shared, 3 * shared), torch.arange(2 * shared, 4 * shared)
    for rank in range(2):
        info = latent_info(128, page_size=16)
        originals = [buffer.clone() for buffer in info.buffers]
        pool = latent_pool(
            info, layout=layout, page_size=shared, tokens=64, dcp_size=2, dcp_rank=rank
        )
        assert pool.page_size == pool.layout_of_records.page_size == 16
        pool.backup_from_device_all_layer(None, slots, rows, "kernel")
        for buffer in info.buffers:
            buffer.fill_(-1)
        for layer in range(LAYERS):
            pool.load_to_device_per_layer(None, slots, rows, layer, "kernel")
        own = rows[rows % 2 == rank] // 2
        for now, then in zip(info.buffers, originals, strict=True):
            assert torch.equal(now[own], restored("int8", then[own]))
            others = torch.ones(128, dtype=torch.bool)
            others[own] = False
            assert (now[others] == -1).all()


def test_latent_rows_that_are_not_served() -> None:
    from sglang.srt.mem_cache.device_pool_info import MLASplitBuffers
    from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation

    info = latent_info(64)
    split = MLASplitBuffers(
        k=torch.zeros(LAYERS, 64, 1, LATENT),
        v=torch.zeros(LAYERS, 64, 1, ROPE),
        index_k=None,
        index_scales=None,
        index_layer_indices=(),
        k_width=LATENT,
        v_width=ROPE,
        index_width=0,
    )
    allocation = MLAHostAllocation(
        dtype=torch.bfloat16,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        size_per_token=LAYERS * 1152,
    )
    cases = [
        (msgspec.structs.replace(info, packed_fp8=True), "latent rows of 576"),
        (msgspec.structs.replace(info, dtype=torch.uint8), "torch.uint8.*--kv-cache-dtype auto"),
        (msgspec.structs.replace(info, buffers=split), "apart"),
        (allocation, "no rows.*keeps the rows of each rank"),
    ]
    for refused, message in cases:
        with pytest.raises(UnsupportedError, match=message) as caught:
            latent_pool(refused)
        assert "HIQCACHE_CODEC" in str(caught.value)
    with pytest.raises(UnsupportedError, match="1 MTP draft layer"):
        latent_pool(info, draft_buffer_infos=(info,))
    with pytest.raises(UnsupportedError, match=r"--dcp-size.*one rank holds"):
        latent_pool(info, page_size=32, dcp_size=2, allocator_type="file")


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_stored_page_restores_elsewhere(page_size: int) -> None:
    """Through the pages that L3 storage asks for, one piece each."""
    info = latent_info(64, page_size=page_size)
    stored, other = (
        latent_pool(info, page_size=page_size, allocator_type="file") for _ in range(2)
    )
    with get_parallel().override(attn_tp_size=1):
        assert stored.storage_format_tag == other.storage_format_tag
    rows = torch.arange(page_size)
    slots, place = stored.alloc(page_size), other.alloc(2 * page_size)[page_size:]
    stored.backup_from_device_all_layer(None, slots, rows, "kernel")
    page = stored.get_data_page(int(slots[0]))
    assert page.numel() == stored.get_dummy_flat_data_page().numel()
    pointers, sizes = stored.get_page_buffer_meta(slots)
    assert len(pointers) == 1
    assert sizes == [page.numel()]
    other.set_from_flat_data_page(int(place[0]), page.clone())
    expected = [restored("int8", buffer[rows]) for buffer in info.buffers]
    for layer in range(LAYERS):
        other.load_to_device_per_layer(None, place, rows, layer, "kernel")
    for buffer, then in zip(info.buffers, expected, strict=True):
        assert torch.equal(buffer[rows], then)


def test_rows_that_only_a_stock_pool_has() -> None:
    pool = latent_pool(latent_info(64))
    for ask in (pool.get_contiguous_buf_infos, lambda: pool.host_kv_data_refs):
        with pytest.raises(UnsupportedError, match="int8 records"):
            ask()
