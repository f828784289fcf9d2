"""Measures SGLang's host pools, its own and ours alike, without changing what they do."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.runtime_context import get_parallel, get_serving

from hiqcache.metrics import PoolLabels, PoolMetrics, process_metrics
from hiqcache.settings import STOCK
from hiqcache.sglang.copying_pool import CopyingPool
from hiqcache.sglang.host_pool import QuantisedPool
from hiqcache.sglang.row_sample import RowSampler
from hiqcache.sglang.support import installed_sglang
from hiqcache.transfers.checked import CheckedTransfer

logger = logging.getLogger(__name__)

#: Seconds between two readings of the host's free memory, each some 0.2 ms of system files.
_MEMORY_PERIOD = 10.0

_evicting: ContextVar[bool] = ContextVar("hiqcache_evicting", default=False)


def mark_eviction(original: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    """Around UnifiedRadixCache.evict_host: slots freed inside are evictions.

    That method frees, before it returns, the slots of every pool whose entries it evicts. Other
    frees (failed writes, flushes, staging) are none.
    """
    token = _evicting.set(True)
    try:
        return original(cache, *args, **kwargs)
    finally:
        _evicting.reset(token)


class _Clock(Protocol):
    def mark(self) -> Any:
        """This point of the transfer."""

    def seconds(self, start: Any, end: Any) -> float | None:
        """Seconds between two marks, or None while the transfer runs; never waits."""


class _HostClock:
    """For CPUs, where a transfer has run when its method returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float | None:
        return end - start


class _StreamClock:
    """Events on the current stream of an accelerator, used again once read."""

    def __init__(self, device: str) -> None:
        self._event = torch.get_device_module(device).Event
        self._spare: deque[Any] = deque()

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else self._event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float | None:
        if not end.query():
            return None
        seconds: float = start.elapsed_time(end) / 1000
        self._spare.extend((start, end))
        return seconds


