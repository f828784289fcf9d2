"""The fused transfer: one Triton kernel gathers, encodes and stores; another does the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.codec_kernels import check_memory
from hiqcache.transfers.indices import IndexSender
from hiqcache.transfers.kernel_choice import kernels_of
from hiqcache.transfers.launch import BACKUP, LAUNCH_TOKENS, RESTORE, Launch
from hiqcache.transfers.restoring import Restoring


class FusedTransfer(Transfer):
    """Reads and writes pinned host memory from the kernels; holds no staging memory.

    Serves what RowKernels and PageKernels do, in any layout of records. One launch for a backup,
    one a layer for a long restore. The launches of a short one would take longer than its bytes, so
    a launch serves more and more layers there, some before they are asked for (LAUNCH_TOKENS).

    Indices on the CPU are sent through pinned memory; the layers of a restore share one copy.
    Indices on the device must live until the stream has passed (SGLang records its index tensors
    on the transfer stream), as must the arena and the device buffers.

    A restore is known by its index tensors (Restoring), whose contents must not change meanwhile;
    nor may its host slots, and nothing else may use its device rows. SGLang does all of this.

    Not thread-safe: one thread issues a pool's transfers, as SGLang's scheduler does.

    ``backup``, ``restore`` and ``launch_tokens`` are for measurements; the defaults serve.

    Raises ValueError where the pool or the codec can't be served.
    """

    name: ClassVar[str] = "fused"

    def __init__(
        self,
        codec: Codec,
        arena: Arena,
        device: Sequence[Sequence[torch.Tensor]],
        backup: Launch | None = None,
        restore: Launch | None = None,
        launch_tokens: int = LAUNCH_TOKENS,
    ) -> None:
        super().__init__(codec, arena, device)
        layout, buffer = arena.layout, arena.buffer
        kernels_for = kernels_of(self.name, codec)
        check_memory(self.name, buffer)
        rows = codec, self.device, arena.planes, layout.page_size, buffer
        self._encode = kernels_for(
            "backup",
            *rows,
            backup or BACKUP[codec.name, layout.order],
            # A page_first page is written whole before the next one is begun.
            inner=layout.order == "page_first",
        )
        self._decode = kernels_for("restore", *rows, restore or RESTORE[codec.name])
        self.indices = IndexSender(self.device[0][0].device)
        self._restoring = Restoring(self.layers)
        self._launch_tokens = launch_tokens

    @property
    def launches(self) -> dict[str, Launch]:
        """How wide backup and restore run on this GPU."""
        return {"backup": self._encode.launch, "restore": self._decode.launch}

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        tokens = host_indices.numel()
        if tokens == 0:
            return
        self.require_whole_pages(host_indices)
        host = self.indices.send("backup host", host_indices)
        device = self.indices.send("backup device", device_indices)
        programs = self._encode.launch.programs
        by_tile = min(programs, self._encode.tiles(tokens))
        grid = by_tile, min(programs // by_tile, self.layers), 1
        self._encode(grid, self.arena.buffer, host, device, 0, self.layers)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        tokens = host_indices.numel()
        if tokens == 0:
            return
        step = self._restoring.step(
            layer,
            host_indices,
            device_indices,
            self._decode.stream(),
            self._launch_tokens // tokens,
        )
        if step is None:
            return
        try:
            self.require_whole_pages(host_indices)
            host = self.indices.send("restore host", host_indices)
            device = self.indices.send("restore device", device_indices)
            grid = self._decode.grid(tokens, step.layers)
            self._decode(grid, self.arena.buffer, host, device, step.layer, step.layers)
        except BaseException:
            self._restoring.fail()
            raise
