"""Around SGLang's storage backends: pages are sealed on their way in, and proven on their way out.

SGLang's controller calls a backend in three ways (managers/cache_controller.py, 0.5.23): generic
(``batch_get``/``batch_set``, images of pages), zero-copy (``batch_get_v1``/``batch_set_v1``, pages
of the host pool's memory) and by pool (``batch_get_v2``/``batch_set_v2``, the pools beside the
first). A page that is not the page its key asks for is a miss on each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hiqcache.compatibility import WAY_OUT, UnsupportedError
from hiqcache.sglang.observed import labels_of
from hiqcache.sglang.storage import StoredPages
from hiqcache.sglang.storage_discard import discard
from hiqcache.storage.metrics import PoolStorageMetrics, process_storage_metrics
from hiqcache.storage.seal import sealed

logger = logging.getLogger(__name__)

#: Backends that tell the pieces of pools beside the first by the pools' attributes (SGLang 0.5.23).
_LOOK_INSIDE = frozenset({"MooncakeStore", "HiCacheNixl"})


class GuardedStorage:
    """A storage backend of SGLang's, measured; pages of quantised pools are sealed and proven.

    Everything that is not defined here is the backend's own. Pools of SGLang's own are measured
    alone.

    backend: a HiCacheStorage.
    config: its HiCacheStorageConfig. The model's name in it ends with the pool's format tag.
    pool: the host pool that SGLang keys on. Others join by register_mem_host_pool_v2.
    metrics: of a pool; None measures nothing.
    """

    def __init__(
        self,
        backend: Any,
        config: Any,
        pool: Any,
        metrics: Callable[[Any], PoolStorageMetrics] | None,
    ) -> None:
        self._backend = backend
        ranks = f"{config.tp_rank}/{config.tp_size}"
        # Ranks that hold the same rows share their pages.
        shared = "any rank" if config.is_mla_model else ranks
        self._whose = f"{config.model_name} {shared} cp{config.attn_cp_rank}/{config.attn_cp_size}"
        self._measure = metrics
        self._first = self._guard(pool, "kv")
        self._pools: dict[str, _GuardedPool] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool beside the first under its name.

        Raises UnsupportedError where the backend would look for the pool's K and V.
        """
        backend = type(self._backend).__name__
        beside = isinstance(host_pool, StoredPages) and host_pool is not self._first.pool
        if beside and backend in _LOOK_INSIDE:
            raise UnsupportedError(
                f"{backend} keeps a model's second pool ({host_pool_name}) by its K and V buffers, "
                "which a quantised pool does not have. Choose --hicache-storage-backend file, or: "
                f"{WAY_OUT}"
            )
        self._pools[str(host_pool_name)] = self._guard(host_pool, str(host_pool_name))
        self._backend.register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The images of the first pages of ``keys`` that are whole; None for all others."""
        try:
            pages = self._backend.batch_get(keys, target_locations, target_sizes)
        except Exception as error:
            # One page fails a whole batch: those before it are good.
            logger.warning("HiQCache: storage failed to read %d pages: %r", len(keys), error)
            pages = self._one_by_one(keys, target_locations)
        good = 0
        for key, page in zip(keys, pages or (), strict=False):
            if page is None or not self._proven(self._first, key, page):
                break
            good += 1
        self._first.read(good)
        return [*(pages or ())[:good], *[None] * (len(keys) - good)]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Seal and store the images ``values``."""
        self._first.seal_images(keys, values)
        with self._failing(self._first):
            stored = self._backend.batch_set(keys, values, target_locations, target_sizes)
        self._first.wrote(len(keys) if stored else 0, len(keys))
        return bool(stored)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the slots ``host_indices``: which are whole, up to the first not."""
        with self._failing(self._first):
            found = self._backend.batch_get_v1(keys, host_indices, extra_info)
        good = 0
        for page, key in enumerate(keys):
            if not found[page] or not self._proven(self._first, key, host_indices, page):
                break
            good += 1
        self._first.read(good)
        return [True] * good + [False] * (len(keys) - good)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Seal and store the pages of the slots ``host_indices``: whether each was taken."""
        self._first.seal_slots(keys, host_indices)
        with self._failing(self._first):
            stored = list(self._backend.batch_set_v1(keys, host_indices, extra_info))
        self._first.wrote(sum(map(bool, stored)), len(keys))
        return stored

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Read pages of several pools, by SGLang's PoolTransfer: whether each is whole."""
        with self._failing(self._first):
            results: dict[Any, Any] = self._backend.batch_get_v2(transfers, extra_info)
        for transfer in transfers:
            pool = self._pools[str(transfer.name)]
            results[transfer.name] = found = [
                bool(there) and self._proven(pool, key, transfer.host_indices, page)
                for page, (key, there) in enumerate(
                    zip(transfer.keys or (), results.get(transfer.name, ()), strict=False)
                )
            ]
            pool.read(sum(found))
        return results

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """Seal and store pages of several pools, by SGLang's PoolTransfer."""
        for transfer in transfers:
            pool = self._pools[str(transfer.name)]
            pool.seal_slots(transfer.keys or (), transfer.host_indices)
        with self._failing(self._first):
            results: dict[Any, Any] = self._backend.batch_set_v2(transfers, extra_info)
        for transfer in transfers:
            stored = sum(map(bool, results.get(transfer.name, ())))
            self._pools[str(transfer.name)].wrote(stored, len(transfer.keys or ()))
        return results

    def _guard(self, pool: Any, name: str) -> _GuardedPool:
        kind = _SealedPool if isinstance(pool, StoredPages) else _GuardedPool
        return kind(pool, f"{self._whose} {name}", self._measure and self._measure(pool))

    def _proven(self, pool: _GuardedPool, key: str, held: torch.Tensor, page: int = -1) -> bool:
        """Whether ``held`` (an image, or slots of pages: then the ``page``-th) is ``key``."""
        whole = pool.proves_image(key, held) if page < 0 else pool.proves_slots(key, held, page)
        if not whole:
            self._corrupt(pool, key)
        return whole

    def _corrupt(self, pool: _GuardedPool, key: str) -> None:
        pool.count("corrupt_pages", 1)
        gone = pool is self._first and discard(self._backend, key)
        logger.error(
            "HiQCache: page %s of %s from storage is corrupt and counts as a miss; it was %s.",
            key,
            pool.name,
            "removed" if gone else "left there",
        )

    def _one_by_one(self, keys: list[str], targets: Any) -> list[torch.Tensor | None]:
        """The pages up to the first that can't be read."""
        pages: list[torch.Tensor | None] = []
        for key, target in zip(keys, targets, strict=True):
            try:
                pages += self._backend.batch_get([key], [target])
            except Exception as error:
                # HiCacheFile raises an OSError of its own, without a number, for a file cut short.
                if isinstance(error, OSError) and error.errno is None:
                    self._corrupt(self._first, key)
                else:
                    self._first.count("failed_operations", 1)
                break
        return pages

    @contextmanager
    def _failing(self, pool: _GuardedPool) -> Iterator[None]:
        """Count what the backend raises inside; SGLang makes a miss of it."""
        try:
            yield
        except Exception:
            pool.count("failed_operations", 1)
            raise


