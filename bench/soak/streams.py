"""Streams that wait for each other, or a CPU's one after the other."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Streams:
    """``count`` streams of ``device``, called by number; on a CPU everything is done at once."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._streams: list[Any] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._ended: list[Any] = []

    def on(self, stream: int) -> Any:
        """A context whose work goes to ``stream``."""
        if not self._streams:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._streams[stream])

    def event(self, stream: int) -> Any:
        """An event behind what ``stream`` was given so far."""
        return self._streams[stream].record_event() if self._streams else None

    def follow(self, stream: int, event: Any) -> None:
        """Let ``stream`` wait for ``event``, and the host not."""
        if event is not None:
            self._streams[stream].wait_event(event)

    def end_round(self) -> None:
        """What comes after ``begin_round`` waits, on every stream, for what was enqueued by now."""
        self._ended = [stream.record_event() for stream in self._streams]

    def begin_round(self) -> None:
        """Let every stream wait for what all had at the last ``end_round``."""
        for stream in self._streams:
            for event in self._ended:
                stream.wait_event(event)

    def sent(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of the CPU on the device, by the current stream."""
        if self._device.type != "cuda":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self._streams:
            torch.cuda.synchronize()
