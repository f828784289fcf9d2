"""What a quantised host pool shows to SGLang's L3 storage: its pages, sealed, and their format."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from hiqcache.codecs.base import Codec
from hiqcache.compatibility import WAY_OUT, UnsupportedError
from hiqcache.record import Format, Part, RecordLayout
from hiqcache.storage.backends import REFUSED, SERVED
from hiqcache.storage.pages import PageImages
from hiqcache.storage.seal import SEAL_BYTES
from hiqcache.storage.tag import PageFormat
from hiqcache.transfers.base import Transfer


class StoredPages:
    """Methods that SGLang's storage calls on a host pool, over the pool's arena.

    A mixin for host pools that have a ``transfer``. ``page_spans`` is into how many pieces a
    backend that reads and writes the arena itself cuts a page: SGLang's wants two of multi-head
    pools (its K and V; here the two halves) and one of latent pools.
    """

    page_spans = 2

    codec: Codec
    transfer: Transfer
    parts: tuple[Part, ...]
    layout_of_records: RecordLayout
    kv_buffer: torch.Tensor
    page_size: int
    layout: str
    start_layer: int
    end_layer: int
    pin_memory: bool
    row_dtype: torch.dtype

    @cached_property
    def images(self) -> PageImages:
        """The pool's pages as storage keeps them."""
        return PageImages(self.transfer.arena)

    def require_stored(self, backend: str) -> None:
        """Raise UnsupportedError unless storage ``backend`` takes the pool's pages."""
        require_storage(backend, self.layout, self.layout_of_records.format)
        if not self.layout_of_records.trailer_bytes:
            raise UnsupportedError(
                "the host pool was built without room for its pages' checksums, since SGLang was "
                f"started without a storage backend. Start it with --hicache-storage-backend "
                f"{backend}."
            )

    @property
    def storage_format_tag(self) -> str:
        """Names the pages' format in storage keys (SGLang appends it to the model's name)."""
        return PageFormat(
            self.codec.name,
            self.layout_of_records,
            (self.start_layer, self.end_layer),
            self.parts,
            str(self.row_dtype).removeprefix("torch."),
            get_parallel().attn_tp_size,
        ).tag

    def page_of(self, slot: int | torch.Tensor) -> int:
        """The page that ``slot`` lies in."""
        return int(slot) // self.page_size

    def pages_of(self, slots: torch.Tensor) -> list[int]:
        """The pages of ``slots``, whole pages one after the other."""
        return [slot // self.page_size for slot in slots[:: self.page_size].tolist()]

    def get_size_per_token(self) -> int:
        """Bytes of arena a token takes; SGLang sizes, meters and counts transfers by it."""
        return self.layout_of_records.bytes_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes per token of one of the pieces that get_page_buffer_meta names."""
        return self.get_size_per_token() // self.page_spans

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory that backends register for their own reads and writes."""
        return [self.kv_buffer]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The image of the page of slot ``index``: uint8 ``[page_bytes]``, or ``[spans, rest]``."""
        image = self.images.image(self.page_of(index))
        return image if flat else image.view(self.page_spans, -1)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """An empty image, for a backend to read into."""
        return torch.zeros(self.images.page_bytes, dtype=torch.uint8, pin_memory=self.pin_memory)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Make the page of slot ``index`` what the image ``data_page`` holds."""
        self.images.store(self.page_of(index), data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes of the pieces of the pages of ``indices``, page after page.

        Raises UnsupportedError for layer_first, whose pages are no spans of memory.
        """
        if not self.images.contiguous:
            raise UnsupportedError(
                "a layer_first host pool has no page in one piece for the storage backend to read "
                "and write. Start with --hicache-mem-layout page_first."
            )
        size = self.images.page_bytes // self.page_spans
        base = self.kv_buffer.data_ptr()
        pointers = [
            base + page * self.images.page_bytes + piece * size
            for page in self.pages_of(indices)
            for piece in range(self.page_spans)
        ]
        return pointers, [size] * len(pointers)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split_factor: int) -> Any:
        raise UnsupportedError(
            f"the storage backend splits pages by heads ({split_factor}), which HiQCache's pages "
            "do not. Leave tp_lcm_size out of --hicache-storage-backend-extra-config."
        )

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every piece starts at a multiple of ``page_size_bytes`` in memory."""
        piece = self.layout_of_records.page_bytes // self.page_spans
        aligned = (piece % page_size_bytes, self.kv_buffer.data_ptr() % page_size_bytes) == (0, 0)
        return aligned and self.layout_of_records.order == "page_first"


def require_storage(backend: str, layout: str, records: Format) -> None:
    """Raise UnsupportedError unless storage ``backend`` takes encoded pages of host ``layout``.

    layout: SGLang's name. records: how the pool's records lie; padded ones (the mover transfer's)
    make no pages.
    """
    flag = f"--hicache-storage-backend {backend}"
    if backend not in SERVED:
        why = REFUSED.get(backend, "HiQCache does not know it")
        raise UnsupportedError(f"{flag}: {why}. Choose one of {', '.join(SERVED)}, or: {WAY_OUT}")
    if layout not in SERVED[backend]:
        raise UnsupportedError(
            f"{flag} takes encoded pages with --hicache-mem-layout "
            f"{', '.join(SERVED[backend])}; it is {layout}. Choose one of those, or: {WAY_OUT}"
        )
    if records == "padded":
        raise UnsupportedError(
            f"{flag}: HIQCACHE_TRANSFER=mover pads its records, which make no page in one piece. "
            "Unset HIQCACHE_TRANSFER."
        )


def storage_of(allocator_type: str) -> str | None:
    """The storage backend of a pool that SGLang builds with ``allocator_type``, if any.

    SGLang 0.5.23 names a host pool's allocator after the storage backend (get_allocator_type).
    """
    return None if allocator_type == "default" else allocator_type


def trailer_of(backend: str | None, layout: str, records: Format, checksum: bool) -> int:
    """Bytes kept free in each page of a host pool behind storage ``backend``, for the page's seal.

    layout: SGLang's host layout. records: how the pool's records lie. checksum: whether they are
    checked at each restore (HIQCACHE_CHECKSUM). Raises UnsupportedError for what is not served.
    """
    if backend is None:
        return 0
    require_storage(backend, layout, records)
    if checksum:
        raise UnsupportedError(
            f"--hicache-storage-backend {backend}: HIQCACHE_CHECKSUM=1 knows no sums of records "
            "that come from storage. Unset it: pages from storage are verified without it."
        )
    return SEAL_BYTES
