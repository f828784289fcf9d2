"""Codecs: how a KV row becomes codes and scales, and back. One codec per file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hiqcache.codecs.base import Codec

#: The names that HIQCACHE_CODEC takes, next to bf16 (SGLang's own pool).
CODEC_NAMES = ("int8", "int8-rot", "int4")

#: Those that store every token by itself, at any page size.
TOKEN_CODECS = ("int8", "int8-rot")

#: Those that serve rows of an FP8 KV cache.
FP8_CODECS = ("int4",)


def get_codec(name: str) -> Codec:
    """The codec called ``name``. Raises ValueError with the known names for any other."""
    # torch is imported here, not above: settings and the command line need only the names.
    from hiqcache.codecs.int4 import Int4
    from hiqcache.codecs.int8 import Int8
    from hiqcache.codecs.int8_rot import Int8Rot

    classes: dict[str, type[Codec]] = {"int8": Int8, "int8-rot": Int8Rot, "int4": Int4}
    if name not in classes:
        raise ValueError(f"there is no codec {name!r}: choose one of {', '.join(CODEC_NAMES)}.")
    return classes[name]()
