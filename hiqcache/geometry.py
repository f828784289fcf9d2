"""KVGeometry: the shape of the KV rows that one rank holds in one pool."""

from __future__ import annotations

from dataclasses import dataclass

from hiqcache.record import Part, kv_parts, latent_parts

#: Dtypes of models that are served, and their bytes per element.
ITEM_BYTES = {"bfloat16": 2, "float16": 2}

#: The rows' dtype under SGLang's --kv-cache-dtype, where that is not the model's (auto).
KV_CACHE_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_ROW_BYTES = ITEM_BYTES | dict.fromkeys(KV_CACHE_DTYPES.values(), 1)


class GeometryError(ValueError):
    """A model configuration that cannot be read, or a shape that no pool has."""


@dataclass(frozen=True)
class KVGeometry:
    """KV rows of one rank and pool: ``layers`` x ``parts``, all of one ``dtype``.

    Each token has a row of each part in each layer: K and V of plain attention; the latent and the
    rope, side by side in one buffer, of latent attention.
    """

    layers: int
    parts: tuple[Part, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = [self.layers, *(n for part in self.parts for n in (part.heads, part.width))]
        if not self.parts or min(sizes) < 1:
            raise GeometryError(f"layers, heads and widths must be positive: {self}")
        if self.dtype not in _ROW_BYTES:
            raise GeometryError(f"KV dtype {self.dtype}: HiQCache serves {', '.join(_ROW_BYTES)}.")

    @classmethod
    def of_heads(
        cls,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        v_head_dim: int | None = None,
    ) -> KVGeometry:
        """K and V of multi-head, grouped-query or multi-query attention."""
        return cls(layers, kv_parts(heads, head_dim, v_head_dim), dtype)

    @classmethod
    def of_latent(cls, layers: int, latent: int, rope: int, dtype: str = "bfloat16") -> KVGeometry:
        """The compressed row of multi-head latent attention; every rank holds all of it."""
        return cls(layers, latent_parts(latent, rope), dtype)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in the GPU's precision."""
        return _ROW_BYTES[self.dtype]

    @property
    def stock_bytes_per_token(self) -> int:
        """Bytes that a token takes in SGLang's own host pool."""
        return self.layers * self.item_bytes * sum(part.heads * part.width for part in self.parts)

    def __str__(self) -> str:
        kinds = ", ".join(f"{part.name} {part.heads} x {part.width}" for part in self.parts)
        return f"{self.layers} layers of {kinds} ({self.dtype})"
