"""Which layers a launch of a restore serves. No Triton, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class _Run:
    """A restore that has more layers to come: who asks, and what is enqueued."""

    host: torch.Tensor
    device: torch.Tensor
    #: The stream's handle; None on the CPU.
    stream: int | None
    #: The layer asked for last; the first that no launch has served; layers of the last launch.
    asked: int
    served: int
    group: int = 0


class Step(NamedTuple):
    """Layers to enqueue now: ``layers`` from ``layer`` on. ``begins``: the first of a restore."""

    layer: int
    layers: int
    begins: bool


class Restoring:
    """Follows the calls of restores of ``layers`` layers, and joins layers where that pays.

    A restore is known by its index tensors: its layers are asked for in their order, on one stream,
    with the same two tensors. Layers asked for in any other way are restored one by one. The first
    step of a restore is one layer, so that attention can begin; each next may have twice as many,
    as long as its tokens times layers stay within the limit.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._run: _Run | None = None

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
        run, self._run = self._run, None
        begins = (
            run is None
            or host is not run.host
            or device is not run.device
            or stream != run.stream
            or layer != run.asked + 1
        )
        if run is None or begins:
            run = _Run(host, device, stream, layer, layer)
        step = None
        if layer == run.served:
            run.group = max(min(2 * run.group, most, self._layers - layer), 1)
            run.served += run.group
            step = Step(layer, run.group, begins)
        run.asked = layer
        # Nothing is kept of a restore that is complete.
        if layer + 1 < self._layers:
            self._run = run
        return step

    def fail(self) -> None:
        """Forget the restore, whose step could not be enqueued."""
        self._run = None
