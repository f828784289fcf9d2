"""What HIQCACHE_TRANSFER=auto takes: the one rule, of servers and of plans. Needs no torch."""

from __future__ import annotations

from hiqcache.codecs import TOKEN_CODECS


def auto_transfer(codec: str, device: str, batched_copies: bool = True) -> str:
    """The transfer of ``codec`` on ``device`` (torch's name of its type).

    batched_copies: whether the driver has them (copy_engine.missing_batches); dma needs them.
    """
    if device != "cuda":
        return "torch"
    # On a GPU, dma has run in benchmarks alone (results/h200): fused serves until servers have run
    # it. Records of whole pages are tiled for the copy engine.
    return "dma" if codec not in TOKEN_CODECS and batched_copies else "fused"
