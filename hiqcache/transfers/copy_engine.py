"""The GPU's copy engines: batches of copies between pinned host memory and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

Way = Literal["to_device", "to_host"]


class CopyEngine(Protocol):
    """Copies on a stream of its own for each way, ordered by events with ``stream``.

    ``stream`` is the handle of the stream that is current in a transfer.
    """

    def event(self) -> Any:
        """An event that can be recorded again and again; one that never was holds nobody up."""

    def record(self, event: Any, stream: int | None) -> None:
        """Record ``event`` behind what is enqueued on ``stream`` by now."""

    def wait(self, event: Any, stream: int | None) -> None:
        """Have ``stream`` wait for ``event`` as it was recorded last."""

    def hold(self, way: Way, event: Any) -> None:
        """Have the copies of ``way`` that follow wait for ``event`` as it was recorded last."""

    def copy(
        self,
        way: Way,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        done: Any,
    ) -> None:
        """Enqueue copies between addresses, and record ``done`` behind them."""


#: CUDA's version as drivers and runtimes count it. 12.8 has the call in another form, untried.
MIN_CUDA = 13000


def missing_batches() -> str | None:
    """What batched copies lack on this machine, and what to do; None where they are there."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        return (
            f"NVIDIA's Python package cuda-bindings, which torch brings ({error}): install "
            "cuda-bindings of CUDA 13."
        )
    _, driver = runtime.cudaDriverGetVersion()
    if not hasattr(runtime, "cudaMemcpyBatchAsync") or driver < MIN_CUDA:
        return (
            f"batched copies, which CUDA has in this form from 13.0 on; the driver is of CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}: update the driver and cuda-bindings."
        )
    return None


class CudaCopyEngine:
    """``cudaMemcpyBatchAsync``: one call for a batch, whose pieces take no multiprocessor.

    Raises ValueError where the driver or NVIDIA's cuda-bindings have no batched copies.
    """

    def __init__(self, device: torch.device) -> None:
        if missing := missing_batches():
            raise ValueError(f"transfer dma needs {missing} Or use HIQCACHE_TRANSFER=fused.")
        from cuda.bindings import runtime

        self._runtime = runtime
        self._success = runtime.cudaError_t.cudaSuccess
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
        self._attributes = [attributes]
        self._streams = {
            way: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for way in ("to_device", "to_host")
        }
        self._handles = {way: stream.cuda_stream for way, stream in self._streams.items()}

    # The runtime's own calls: torch's objects take several times as long, for every batch.

    def event(self) -> Any:
        flags = self._runtime.cudaEventDisableTiming
        error, event = self._runtime.cudaEventCreateWithFlags(flags)
        self._check("cudaEventCreateWithFlags", error)
        return event

    def record(self, event: Any, stream: int | None) -> None:
        self._check("cudaEventRecord", *self._runtime.cudaEventRecord(event, stream))

    def wait(self, event: Any, stream: int | None) -> None:
        self._check("cudaStreamWaitEvent", *self._runtime.cudaStreamWaitEvent(stream, event, 0))

    def hold(self, way: Way, event: Any) -> None:
        self.wait(event, self._handles[way])

    def copy(
        self,
        way: Way,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        done: Any,
    ) -> None:
        stream = self._handles[way]
        result = self._runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), self._attributes, [0], 1, stream
        )
        self._check("cudaMemcpyBatchAsync", result[0])
        self.record(done, stream)

    def _check(self, call: str, error: Any) -> None:
        if error != self._success:
            raise RuntimeError(f"{call} failed: {error.name}")
