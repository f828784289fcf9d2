"""The mover transfer: encode into staging memory on the GPU, then let SGLang's mover copy records.

The original HiQCache. Kept because it needs no kernel of our own, and as what the fused transfer is
compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch

from hiqcache.codecs.base import Codec
from hiqcache.codecs.int8 import Int8
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.indices import IndexSender

#: Tokens that are staged at once; a longer transfer goes in slices on the same stream. It bounds
#: the memory: a backup of 2,048 tokens of Qwen3-8B stages 170 MB.
STAGED_TOKENS = 2048


class RecordMover(Protocol):
    """Copies records of equal size between a device and pinned host memory, by index.

    Record tensors are uint8 ``[records, record_bytes]`` with any stride between records; tables are
    uint64 ``[layers]`` of such tensors' addresses; indices are int64 on the device. All work is
    enqueued on the current stream.
    """

    def can_move(self, record_bytes: int, page_size: int) -> bool:
        """Whether records of this size can be moved."""

    def move_layer(
        self,
        destination: tuple[torch.Tensor, torch.Tensor],
        destination_indices: torch.Tensor,
        source: tuple[torch.Tensor, torch.Tensor],
        source_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        """Copy one layer's K and V records."""

    def move_all_layers(
        self,
        destination: tuple[torch.Tensor, torch.Tensor],
        destination_indices: torch.Tensor,
        destination_stride: int,
        source: tuple[torch.Tensor, torch.Tensor],
        source_indices: torch.Tensor,
        source_stride: int,
        record_bytes: int,
        page_size: int,
    ) -> None:
        """Copy the K and V records of all layers, given as tables; strides in bytes."""


