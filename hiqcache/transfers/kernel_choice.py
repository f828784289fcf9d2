"""Which kernels serve a codec."""

from __future__ import annotations

from hiqcache.codecs.base import Codec
from hiqcache.transfers.codec_kernels import CodecKernels
from hiqcache.transfers.page_kernels import PageKernels
from hiqcache.transfers.row_kernels import RowKernels


def kernels_of(transfer: str, codec: Codec) -> type[CodecKernels]:
    """The kernels with the arithmetic of ``codec``. Raises ValueError where none have it."""
    served: list[type[CodecKernels]] = [RowKernels, PageKernels]
    for kernels in served:
        if codec.name in kernels.codecs:
            return kernels
    names = [name for kernels in served for name in kernels.codecs]
    raise ValueError(
        f"transfer {transfer} serves codecs {', '.join(names)}, not {codec.name}: use "
        "HIQCACHE_TRANSFER=torch."
    )
