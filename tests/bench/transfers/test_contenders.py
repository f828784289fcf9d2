"""What contenders are given, and what is said of SGLang's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.transfers.contenders import HOSTS, LAYERS, OURS, Contender
from bench.transfers.indices import Indices
from hiqcache.codecs import CODEC_NAMES
from hiqcache.record import format_of


class Recorder:
    """A Mover that keeps the host slots it was given."""

    staging_bytes = 0

    def __init__(self) -> None:
        self.backups: list[torch.Tensor] = []
        self.restores: list[tuple[int, torch.Tensor]] = []

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:  # noqa: ARG002
        self.backups.append(host_indices)

    def restore(
        self,
        layer: int,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,  # noqa: ARG002
    ) -> None:
        self.restores.append((layer, host_indices))


@pytest.mark.parametrize("cpu_slots", [(), ("backup",), ("backup", "restore")])
def test_host_slots_come_on_the_cpu_where_a_server_gives_them_there(
    cpu_slots: tuple[str, ...],
) -> None:
    mover, indices = Recorder(), Indices(*(torch.arange(4) for _ in range(3)))
    contender = Contender("int8", "dma", mover, 1, 64, 4, cpu_slots)
    contender.run("backup", indices)
    contender.run("restore", indices)
    wanted = {
        direction: indices.host_on_cpu if direction in cpu_slots else indices.host
        for direction in ("backup", "restore")
    }
    assert len(mover.backups) == 1
    assert mover.backups[0] is wanted["backup"]
    assert [layer for layer, _ in mover.restores] == list(range(LAYERS))
    # One tensor for all layers: that is how a restore is known.
    assert all(given is wanted["restore"] for _, given in mover.restores)


def test_contenders_of_one_codec_and_format_share_host_memory() -> None:
    packed = {(codec, "packed") for codec in CODEC_NAMES}
    assert set(HOSTS) == {("int8", "padded"), *packed}
    assert {(codec, format_of(transfer)) for codec, transfer in OURS} == set(HOSTS)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own rule for its TMA mover, on a GPU that has TMA."""
    from bench.transfers import stock

    hicache: Any = pytest.importorskip("sglang.kernels.ops.kvcache.hicache")
    module = SimpleNamespace(fits_device=lambda _: True)
    # Without its cache, which would remember this GPU.
    monkeypatch.setattr(stock, "use_hicache_tma_kernel", hicache.use_hicache_tma_kernel.__wrapped__)
    monkeypatch.setattr(hicache, "_jit_hicache_tma_module", lambda **_: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def kernels(page: int, layout: str, staged: bool, row: int = 2048, jit: bool = True) -> Any:
    from bench.transfers.stock import StockTransfer

    transfer = StockTransfer.__new__(StockTransfer)
    transfer._pool = SimpleNamespace(  # type: ignore[assignment]
        page_size=page,
        layout=layout,
        can_use_jit=jit,
        can_use_write_back_jit=staged,
        token_stride_size=row,
    )
    return transfer.kernels()


@pytest.mark.usefixtures("hopper")
def test_what_sglang_moves_its_own_rows_with_is_its_own_decision() -> None:
    assert kernels(64, "page_first", True) == {"backup": "staging", "restore": "TMA"}
    assert kernels(64, "layer_first", False) == {"backup": "TMA", "restore": "TMA"}
    # Its chunk of 2,048-byte rows is 16 of them: pages must hold whole chunks.
    assert kernels(16, "page_first", True)["restore"] == "TMA"
    assert kernels(8, "page_first", True)["restore"] == "registers"
    assert kernels(16, "page_first", True, row=1024)["restore"] == "registers"
    assert kernels(1, "layer_first", False) == {"backup": "registers", "restore": "registers"}
    # Without staging memory, page_first backups go by neither.
    assert kernels(64, "page_first", False)["backup"] == "sgl_kernel"
    assert kernels(64, "layer_first", False, jit=False)["restore"] == "sgl_kernel"
