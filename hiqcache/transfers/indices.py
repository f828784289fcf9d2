"""Indices on their way to the device, without waiting for a stream."""

from __future__ import annotations

from typing import NamedTuple

import torch


class _Sent(NamedTuple):
    stream: torch.cuda.Stream
    host: torch.Tensor
    device: torch.Tensor


class IndexSender:
    """Sends index tensors to ``device`` through pinned memory, on the current stream.

    A copy from pageable memory would wait for the stream. The layers of a restore come with the
    same indices each, so the last tensor sent in each role is kept, with the stream that may use
    it, and serves again while its contents are equal.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[str, _Sent] = {}

    def send(self, role: str, indices: torch.Tensor) -> torch.Tensor:
        """``indices`` (int64 ``[tokens]``) on the device; itself if it is there already.

        ``role`` keeps apart the index tensors of one transfer.
        """
        if indices.device == self._device:
            return indices
        stream = torch.cuda.current_stream(self._device)
        sent = self._sent.get(role)
        if sent is None or sent.stream != stream or not torch.equal(sent.host, indices):
            # torch keeps a pinned block from reuse until copies from it are done.
            host = torch.empty(len(indices), dtype=torch.int64, pin_memory=True).copy_(indices)
            sent = _Sent(stream, host, host.to(self._device, non_blocking=True))
            self._sent[role] = sent
        return sent.device
