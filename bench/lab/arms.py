"""The arms of a comparison: servers that differ in how L2 keeps KV, and in nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from hiqcache.codecs import CODEC_NAMES
from hiqcache.geometry import KVGeometry
from hiqcache.plan import layout_for
from hiqcache.settings import VALUES
from hiqcache.storage.seal import SEAL_BYTES


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
    def file_name(self) -> str:
        """Its name without a colon."""
        return self.name.replace(":", "-")

    @property
    def quantises(self) -> bool:
        """Whether HiQCache stores L2 in another format than the GPU's."""
        return self.codec != "bf16"

    def bytes_per_token(
        self, geometry: KVGeometry, page_size: int = 1, storage: bool = False
    ) -> int:
        """Bytes of L2 that the layout gives a token; what a running server must agree with.

        storage: whether there is an L3, for which pages are sealed.
        """
        if not self.quantises:
            return geometry.stock_bytes_per_token * self.kv_item_bytes // 2
        trailer = SEAL_BYTES if storage else 0
        layout = layout_for(geometry, self.codec, page_size, self.transfer, trailer)
        return layout.bytes_per_token


_FP8 = ("--kv-cache-dtype", "fp8_e4m3")

#: SGLang's own, and with what it has on the GPU. The fp8 arm is its rival to ours: KV in FP8 on the
#: GPU and, therefore, in L2; fp8+int4 has ours behind that.
_STOCK = (
    Arm("bf16", "stock BF16", "bf16"),
    Arm("fp8", "stock, FP8 KV cache", "bf16", None, _FP8, 1),
    Arm("fp8+int4", "FP8 KV cache, int4 behind it", "int4", None, _FP8, 1),
)

#: How an arm was called in results of before December 2026.
_FORMERLY = {"mover": "int8:mover"}

#: What an arm may be called, for help texts.
NAMES = "bf16, fp8, fp8+int4, CODEC or CODEC:TRANSFER"


def name_today(name: str) -> str:
    """What the arm ``name`` of any result is called now."""
    return _FORMERLY.get(name, name)


def arm_named(name: str) -> Arm:
    """The arm called ``name``: bf16, fp8, a codec, or codec:transfer, as in int8:mover.

    Raises ValueError where there is no such arm.
    """
    name = name_today(name)
    for arm in _STOCK:
        if arm.name == name:
            return arm
    codec, colon, transfer = name.partition(":")
    transfers = VALUES["HIQCACHE_TRANSFER"]
    if codec not in CODEC_NAMES or (colon and transfer not in transfers):
        raise ValueError(
            f"there is no arm {name!r}: take {NAMES}, of the codecs {', '.join(CODEC_NAMES)} and "
            f"the transfers {', '.join(transfers)}."
        )
    if transfer == "mover":
        return Arm(name, f"{codec}, padded records, SGLang's mover", codec, transfer)
    return Arm(name, f"{codec}, {transfer}" if transfer else codec, codec, transfer or None)


def arms_named(names: str) -> list[Arm]:
    """The arms of a comma-separated list. Raises ValueError for one that does not exist."""
    chosen = [arm_named(name.strip()) for name in names.split(",") if name.strip()]
    if not chosen:
        raise ValueError(f"no arms in {names!r}: give a comma-separated list of {NAMES}.")
    return chosen


def arms_argument(names: str) -> list[Arm]:
    """``arms_named`` for argparse. Raises ArgumentTypeError."""
    try:
        return arms_named(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def title(arm: str) -> str:
    """An arm's name in a table. Raises ValueError."""
    return arm_named(arm).title
