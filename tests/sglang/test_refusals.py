"""What is not served is refused at construction, with what was found and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVScaleBuffers,
    KVScaleLayout,
)

from hiqcache.sglang import plugin, support
from hiqcache.sglang.support import UnsupportedError
from tests.sglang.builders import LAYERS, buffer_info, host_pool

WAY_OUT = "HIQCACHE_CODEC"


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")


def refused(message: str, info: Any, **kwargs: Any) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        host_pool(info, **kwargs)
    assert WAY_OUT in str(caught.value)


def test_asymmetric_heads() -> None:
    refused("K heads have 64 elements and V heads 128", buffer_info(v_head_dim=128))


def test_a_quantised_l1() -> None:
    scales = KVScaleBuffers(
        k=tuple(torch.ones(64, 3) for _ in range(LAYERS)),
        v=tuple(torch.ones(64, 3) for _ in range(LAYERS)),
        layout=KVScaleLayout.TOKEN,
    )
    refused(
        "quantised itself.*--kv-cache-dtype auto",
        msgspec.structs.replace(buffer_info(), scales=scales),
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    refused("is torch.float.*bfloat16", buffer_info(dtype=dtype))


def test_packed_draft_layers() -> None:
    refused("1 MTP draft layer", buffer_info(), draft_buffer_infos=(buffer_info(layers=1),))


def test_layer_sharded_pools() -> None:
    refused(f"2 of this rank's {LAYERS} layers", buffer_info(layers=2))


def test_unknown_device_layouts() -> None:
    refused("layout 'hnd'", buffer_info(layout=KVBufferLayout.HND))


@pytest.mark.parametrize("layout", ["page_head", "page_first_kv_split", "page_unified", "new"])
def test_unknown_host_layouts(layout: str) -> None:
    refused(f"--hicache-mem-layout {layout}.*page_first", buffer_info(), layout=layout)


def test_l3_storage() -> None:
    refused("--hicache-storage-backend file", buffer_info(), allocator_type="file")
    with pytest.raises(UnsupportedError, match="storage-backend mooncake"):
        plugin._check_storage(None, "mooncake")


def test_a_head_dim_unfit_for_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8-rot")
    refused("power of two; this model's is 80", buffer_info(head_dim=80))


def test_an_unknown_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int7")
    with pytest.raises(ValueError, match="HIQCACHE_CODEC='int7'"):
        host_pool(buffer_info())


@pytest.mark.parametrize("transfer", ["fused", "mover"])
def test_gpu_transfers_on_a_cpu(transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_TRANSFER", transfer)
    with pytest.raises(UnsupportedError, match=f"{transfer} needs a CUDA device.*torch"):
        host_pool(buffer_info())


def test_another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version", lambda _: "0.5.99")
    refused("0.5.23; the installed version is 0.5.99", buffer_info())


@pytest.mark.parametrize(
    ("pool", "use_mla", "drafts", "message"),
    [
        (SimpleNamespace(), True, (), "multi-head latent attention"),
        (SimpleNamespace(layer_shard_enabled=True), False, (), "sharded by layer"),
        (SimpleNamespace(placement=1), False, (), "interleaves logical pages"),
        (SimpleNamespace(), False, (1, 2), "2 MTP draft layer"),
    ],
)
def test_device_pools(pool: Any, use_mla: bool, drafts: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        plugin._check_kv_pool(kv_pool=pool, use_mla=use_mla, mtp_draft_device_pools=drafts)
    assert WAY_OUT in str(caught.value)


def test_host_pools_that_sglang_builds_past_its_selector() -> None:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    with pytest.raises(UnsupportedError, match="MLATokenToKVPoolHost"):
        plugin._check_host_pool(MLATokenToKVPoolHost.__new__(MLATokenToKVPoolHost))


def test_rows_that_only_a_stock_pool_has() -> None:
    pool = host_pool(buffer_info())
    for ask in (
        lambda: pool.k_buffer,
        lambda: pool.v_buffer,
        pool.get_hybrid_pool_buffer,
        pool.get_dummy_flat_data_page,
        lambda: pool.get_data_page(0),
        lambda: pool.get_page_buffer_meta(torch.zeros(1)),
    ):
        with pytest.raises(UnsupportedError, match="int8 records"):
            ask()
