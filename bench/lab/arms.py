"""The arms of a comparison: servers that differ in how L2 keeps KV, and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hiqcache.geometry import KVGeometry
from hiqcache.plan import layout_for


@dataclass(frozen=True)
class Arm:
    """One arm.

    codec: HIQCACHE_CODEC; bf16 is SGLang's own host pool.
    transfer: HIQCACHE_TRANSFER, None for the package's own choice.
    args: SGLang arguments that this arm has and the others have not.
    kv_item_bytes: bytes of a K or V element on the GPU.
    """

    name: str
    title: str
    codec: str
    transfer: str | None = None
    args: tuple[str, ...] = ()
    kv_item_bytes: int = 2

    @property
    def env(self) -> Mapping[str, str]:
        """The HIQCACHE_ variables of the arm."""
        env = {"HIQCACHE_CODEC": self.codec}
        return env if self.transfer is None else {**env, "HIQCACHE_TRANSFER": self.transfer}

    @property
    def quantises(self) -> bool:
        """Whether HiQCache stores L2 in another format than the GPU's."""
        return self.codec != "bf16"

    def bytes_per_token(self, geometry: KVGeometry, page_size: int = 1) -> int:
        """Bytes of L2 that the layout gives a token; what a running server must agree with."""
        if not self.quantises:
            return geometry.stock_bytes_per_token * self.kv_item_bytes // 2
        padded = self.transfer == "mover"
        return layout_for(
            geometry, self.codec, page_size, "padded" if padded else "packed"
        ).bytes_per_token


def _by_name(*arms: Arm) -> Mapping[str, Arm]:
    return MappingProxyType({arm.name: arm for arm in arms})


#: Every arm there is, by name. The fp8 arm is SGLang's own rival: KV in FP8 on the GPU and,
#: therefore, in the host pool.
ARMS: Mapping[str, Arm] = _by_name(
    Arm("bf16", "stock BF16", "bf16"),
    Arm("mover", "int8, padded records, SGLang's mover", "int8", "mover"),
    Arm("int8", "int8", "int8"),
    Arm("int8-rot", "int8-rot", "int8-rot"),
    Arm("fp8", "stock, FP8 KV cache", "bf16", None, ("--kv-cache-dtype", "fp8_e4m3"), 1),
)


def arms_named(names: str) -> list[Arm]:
    """The arms of a comma-separated list. Raises ValueError for one that does not exist."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in ARMS]
    if unknown or not chosen:
        raise ValueError(f"arms {names!r}: choose a comma-separated list from {', '.join(ARMS)}.")
    return [ARMS[name] for name in chosen]


def title(arm: str) -> str:
    """An arm's name in a table. Raises KeyError."""
    return ARMS[arm].title
