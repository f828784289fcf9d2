"""SGLang's storage backends: which take encoded pages, and why the others do not."""

from __future__ import annotations

from types import MappingProxyType

#: Backends (SGLang 0.5.23, mem_cache/storage) that take encoded pages, by what SGLang calls them,
#: and SGLang's host layouts in which they do. ``nixl``, ``eic`` and ``seaweedfs`` are served by
#: construction: their keys hold the model's name, to which SGLang appends the format tag.
SERVED = MappingProxyType(
    {
        "file": ("page_first", "page_first_direct", "layer_first"),
        "mooncake": ("page_first", "page_first_direct"),
        "nixl": ("page_first", "page_first_direct", "layer_first"),
        # Its own copies of other layouts are of the model's dtype, not of bytes.
        "eic": ("page_first",),
        "seaweedfs": ("page_first", "page_first_direct"),
        "dynamic": ("page_first", "page_first_direct", "layer_first"),
    }
)

_NO_TAG = "its keys name no format, so a server of another codec would find these pages"

#: Why the others are refused.
REFUSED = MappingProxyType(
    {
        "hf3fs": _NO_TAG,
        "simm": _NO_TAG,
        "npu_memcache": _NO_TAG,
        "aibrix": f"{_NO_TAG}, and it wants pages of the model's own rows",
        "tensorcast": "it takes SGLang's own host pools only",
        "mori": "nobody has tried it with encoded pages",
        "shm": "it hands the arena to another program, which would read codes as rows",
        "sim": "it only pretends to store",
    }
)