class _GuardedPool:
    """A host pool of SGLang's own, behind storage: measured, not sealed."""

    def __init__(self, pool: Any, name: str, metrics: PoolStorageMetrics | None) -> None:
        self.pool, self.name = pool, name
        self._metrics = metrics
        self._page_bytes = int(pool.size_per_token) * int(pool.page_size)

    def count(self, metric: str, amount: int) -> None:
        """Add ``amount`` to a metric of PoolStorageMetrics."""
        if self._metrics is not None and amount:
            getattr(self._metrics, metric).inc(amount)

    def read(self, pages: int) -> None:
        self.count("read_pages", pages)
        self.count("read_bytes", pages * self._page_bytes)

    def wrote(self, pages: int, asked: int) -> None:
        self.count("written_pages", pages)
        self.count("written_bytes", pages * self._page_bytes)
        self.count("failed_operations", int(pages < asked))

    def seal_images(self, keys: Sequence[str], images: Sequence[torch.Tensor]) -> None:
        """Make each image the page of its key."""

    def seal_slots(self, keys: Sequence[str], slots: torch.Tensor) -> None:
        """Make each page of ``slots`` the page of its key."""

    def proves_image(self, key: str, image: torch.Tensor) -> bool:
        """Whether ``image`` is the page of ``key``."""
        return True

    def proves_slots(self, key: str, slots: torch.Tensor, page: int) -> bool:
        """Whether the ``page``-th page of ``slots`` is that of ``key``."""
        return True


class _SealedPool(_GuardedPool):
    """A quantised pool behind storage."""

    def __init__(self, pool: StoredPages, name: str, metrics: PoolStorageMetrics | None) -> None:
        super().__init__(pool, f"{pool.storage_format_tag} {name}", metrics)

    def _identity(self, key: str) -> str:
        return f"{self.name} {key}"

    def seal_images(self, keys: Sequence[str], images: Sequence[torch.Tensor]) -> None:
        for key, image in zip(keys, images, strict=True):
            self.pool.images.seal_image(image, self._identity(key))

    def seal_slots(self, keys: Sequence[str], slots: torch.Tensor) -> None:
        for key, page in zip(keys, self.pool.pages_of(slots), strict=True):
            self.pool.images.seal(page, self._identity(key))

    def proves_image(self, key: str, image: torch.Tensor) -> bool:
        return sealed(self._identity(key), image)

    def proves_slots(self, key: str, slots: torch.Tensor, page: int) -> bool:
        slot = slots[page * self.pool.page_size]
        return bool(self.pool.images.sealed(self.pool.page_of(slot), self._identity(key)))


def guarded(
    backend: Any, config: Any, pool: Any, metrics: Callable[[Any], PoolStorageMetrics] | None
) -> GuardedStorage:
    """``backend`` behind a guard that SGLang's reports call by the backend's own name.

    Around pools of SGLang's own it also passes for an instance of the backend's class. Around
    quantised ones it does not: SGLang would describe the pages of a MooncakeStore to other
    programs as rows of the model's dtype.
    """
    name = type(backend).__name__
    members: dict[str, Any] = {"__module__": GuardedStorage.__module__}
    if not isinstance(pool, StoredPages):
        members["__class__"] = property(lambda self: type(self._backend))
    kind: type[GuardedStorage] = type(name, (GuardedStorage,), members)
    return kind(backend, config, pool, metrics)


def create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    storage_config: Any,
    mem_pool_host: Any,
    *,
    measured: bool,
    **kwargs: Any,
) -> Any:
    """Around SGLang's StorageBackendFactory.create_backend: its backends behind a guard.

    Raises UnsupportedError for a backend that does not take the pages of ``mem_pool_host``.
    """
    if isinstance(mem_pool_host, StoredPages):
        mem_pool_host.require_stored(backend_name)
    # TensorCast's store looks into SGLang's own pools, and they go unmeasured.
    elif not measured or backend_name == "tensorcast":
        return original(factory, backend_name, storage_config, mem_pool_host, **kwargs)
    backend = original(factory, backend_name, storage_config, mem_pool_host, **kwargs)
    return guarded(backend, storage_config, mem_pool_host, _metrics_of if measured else None)


def _metrics_of(pool: Any) -> PoolStorageMetrics:
    return process_storage_metrics().of(labels_of(pool))
