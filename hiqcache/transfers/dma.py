"""The dma transfer: the copy engine moves whole pages' layers, kernels work on a ring behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy
import torch

from hiqcache.codecs.base import Codec
from hiqcache.record import ALIGNMENT, Planes, round_up
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.batches import EDGE_BYTES, Batch, by_layers, by_pages
from hiqcache.transfers.codec_kernels import CodecKernels, check_memory
from hiqcache.transfers.copy_engine import CopyEngine, CudaCopyEngine
from hiqcache.transfers.fused import FusedTransfer
from hiqcache.transfers.kernel_choice import kernels_of
from hiqcache.transfers.launch import (
    BACKUP_BYTES,
    DECODE,
    ENCODE,
    RING_SLOT_BYTES,
    RING_SLOTS,
    Launch,
)
from hiqcache.transfers.restoring import Asking


class _Slot:
    """Memory of the ring for one batch.

    ``copied``: the event of its last copy. ``free``: the event of its last use, copy or kernel.
    """

    def __init__(self, memory: torch.Tensor, engine: CopyEngine) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.copied, self.used = engine.event(), engine.event()
        self.free = self.used


@dataclass
class _Restore:
    """A restore under way: batches to copy yet, and batches copied that are not decoded yet.

    One that nobody goes on with is let go: its slots are free once their copies end.
    """

    pages: list[int]
    #: The first layer that it does not have.
    stop: int
    to_copy: Iterator[Batch]
    copied: deque[tuple[Batch, _Slot]] = field(default_factory=deque)


class DmaTransfer(Transfer):
    """Copies chunks by batched copies on streams of their own, through a small ring on the device.

    A restore copies ahead into the ring, and kernels on the current stream decode behind it; a
    backup encodes into the ring, and copies follow. So the link never waits for a kernel, nor a
    kernel for more than its own batch, and nothing waits on the CPU. Events order all of it with
    the stream that is current in the call.

    Serves what RowKernels and PageKernels do, in packed arenas whose pages have CHUNK_TOKENS slots
    or more. Host indices that are on the CPU and name whole pages, in their slots' order, go this
    way. FusedTransfer takes the others: host slots on the device, parts of pages, and transfers of
    fewer than ``least_bytes``, which it does in less time. Both write the same bytes.

    Restores are known by their tensors, and what must live or stay as it is meanwhile is the same
    as in FusedTransfer. Not thread-safe.

    ``encode``, ``decode``, ``slot_bytes``, ``slots``, ``backup_bytes``, ``edge_bytes`` (as in
    by_layers), ``least_bytes`` and ``engine`` are for measurements and tests; the defaults serve.

    Raises ValueError where the pool, the codec or the driver can't be served.
    """

    name: ClassVar[str] = "dma"

    def __init__(
        self,
        codec: Codec,
        arena: Arena,
        device: Sequence[Sequence[torch.Tensor]],
        encode: Launch | None = None,
        decode: Launch | None = None,
        slot_bytes: int = RING_SLOT_BYTES,
        slots: int = RING_SLOTS,
        backup_bytes: int | None = None,
        edge_bytes: int = EDGE_BYTES,
        least_bytes: int = 0,
        engine: CopyEngine | None = None,
    ) -> None:
        super().__init__(codec, arena, device)
        kernels_for = kernels_of(self.name, codec)
        check_memory(self.name, arena.buffer)
        layout = arena.layout
        if layout.format != "packed" or layout.chunk_layers != 1:
            raise ValueError(
                f"transfer dma moves a page's layer as one piece, which packed pages of few tokens "
                f"have not: this arena's are {layout.format}, of {layout.page_size}. Use "
                "--page-size 16 or more, or HIQCACHE_TRANSFER=fused."
            )
        rows = self.device[0][0]
        self._engine = engine or CudaCopyEngine(rows.device)
        self._fused = FusedTransfer(codec, arena, device)
        self._edge_bytes, self._least_bytes = edge_bytes, least_bytes
        self._chunk, self._page_size = layout.chunk_bytes, layout.page_size
        self._slot_bytes = round_up(max(slot_bytes, self._chunk), ALIGNMENT)
        most = max(backup_bytes or BACKUP_BYTES[codec.name], self._chunk)
        self._backup_bytes = min(most, self._slot_bytes)
        self._address = arena.buffer.data_ptr()
        plane = arena.planes[0].codes
        self._page_stride, self._layer_stride = plane.page_stride, plane.layer_stride
        # A chunk of the ring is like one of the arena; layers follow each other within a page.
        planes = tuple(
            Planes(
                *(p._replace(page_stride=self._chunk, layer_stride=self._chunk) for p in part),
            )
            for part in arena.planes
        )
        memory = torch.empty(
            (slots, self._slot_bytes), dtype=torch.uint8, device=rows.device
        )  # torch aligns it
        self._ring = deque(_Slot(part, self._engine) for part in memory)
        self._begun = self._engine.event()
        self._ring_bytes = memory.nbytes
        kernels = codec, self.device, planes, layout.page_size, memory[0]
        self._encode = kernels_for(
            "backup", *kernels, encode or ENCODE[codec.name], transfer=self.name
        )
        self._decode = kernels_for(
            "restore", *kernels, decode or DECODE[codec.name], transfer=self.name
        )
        self._in_page = numpy.arange(layout.page_size)
        self._places = [self._place(layers) for layers in range(1, self.layers + 1)]
        self._asking = Asking()
        self._restore: _Restore | None = None

    @property
    def staging_bytes(self) -> int:
        return self._ring_bytes

    @property
    def launches(self) -> dict[str, Launch]:
        """How wide the kernels run on this GPU."""
        return {"backup": self._encode.launch, "restore": self._decode.launch}

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        pages = self._pages(host_indices)
        if pages is None:
            self._fused.backup(host_indices, device_indices)
            return
        # It takes the ring: of a restore that is not complete, layers to come are copied anew.
        self._restore = None
        device = self._on_device(device_indices)
        stream, engine = self._encode.stream(), self._engine
        slot, known = None, False
        for batch in self._backup_batches(len(pages)):
            slot = self._next_slot()
            engine.wait(slot.free, stream)
            self._launch(self._encode, batch, slot, device)
            engine.record(slot.used, stream)
            if not known:
                # Beside the first kernel, which writes nothing but the ring.
                known = self._are_whole(host_indices)
                if not known:
                    slot.free = slot.used
                    self._fused.backup(host_indices, device_indices)
                    return
            engine.hold("to_host", slot.used)
            ring, arena, sizes = self._pieces(batch, slot, pages)
            engine.copy("to_host", arena, ring, sizes, slot.copied)
            slot.free = slot.copied
        if slot is not None:
            # Copies of one way follow each other: the last is the end of all.
            engine.wait(slot.copied, stream)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        stream, engine = self._decode.stream(), self._engine
        run, self._restore = self._restore, None
        if self._asking.begins(layer, host_indices, device_indices, stream) or run is None:
            run = self._begun_restore(layer, host_indices, stream)
            if run is None:
                self._fused.restore(layer, host_indices, device_indices)
                return
        device = self._on_device(device_indices)
        while run.copied and run.copied[0][0].layer <= layer:
            batch, slot = run.copied.popleft()
            engine.wait(slot.copied, stream)
            self._launch(self._decode, batch, slot, device)
            engine.record(slot.used, stream)
            slot.free = slot.used
            self._copy_ahead(run)
        # Nothing is kept of a restore that is complete, or that has failed.
        if layer + 1 < run.stop:
            self._restore = run

    def _begun_restore(
        self, layer: int, host_indices: torch.Tensor, stream: int | None
    ) -> _Restore | None:
        """A restore whose first copies are enqueued; None for one that does not go this way."""
        pages = self._pages(host_indices)
        # Of what goes by kernels each layer begins here.
        if pages is None or (layer and not self._are_whole(host_indices)):
            return None
        # Who starts in the middle may not go on.
        layers = range(layer, self.layers if layer == 0 else layer + 1)
        batches = by_layers(layers, len(pages), self._chunk, self._slot_bytes, self._edge_bytes)
        run = _Restore(pages, layers.stop, batches)
        # All that the stream was to wait for, the copies wait for too.
        self._engine.record(self._begun, stream)
        self._engine.hold("to_device", self._begun)
        # Before the first kernel: the link is not to wait for its launch.
        self._copy_ahead(run)
        # Beside the first copies, which write nothing but the ring.
        return run if layer or self._are_whole(host_indices) else None

    def _copy_ahead(self, run: _Restore) -> None:
        """Enqueue copies until the ring is full of batches that wait to be decoded."""
        while len(run.copied) < len(self._ring):
            batch = next(run.to_copy, None)
            if batch is None:
                return
            slot = self._next_slot()
            self._engine.hold("to_device", slot.free)
            ring, arena, sizes = self._pieces(batch, slot, run.pages)
            self._engine.copy("to_device", ring, arena, sizes, slot.copied)
            slot.free = slot.copied
            run.copied.append((batch, slot))

    def _backup_batches(self, pages: int) -> Iterator[Batch]:
        if self._layer_stride == self._chunk:
            return by_pages(self.layers, pages, self._chunk, self._backup_bytes)
        layers = range(self.layers)
        return by_layers(layers, pages, self._chunk, self._backup_bytes, self._edge_bytes)

    def _next_slot(self) -> _Slot:
        """The slot whose turn it is: both ways share the ring."""
        slot = self._ring[0]
        self._ring.rotate(-1)
        return slot

    def _launch(
        self, kernels: CodecKernels, batch: Batch, slot: _Slot, device: torch.Tensor
    ) -> None:
        size, tokens = self._page_size, device.numel()
        if batch.pages * size != tokens:
            device = device[batch.page * size : (batch.page + batch.pages) * size]
            tokens = batch.pages * size
        kernels(
            kernels.grid(tokens, batch.layers),
            slot.memory,
            self._places[batch.layers - 1],
            device,
            batch.layer,
            batch.layers,
            # The kernel counts layers of the pool, the slot begins with the batch's first.
            shift=-batch.layer * self._chunk,
        )

    def _pieces(
        self, batch: Batch, slot: _Slot, pages: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Addresses in the slot and in the arena, and bytes, of each piece of a batch."""
        chunk, layers = self._chunk, batch.layers
        start = self._address + batch.layer * self._layer_stride
        arena = [
            start + page * self._page_stride
            for page in pages[batch.page : batch.page + batch.pages]
        ]
        span = layers * chunk
        ring = [slot.address + index * span for index in range(len(arena))]
        if self._layer_stride == chunk or layers == 1:
            return ring, arena, [span] * len(arena)
        steps = range(layers)
        ring = [at + step * chunk for at in ring for step in steps]
        arena = [at + step * self._layer_stride for at in arena for step in steps]
        return ring, arena, [chunk] * len(ring)

    def _pages(self, host_indices: torch.Tensor) -> list[int] | None:
        """The pages of a transfer that may go this way; None for one that does not.

        Those that every ``page_size``-th slot lies in: what ``_are_whole`` says, comes on top.
        """
        size, tokens = self._page_size, host_indices.numel()
        if not host_indices.is_cpu or tokens % size or not tokens:
            return None
        if tokens * self.arena.layout.bytes_per_token < self._least_bytes:
            return None
        found: list[int] = (host_indices.numpy()[::size] // size).tolist()
        return found

    def _are_whole(self, host_indices: torch.Tensor) -> bool:
        """Whether the slots are whole pages, each in its slots' order."""
        slots = host_indices.numpy()
        firsts = slots[:: self._page_size]
        whole: numpy.ndarray = numpy.add.outer(firsts, self._in_page).ravel()
        return bool((firsts % self._page_size == 0).all() and (whole == slots).all())

    def _place(self, layers: int) -> torch.Tensor:
        """The ring's slots for tokens of a batch of ``layers``: int64 ``[tokens that fit]``."""
        size = self._page_size
        device = self.device[0][0].device
        tokens = torch.arange(self._slot_bytes // (layers * self._chunk) * size, device=device)
        return tokens // size * (layers * size) + tokens % size

    def _on_device(self, device_indices: torch.Tensor) -> torch.Tensor:
        return self._fused.indices.send("dma device", device_indices)
