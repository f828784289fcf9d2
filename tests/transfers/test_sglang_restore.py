"""SGLang's own transfer engine asks for a restore's layers as the fused transfer knows them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine

from hiqcache.transfers.fused import FusedTransfer
from tests.sglang.builders import buffer_info, host_pool

LAYERS = 9

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its pools on the CPU")


def test_sglang_passes_the_same_indices_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every layer would have a launch of its own: 36 for a short restore instead of 6."""
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    info = buffer_info(layers=LAYERS)
    pool = host_pool(info, layers=LAYERS)
    pool.transfer = FusedTransfer(
        pool.codec, pool.transfer.arena, (pool.device_k_buffers, pool.device_v_buffers)
    )
    sent = [rows.clone() for rows in (*info.buffers.k, *info.buffers.v)]
    slots = pool.alloc(16)
    rows = torch.arange(16)
    engine = L2TransferEngine("kernel")
    engine.submit_device_to_host([L2Transfer(pool, None, slots, rows)])
    for buffer in (*info.buffers.k, *info.buffers.v):
        buffer.fill_(torch.nan)
    there: list[int] = []

    def done(layer: int) -> None:
        restored = [not info.buffers.k[each][rows].isnan().any() for each in range(LAYERS)]
        assert restored[layer]
        there.append(sum(restored))

    engine.submit_host_to_device(
        [L2Transfer(pool, None, slots, rows)], transfer_layer_id_max=LAYERS, on_layer_done=done
    )
    assert there == [1, 3, 3, 7, 7, 7, 7, 9, 9]
    for buffer, was in zip((*info.buffers.k, *info.buffers.v), sent, strict=True):
        back = pool.codec.decode(*pool.codec.encode(was[:16]), was.dtype)
        assert torch.equal(buffer[:16], back)
