"""Which layers of a restore are enqueued when. No Triton, no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Asking:
    """Follows who asks for layers: which call is the first of a restore, and which the next of one.

    A restore is known by its index tensors: its layers are asked for in their order, on one stream,
    with the same two tensors.
    """

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._device: torch.Tensor | None = None
        self._stream: int | None = None
        self._layer = -1

    def begins(
        self, layer: int, host: torch.Tensor, device: torch.Tensor, stream: int | None
    ) -> bool:
        """Whether this call is not the next of the restore that was asked for last.

        ``stream``: the current stream's handle; None on the CPU.
        """
        same = host is self._host and device is self._device and stream == self._stream
        next_layer = same and layer == self._layer + 1
        self._host, self._device, self._stream, self._layer = host, device, stream, layer
        return not next_layer

    def forget(self) -> None:
        """Keep nothing of a restore that is complete, or that has failed."""
        self._host = self._device = None


class Step(NamedTuple):
    """Layers to enqueue now: ``layers`` from ``layer`` on."""

    layer: int
    layers: int


class Restoring:
    """Joins layers of restores of ``layers`` layers where that pays.

    The first step of a restore is one layer, so that attention can begin; each next may have twice
    as many. Layers that are not asked for as those of one restore are restored one by one.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._asking = Asking()
        #: The first layer that no step has served; layers of the last step.
        self._served = self._group = 0

    def step(
        self,
        layer: int,
        host: torch.Tensor,
        device: torch.Tensor,
        stream: int | None,
        most: int,
    ) -> Step | None:
        """What to enqueue where ``layer`` is asked for; None where an earlier step has served it.

        ``most`` is how many layers a step may have, at least one.
        """
        if self._asking.begins(layer, host, device, stream):
            self._served, self._group = layer, 0
        if layer + 1 == self._layers:
            self._asking.forget()
        if layer < self._served:
            return None
        self._group = max(min(2 * self._group, most, self._layers - layer), 1)
        self._served += self._group
        return Step(layer, self._group)

    def fail(self) -> None:
        """Forget the restore, whose step could not be enqueued."""
        self._asking.forget()
