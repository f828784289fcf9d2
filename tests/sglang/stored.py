"""Host pools behind SGLang's storage backends, without a server."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from sglang.srt.managers.cache_controller import storage_model_name
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

from bench.lab.mooncake import Mooncake
from hiqcache.metrics import PoolLabels
from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost
from hiqcache.sglang.storage_backend import GuardedStorage, guarded
from hiqcache.storage.metrics import StorageMetrics
from tests.sglang.builders import LAYERS, buffer_info, host_pool

SLOTS = 96
LABELS = PoolLabels("int8", "torch", "kv", "0", "0", "0", "model")


def config(pool: Any, model: str | None = "some/model", **changed: Any) -> HiCacheStorageConfig:
    """What SGLang's controller gives a backend of ``pool``."""
    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout == "page_first",
        "model_name": storage_model_name(model, pool),
    }
    return HiCacheStorageConfig(**{**facts, **changed})


class MemoryStorage(HiCacheStorage):
    """A ``dynamic`` backend with SGLang's zero-copy interface: bytes of the pool's own pointers."""

    def __init__(self, storage_config: HiCacheStorageConfig, held: dict[str, list[bytes]]) -> None:
        self.name, self.held = storage_config.model_name, held

    def batch_set_v1(self, keys: list[str], host_indices: Any, _: Any = None) -> Any:
        for key, pieces in self._pages(keys, host_indices):
            self.held[key] = [ctypes.string_at(*piece) for piece in pieces]
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: Any, _: Any = None) -> Any:
        results = []
        for key, pieces in self._pages(keys, host_indices):
            for (pointer, size), piece in zip(pieces, self.held.get(key, ()), strict=False):
                ctypes.memmove(pointer, piece, min(size, len(piece)))
            results.append(key in self.held)
        return results

    def batch_set_v2(self, transfers: Any, _: Any = None) -> Any:
        return self._each(self.batch_set_v1, transfers)

    def batch_get_v2(self, transfers: Any, _: Any = None) -> Any:
        return self._each(self.batch_get_v1, transfers)

    def exists(self, key: str) -> bool:
        return f"{self.name} {key}" in self.held

    def _each(self, work: Any, transfers: Any) -> Any:
        first, results = self.mem_pool_host, {}
        for transfer in transfers:
            self.mem_pool_host = self.registered_pools[transfer.name]
            keys = [f"{transfer.name} {key}" for key in transfer.keys]
            results[transfer.name] = work(keys, transfer.host_indices)
        self.mem_pool_host = first
        return results

    def _pages(self, keys: list[str], host_indices: Any) -> Any:
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        pieces = list(zip(pointers, sizes, strict=True))
        each = len(pieces) // len(keys)
        for at, key in enumerate(keys):
            yield f"{self.name} {key}", pieces[at * each : (at + 1) * each]

    get = set = batch_get = batch_set = None  # type: ignore[assignment]


@dataclass
class Stored:
    """A pool of ``SLOTS`` slots, backed up from noise that is the same in every pool, and storage.

    rows: of the device, as the codec left them: what a restore of slot i must bring.
    """

    pool: Any
    storage: GuardedStorage
    registry: CollectorRegistry
    page_size: int
    info: Any

    @classmethod
    def of(
        cls,
        where: Path | dict[str, list[bytes]] | Mooncake,
        *,
        page_size: int = 16,
        layout: str = "page_first",
        model: str = "some/model",
        slots: int = SLOTS,
        head_dim: int = 64,
        layers: int = LAYERS,
        pool_class: type = QuantisedMHATokenToKVPoolHost,
        **changed: Any,
    ) -> Stored:
        """``where``: the folder of a HiCacheFile, the dictionary of a MemoryStorage, a Mooncake.

        ``pool_class``: of the host pool.
        """
        backends = {Mooncake: "mooncake", dict: "dynamic"}
        backend = backends.get(type(where), "file")
        info = buffer_info(slots, page_size=page_size, head_dim=head_dim, layers=layers)
        pool = host_pool(
            info,
            page_size=page_size,
            layout=layout,
            tokens=slots,
            allocator_type=backend,
            cls=pool_class,
            layers=layers,
        )
        facts = config(pool, model, **changed)
        made: Any
        if isinstance(where, Path):
            facts.extra_config = {"file_storage_path": str(where)}
            made = HiCacheFile(facts)
        elif isinstance(where, Mooncake):
            facts.extra_config = where.settings
            made = MooncakeStore(facts, pool)
        else:
            made = MemoryStorage(facts, where)
        registry = CollectorRegistry()
        metrics = StorageMetrics(registry)
        storage = guarded(made, facts, pool, lambda _: metrics.of(LABELS))
        storage.register_mem_pool_host(pool)
        return cls(pool, storage, registry, page_size, info)

    def back_up(self, pages: int) -> torch.Tensor:
        """Slots that now hold the device's first rows."""
        slots = self.pool.alloc(pages * self.page_size)
        self.pool.backup_from_device_all_layer(None, slots, torch.arange(len(slots)), "kernel")
        return slots

    def rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What a restore of ``slots`` brings to the device."""
        target = torch.arange(len(slots))
        for layer in range(len(self.info.buffers.k)):
            self.pool.load_to_device_per_layer(None, slots, target, layer, "kernel")
        return [rows[target].clone() for rows in (*self.info.buffers.k, *self.info.buffers.v)]

    def write(self, keys: list[str], slots: torch.Tensor) -> bool:
        """As SGLang's controller writes (_generic_page_set)."""
        pages = [self.pool.get_data_page(slot) for slot in slots[:: self.page_size]]
        return self.storage.batch_set(keys, pages)

    def read(self, keys: list[str]) -> tuple[int, torch.Tensor]:
        """As SGLang's controller reads (_generic_page_get): pages that came, and their slots."""
        slots = self.pool.alloc(len(keys) * self.page_size)
        empty = [self.pool.get_dummy_flat_data_page() for _ in keys]
        came = 0
        for page, image in enumerate(self.storage.batch_get(keys, empty)):
            if image is None:
                break
            self.pool.set_from_flat_data_page(slots[page * self.page_size], image)
            came += 1
        return came, slots

    def count(self, name: str) -> int:
        """A counter of L3, without hiqcache_l3_ and _total."""
        value = self.registry.get_sample_value(f"hiqcache_l3_{name}_total", LABELS._asdict())
        assert value is not None
        return int(value)
