"""The GPU's copy engines: batches of copies between pinned host memory and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

Way = Literal["to_device", "to_host"]


class CopyEngine(Protocol):
    """Copies on a stream of its own for each way, ordered by events with the current stream."""

    def mark(self) -> Any:
        """What is enqueued on the current stream by now."""

    def wait(self, event: Any) -> None:
        """Have the current stream wait for ``event``."""

    def copy(
        self,
        way: Way,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        after: Sequence[Any],
    ) -> Any:
        """Enqueue copies between addresses once all of ``after`` has passed; their event."""


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

        self._batch = runtime.cudaMemcpyBatchAsync
        self._success = runtime.cudaError_t.cudaSuccess
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
        self._attributes = [attributes]
        self._streams = {
            way: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for way in ("to_device", "to_host")
        }

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        event.wait()

    def copy(
        self,
        way: Way,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        after: Sequence[Any],
    ) -> torch.cuda.Event:
        stream = self._streams[way]
        for event in after:
            stream.wait_event(event)
        result = self._batch(
            targets, sources, sizes, len(sizes), self._attributes, [0], 1, stream.cuda_stream
        )
        if result[0] != self._success:
            raise RuntimeError(f"cudaMemcpyBatchAsync of {len(sizes)} pieces failed: {result[0]}")
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
        return done
