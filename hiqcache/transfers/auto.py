"""What HIQCACHE_TRANSFER=auto takes: the one rule, of servers and of plans. Needs no torch."""

from __future__ import annotations

from hiqcache.codecs import TOKEN_CODECS

#: Tokens per page from which dma is the faster one (results/h200/transfers.md): a page's layer is a
#: piece of a batched copy, and at pages of 16 a restore waits for the CPU that lists the pieces.
DMA_PAGE_SIZE = 64


def auto_transfer(codec: str, device: str, page_size: int, batched_copies: bool = True) -> str:
    """The transfer of ``codec`` on ``device`` (torch's name of its type).

    page_size: tokens per page.
    batched_copies: whether the driver has them (copy_engine.missing_batches); dma needs them.
    """
    if device != "cuda":
        return "torch"
    # Records of whole pages are tiled for the copy engine, whatever their size.
    fits = page_size >= DMA_PAGE_SIZE or codec not in TOKEN_CODECS
    return "dma" if fits and batched_copies else "fused"
