"""What is not served is refused at construction, with what was found and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool

from hiqcache.codecs import CODEC_NAMES, get_codec
from hiqcache.codecs.base import FP8_DTYPES
from hiqcache.compatibility import FAMILIES, UnsupportedError
from hiqcache.plan import WAYS
from hiqcache.settings import Settings
from hiqcache.sglang import plugin, support
from hiqcache.sglang.assembly import Assembly, building
from tests.sglang.builders import buffer_info, host_pool, packed_drafts

WAY_OUT = "HIQCACHE_CODEC"


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")


def refused(message: str, info: Any, **kwargs: Any) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        host_pool(info, **kwargs)
    assert WAY_OUT in str(caught.value)


def test_a_quantised_l1() -> None:
    refused("quantised itself.*--kv-cache-dtype auto", buffer_info(scaled=True))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_an_fp8_l1_under_codecs_that_gain_nothing(dtype: torch.dtype) -> None:
    refused(
        f"is {dtype}: a row of INT8 takes as many bytes.*HIQCACHE_CODEC=int4",
        buffer_info(dtype=dtype),
        kv_dtype=dtype,
    )


def test_other_dtypes() -> None:
    refused("is torch.float32.*bfloat16", buffer_info(dtype=torch.float32))


def test_bytes_of_which_nobody_says_what_they_are() -> None:
    refused("is torch.uint8.*bfloat16", buffer_info(dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_auto_is_what_plans_say(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> str:
        return support.require_transfer("auto", torch.device("cuda"), get_codec(codec), 64)

    monkeypatch.setattr(support, "missing_batches", lambda: None)
    assert (codec, chosen()) in WAYS
    monkeypatch.setattr(support, "missing_batches", lambda: "no batched copies")
    assert chosen() == "fused"


def test_packed_draft_layers() -> None:
    refused("1 MTP draft layer", buffer_info(), **packed_drafts(buffer_info(layers=1)))


def test_unknown_device_layouts() -> None:
    refused("layout 'hnd'", buffer_info(layout="hnd"))


@pytest.mark.parametrize("layout", ["page_head", "page_first_kv_split", "page_unified", "new"])
def test_unknown_host_layouts(layout: str) -> None:
    refused(f"--hicache-mem-layout {layout}.*page_first", buffer_info(), layout=layout)


def test_a_head_dim_unfit_for_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8-rot")
    refused("power of two; this model's k heads have 80", buffer_info(head_dim=80))


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
    refused("0.5.22; the installed version is 0.5.99", buffer_info())


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (SimpleNamespace(layer_shard_enabled=True), "sharded by layer"),
        (SimpleNamespace(placement=1), "interleave"),
    ],
)
def test_device_pools(pool: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        support.require_whole_pool(pool)
    assert WAY_OUT in str(caught.value)


def test_latent_rows_of_older_releases() -> None:
    with pytest.raises(UnsupportedError, match=r"sglang==0\.5\.23") as caught:
        support.require_family(FAMILIES["mla"], "MLATokenToKVPool", latent=False)
    assert WAY_OUT in str(caught.value)
    support.require_family(FAMILIES["mla"], "MLATokenToKVPool", latent=True)
    support.require_family(FAMILIES["plain"], "MHATokenToKVPool", latent=False)


def test_families_that_no_gpu_has_served_are_served_on_demand_and_no_others() -> None:
    untried = [family for family in FAMILIES.values() if family.untried]
    assert untried, "nothing is untried: HIQCACHE_ALLOW_UNTRIED has lost its use"
    for family in untried:
        with pytest.raises(UnsupportedError, match="HIQCACHE_ALLOW_UNTRIED=1"):
            support.require_family(family, "SomeKVPool", latent=True)
        support.require_family(family, "SomeKVPool", latent=True, untried=True)
    for family in (FAMILIES["deepseek_v4"], FAMILIES["sparse"], None):
        with pytest.raises(UnsupportedError):
            support.require_family(family, "SomeKVPool", latent=True, untried=True)


def test_pools_that_are_built_unasked() -> None:
    """SGLang builds some pools without a question; such KV would stay bf16 unseen."""
    hooks = Assembly(Settings(codec="int8"), copies=False, measured=False)
    for cls in (UnifiedPageEnvelopeHostPool, MHATokenToKVPoolHost):
        pool = cls.__new__(cls)
        pool.layer_num = 3
        entry = SimpleNamespace(host_pool=pool, name="kv", is_primary_index_anchor=True)
        with (
            building("l2"),
            pytest.raises(UnsupportedError, match=f"kind {cls.__name__}") as caught,
        ):
            hooks.check_group(None, [entry])
        assert WAY_OUT in str(caught.value)
        hooks.check_group(None, [entry])  # no L2: SGLang's own business


#: Run in a process of its own: hooks change SGLang for good.
HOOKED = """
from hiqcache.sglang import plugin
from sglang.srt.plugins.hook_registry import HookRegistry
plugin.register()
HookRegistry.apply_hooks()
from sglang.srt.mem_cache.storage import StorageBackendFactory
from hiqcache.compatibility import UnsupportedError

def refuse(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except UnsupportedError as error:
        print("refused:", error)
    else:
        raise SystemExit(f"{call} was not refused")

from tests.sglang.builders import buffer_info, host_pool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
with host_memory_budget_scope(10**9):
    pool = host_pool(buffer_info())
refuse(StorageBackendFactory.create_backend, "hf3fs", None, pool)
"""


@pytest.mark.parametrize("release", ["installed", "another, allowed"])
def test_the_hooks_stand_where_sglang_calls(release: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if release != "installed":
        other = tmp_path / "sglang-0.5.99.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "HIQCACHE_ALLOW_SGLANG": "0.5.99"}
    done = subprocess.run(
        [sys.executable, "-c", HOOKED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "storage-backend hf3fs: its keys name no format" in done.stdout


def test_a_seam_that_is_not_there_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_GROUP", "sglang.srt.mem_cache.pool_host.group.Renamed")
    with pytest.raises(SystemExit, match=r"SGLang has no .*Renamed"):
        plugin.register()


def test_rows_that_only_a_stock_pool_has() -> None:
    pool = host_pool(buffer_info())
    for ask in (lambda: pool.k_buffer, lambda: pool.v_buffer, lambda: pool.host_kv_data_refs):
        with pytest.raises(UnsupportedError, match="int8 records"):
            ask()