class _Pending:
    """Durations of work in the order of one stream, reported once they are known."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Any, Any, Callable[[float], None]]] = deque()
        self._lock = threading.Lock()

    def add(self, start: Any, end: Any, done: Callable[[float], None]) -> None:
        """Have ``done`` called with the seconds between two marks once they are known."""
        self._waiting.append((start, end, done))

    def settle(self) -> None:
        # A pool's slots may be freed by another thread than the one that transfers: whoever comes
        # second leaves the work to the first.
        if not self._waiting or not self._lock.acquire(blocking=False):
            return
        try:
            while self._waiting:
                start, end, done = self._waiting[0]
                seconds = self._clock.seconds(start, end)
                if seconds is None:
                    return
                self._waiting.popleft()
                done(seconds)
        finally:
            self._lock.release()


class _Observer:
    """What is measured of one pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        labels = labels_of(pool)
        self.metrics: PoolMetrics = process_metrics().of(labels, installed_sglang() or "")
        device: torch.device = pool._transfer_device
        self.clock: _Clock = _HostClock() if device.type == "cpu" else _StreamClock(device.type)
        self.backups, self.restores = _Pending(self.clock), _Pending(self.clock)
        self.samples = _Pending(self.clock)
        self.restore_start: Any = None
        self.last_layer: int = pool.target_layer_num - 1
        self.sampler = RowSampler(pool, self.metrics) if RowSampler.serves(pool) else None
        # Under decode context parallelism a rank holds one of every dcp_size tokens.
        self.token_bytes = pool.size_per_token / pool.dcp_size
        self.metrics.capacity_tokens.set(pool.logical_size)
        self.metrics.capacity_bytes.set(pool.size * pool.size_per_token)
        self.metrics.bytes_per_token.set(self.token_bytes)
        self._staging = -1
        self._checked = self._mismatches = 0
        self._memory_due = 0.0
        self.settle()
        self.occupancy()

    def settle(self) -> None:
        """Report the transfers that have completed."""
        self.backups.settle()
        self.restores.settle()
        self.samples.settle()
        self._checksums()
        staging = staging_bytes(self._pool)
        if staging != self._staging:
            self._staging = staging
            self.metrics.staging_bytes.set(staging)
        now = time.monotonic()
        if now >= self._memory_due:
            self._memory_due = now + _MEMORY_PERIOD
            available = available_host_memory_bytes(allow_cgroup_fallback=True)
            self.metrics.host_memory_available.set(available)

    def _checksums(self) -> None:
        """Count what a CheckedTransfer has found since the last time."""
        transfer = getattr(self._pool, "transfer", None)
        if isinstance(transfer, CheckedTransfer):
            transfer.report()
            checked, mismatches = transfer.checked, transfer.mismatches
            self.metrics.checksum_records.inc(checked - self._checked)
            self.metrics.checksum_mismatches.inc(mismatches - self._mismatches)
            self._checked, self._mismatches = checked, mismatches

    def occupancy(self) -> None:
        self.metrics.used_tokens.set(self._pool.logical_size - self._pool.available_size())

    def backed_up(
        self, start: Any, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        """Count a backup that was enqueued since ``start``, and sample a row behind it."""
        end = self.clock.mark()
        self.backups.add(start, end, self.metrics.backup_seconds.observe)
        if self.sampler is not None:
            sample = self.sampler.take(host_indices, device_indices)
            if sample is not None:
                # An end of its own: a backup takes as long with a sample as without.
                begun, taken = self.clock.mark(), self.clock.mark()
                self.samples.add(begun, taken, partial(self._judge, sample))
        tokens = host_indices.numel()
        self.metrics.backup_tokens.inc(tokens)
        self.metrics.backup_bytes.inc(tokens * self.token_bytes)
        self.settle()

    def restored(self, tokens: int) -> None:
        """Count a restore of ``tokens``, all layers of which are enqueued."""
        start, self.restore_start = self.restore_start, None
        if start is not None:
            self.restores.add(start, self.clock.mark(), self.metrics.restore_seconds.observe)
        self.metrics.restore_tokens.inc(tokens)
        self.metrics.restore_bytes.inc(tokens * self.token_bytes)
        self.settle()

    def freed(self, tokens: int) -> None:
        """Count freed slots, which are evictions where evict_host frees them."""
        if self.sampler is not None:
            self.sampler.drop()
        if _evicting.get():
            self.metrics.evicted_tokens.inc(tokens)
        self.occupancy()

    def _judge(self, sample: int, seconds: float) -> None:
        assert self.sampler is not None
        self.sampler.settle(sample)


class _Observed:
    """Methods laid over a host pool class; each does the pool's own work, then measures.

    What a transfer is counted by runs on the host once all of it is enqueued: beside the transfer,
    not before it.
    """

    _observer: _Observer | None = None  # None while the pool's constructor runs, which clears it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._observer = _Observer(self)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            logger.warning("HiQCache: start SGLang with --enable-metrics to have metrics served.")

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        observer = self._observer
        assert observer is not None
        start = observer.clock.mark()
        super().backup_from_device_all_layer(  # type: ignore[misc]
            device_pool, host_indices, device_indices, io_backend
        )
        observer.backed_up(start, host_indices, device_indices)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        observer = self._observer
        assert observer is not None
        if layer_id == 0 and not is_draft:
            observer.restore_start = observer.clock.mark()
        super().load_to_device_per_layer(  # type: ignore[misc]
            device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft
        )
        if layer_id == observer.last_layer and not is_draft:
            observer.restored(host_indices.numel())

    def alloc(self, *args: Any, **kwargs: Any) -> Any:
        slots = super().alloc(*args, **kwargs)  # type: ignore[misc]
        if self._observer is not None:
            self._observer.settle()
            self._observer.occupancy()
        return slots

    def free(self, indices: torch.Tensor) -> Any:
        if self._observer is not None:
            self._observer.settle()
        freed = super().free(indices)  # type: ignore[misc]
        if self._observer is not None:
            self._observer.freed(indices.numel())
        return freed

    def clear(self) -> None:
        super().clear()  # type: ignore[misc]
        if self._observer is not None:
            self._observer.freed(0)

    def destroy(self) -> None:
        if self._observer is not None and self._observer.sampler is not None:
            self._observer.sampler.drop()
        super().destroy()  # type: ignore[misc]


@cache
def observed(pool_class: type) -> type:
    """``pool_class`` (a host pool of plain heads), measured; the same class for the same class."""
    return type(pool_class.__name__, (_Observed, pool_class), {"__module__": pool_class.__module__})


def labels_of(pool: Any) -> PoolLabels:
    """The labels of ``pool`` in this process. transfer: ``stock`` is SGLang's own."""
    if isinstance(pool, QuantisedPool):
        codec, transfer = pool.codec.name, pool.transfer_name
    else:
        codec = STOCK
        transfer = "copy" if isinstance(pool, CopyingPool) else "stock"
    parallel = get_parallel()
    return PoolLabels(
        codec,
        transfer,
        str(pool.pool_label),
        str(parallel.tp_rank),
        str(parallel.pp_rank),
        str(parallel.dp_rank or 0),
        get_serving().served_model_name,
    )


def staging_bytes(pool: Any) -> int:
    """GPU memory held for staging by the transfers of ``pool``, and by SGLang for it."""
    names = "staging_k_buffer", "staging_v_buffer", "staging_buffer"
    buffers = (getattr(pool, name, None) for name in names)
    held: int = sum(buffer.nbytes for buffer in buffers if buffer is not None)
    if isinstance(pool, QuantisedPool):
        held += pool.transfer.staging_bytes
    return held