class Staging:
    """Device memory for ``[sides, layers, tokens, record]`` bytes that lives on between transfers.

    Grows to twice its size when a transfer needs more. An outgrown buffer is kept until the stream
    that used it has passed; a use on another stream waits, on the GPU, for the one before it.
    """

    def __init__(self, device: torch.device, layers: int, record_bytes: int) -> None:
        self._buffer = torch.empty((2, layers, 0, record_bytes), dtype=torch.uint8, device=device)
        self._used = self._event()
        self._outgrown: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, outgrown buffers included."""
        return self._buffer.nbytes + sum(buffer.nbytes for _, buffer in self._outgrown)

    @contextmanager
    def use(self, tokens: int) -> Iterator[torch.Tensor]:
        """Memory for ``tokens`` tokens, for work that is enqueued inside the context."""
        self._outgrown = [(used, old) for used, old in self._outgrown if not used.query()]  # type: ignore[no-untyped-call]
        if self._used is not None:
            self._used.wait()
        if tokens > self._buffer.shape[2]:
            if self._used is not None:
                self._outgrown.append((self._used, self._buffer))
                self._used = self._event()
            size, capacity = list(self._buffer.shape), 2 * self._buffer.shape[2]
            size[2] = min(max(tokens, capacity), STAGED_TOKENS)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        try:
            yield self._buffer[:, :, :tokens]
        finally:
            if self._used is not None:
                self._used.record()

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._buffer.is_cuda else None  # type: ignore[no-untyped-call]


class MoverTransfer(Transfer):
    """Codec int8 in torch, padded records, staging memory and SGLang's mover.

    Holds one staging buffer for each direction: all layers of a backup, one layer of a restore, of
    at most STAGED_TOKENS tokens. Not thread-safe.

    Raises ValueError for another codec, for packed records, and for record sizes that ``mover``
    refuses.
    """

    name: ClassVar[str] = "mover"

    def __init__(
        self,
        codec: Codec,
        arena: Arena,
        device: Sequence[Sequence[torch.Tensor]],
        mover: RecordMover,
    ) -> None:
        super().__init__(codec, arena, device)
        layout, rows = arena.layout, self.device[0][0]
        self._device, self._dtype = rows.device, rows.dtype
        self._heads, self._dim = rows.shape[1:]
        if not isinstance(codec, Int8):
            raise ValueError(
                f"transfer mover serves codec int8, not {codec.name}: use HIQCACHE_TRANSFER=fused."
            )
        self._int8 = codec
        if layout.format != "padded":
            raise ValueError(
                f"transfer mover copies whole records, so the arena's must be padded; they are "
                f"{layout.format}."
            )
        if [side[0].shape[1:] for side in self.device] != [rows.shape[1:]] * 2:
            raise ValueError(
                "transfer mover copies K and V records of one size, and this model's rows differ: "
                "use HIQCACHE_TRANSFER=fused."
            )
        # Padded records follow each other at one stride, whatever the page size.
        self._record = layout.page_bytes // (2 * layout.layers * layout.page_size)
        if not mover.can_move(self._record, layout.page_size):
            raise ValueError(
                f"SGLang's mover can't copy records of {self._record} B ({self._heads} KV heads of "
                f"{self._dim}): use HIQCACHE_TRANSFER=fused."
            )
        self._mover = mover
        self._indices = IndexSender(self._device)
        layers, slots = self.layers, arena.pages * layout.page_size
        planes = [part.codes for part in arena.planes]
        self._host_stride = planes[0].slot_stride
        self._host = tuple(
            tuple(
                arena.buffer.as_strided(
                    (slots, self._record),
                    (self._host_stride, 1),
                    plane.base + layer * plane.layer_stride,
                )
                for layer in range(layers)
            )
            for plane in planes
        )
        k_table, v_table = (
            torch.tensor([records.data_ptr() for records in side], dtype=torch.uint64)
            for side in self._host
        )
        self._host_tables = k_table.to(self._device), v_table.to(self._device)
        self._positions = torch.arange(STAGED_TOKENS, device=self._device)
        self._layers = torch.arange(layers, device=self._device)
        self._backup_staging = Staging(self._device, layers, self._record)
        self._restore_staging = Staging(self._device, 1, self._record)

    @property
    def staging_bytes(self) -> int:
        return self._backup_staging.nbytes + self._restore_staging.nbytes

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        host = self._indices.send("backup host", host_indices)
        device = self._indices.send("backup device", device_indices)
        for start in range(0, len(host), STAGED_TOKENS):
            part = slice(start, start + STAGED_TOKENS)
            self._backup_slice(host[part], device[part])

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        host = self._indices.send("restore host", host_indices)
        device = self._indices.send("restore device", device_indices)
        for start in range(0, len(host), STAGED_TOKENS):
            part = slice(start, start + STAGED_TOKENS)
            self._restore_slice(layer, host[part], device[part])

    def _backup_slice(self, host: torch.Tensor, device: torch.Tensor) -> None:
        with self._backup_staging.use(len(host)) as staging:
            for side, buffers in enumerate(self.device):
                for layer, buffer in enumerate(buffers):
                    codes, scales = self._int8.encode(buffer[device])
                    staged_codes, staged_scales = self._split(staging[side, layer])
                    staged_codes.copy_(codes)
                    staged_scales.copy_(scales)
            side_stride, layer_stride = staging.stride()[:2]
            k_table = self._layers * layer_stride + staging.data_ptr()
            self._mover.move_all_layers(
                self._host_tables,
                host,
                self._host_stride,
                (k_table.view(torch.uint64), (k_table + side_stride).view(torch.uint64)),
                self._positions[: len(host)],
                self._record,
                self._record,
                self.arena.layout.page_size,
            )

    def _restore_slice(self, layer: int, host: torch.Tensor, device: torch.Tensor) -> None:
        with self._restore_staging.use(len(host)) as staging:
            self._mover.move_layer(
                (staging[0, 0], staging[1, 0]),
                self._positions[: len(host)],
                (self._host[0][layer], self._host[1][layer]),
                host,
                self.arena.layout.page_size,
            )
            for side, buffers in enumerate(self.device):
                codes, scales = self._split(staging[side, 0])
                buffers[layer][device] = self._int8.decode(codes, scales, self._dtype)

    def _split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes ``[tokens, heads, head_dim]`` and scales ``[tokens, heads]`` in ``records``."""
        row = self.arena.layout.rows[0]
        codes = records[:, : row.codes].view(torch.int8)
        codes = codes.view(len(records), self._heads, self._dim)
        return codes, records[:, row.codes : row.codes + row.scales].view(torch.bfloat16)
