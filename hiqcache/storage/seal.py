"""A page's seal: a checksum of its bytes and of its identity, in its last bytes.

The identity names the format, the model, the rank and the page's key, so that a page's bytes under
another's name fail as altered bytes do. The hash is XXH3 (128 bits): it finds faults, not forgers;
who may write to the storage may put any answer there.
"""

from __future__ import annotations

import torch
import xxhash

SEAL_BYTES = 16


def digest(identity: str, content: torch.Tensor) -> bytes:
    """The seal of ``content``, uint8 ``[bytes]`` on the CPU, under ``identity``."""
    hashed = xxhash.xxh3_128(identity.encode())
    hashed.update(b"\0")
    hashed.update(content.numpy().data)
    return hashed.digest()


def seal(identity: str, image: torch.Tensor) -> None:
    """Write the seal of ``image`` (uint8 ``[page_bytes]``) into its last bytes."""
    value = digest(identity, image[:-SEAL_BYTES])
    image[-SEAL_BYTES:] = torch.frombuffer(bytearray(value), dtype=torch.uint8)


def sealed(identity: str, image: torch.Tensor) -> bool:
    """Whether ``image`` is the page ``identity``, byte for byte."""
    return image[-SEAL_BYTES:].numpy().tobytes() == digest(identity, image[:-SEAL_BYTES])
