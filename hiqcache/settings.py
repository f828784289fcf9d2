"""HIQCACHE_* environment variables, read once into a frozen Settings."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hiqcache.codecs import CODEC_NAMES

PREFIX = "HIQCACHE_"

#: The name of the codec that leaves SGLang's own host pool in place.
STOCK = "bf16"

VALUES: dict[str, tuple[str, ...]] = {
    "HIQCACHE_CODEC": (STOCK, *CODEC_NAMES),
    "HIQCACHE_TRANSFER": ("auto", "dma", "fused", "mover", "torch"),
    "HIQCACHE_SIZING": ("bytes", "tokens"),
    "HIQCACHE_RETRACTION": (STOCK, "quantised"),
    "HIQCACHE_METRICS": ("1", "0"),
    "HIQCACHE_CHECKSUM": ("0", "1"),
    "HIQCACHE_ALLOW_UNTRIED": ("0", "1"),
    # Any version of SGLang: see _version.
    "HIQCACHE_ALLOW_SGLANG": (),
}


class SettingsError(ValueError):
    """A HIQCACHE_ variable has an unknown name or value; the text says what it may be."""


@dataclass(frozen=True)
class Settings:
    """What the operator asked for.

    codec: ``bf16`` keeps SGLang's own pool; any other name is a codec of ``hiqcache.codecs``.
    transfer: ``auto`` picks fused on CUDA (int4: dma where the driver has it), torch elsewhere.
    sizing: what ``--hicache-ratio`` fixes. ``bytes``: the pool takes the bytes that SGLang's own
        pool would have taken, and holds more tokens. ``tokens``: it holds the tokens that SGLang's
        own pool would have held, in fewer bytes. ``--hicache-size`` means bytes either way.
    retraction: how a PD decode server keeps retracted requests in its host pool. ``bf16``: in
        SGLang's own rows, so that answers in the making stay as they were. ``quantised``: by the
        codec.
    metrics: whether the exporter runs.
    checksum: whether every record is summed at its backup and checked at its restore.
    allow_untried: whether families of models are served that are refused for no other reason than
        that no GPU has served them yet.
    allow_sglang: another release of SGLang than HiQCache is tested with, which is served all the
        same if it keeps the contract (hiqcache/sglang/contract.py); empty: none.
    """

    codec: str = STOCK
    transfer: str = "auto"
    sizing: str = "bytes"
    retraction: str = STOCK
    metrics: bool = True
    checksum: bool = False
    allow_untried: bool = False
    allow_sglang: str = ""

    @property
    def quantises(self) -> bool:
        """Whether L2 is stored in another format than the GPU's."""
        return self.codec != STOCK

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read every HIQCACHE_ variable of ``env`` (default: os.environ).

        Raises SettingsError for a name or a value that does not exist.
        """
        env = os.environ if env is None else env
        given: dict[str, str] = {}
        for name in sorted(n for n in env if n.startswith(PREFIX)):
            if name not in VALUES:
                close = difflib.get_close_matches(name, VALUES, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise SettingsError(
                    f"{name} is no HiQCache setting.{hint} Known: {', '.join(VALUES)}. "
                    "Unset it or correct its name (a Kubernetes Service called hiqcache sets such "
                    "variables: enableServiceLinks: false)."
                )
            value = env[name].strip().lower()
            if not value:
                continue
            if name == "HIQCACHE_ALLOW_SGLANG":
                value = _version(value)
            elif value not in VALUES[name]:
                raise SettingsError(
                    f"{name}={env[name]!r}: it must be one of {', '.join(VALUES[name])}."
                )
            given[name] = value
        settings = cls(
            codec=given.get("HIQCACHE_CODEC", STOCK),
            transfer=given.get("HIQCACHE_TRANSFER", "auto"),
            sizing=given.get("HIQCACHE_SIZING", "bytes"),
            retraction=given.get("HIQCACHE_RETRACTION", STOCK),
            metrics=given.get("HIQCACHE_METRICS", "1") == "1",
            checksum=given.get("HIQCACHE_CHECKSUM", "0") == "1",
            allow_untried=given.get("HIQCACHE_ALLOW_UNTRIED", "0") == "1",
            allow_sglang=given.get("HIQCACHE_ALLOW_SGLANG", ""),
        )
        if not settings.quantises and settings.transfer != "auto":
            raise SettingsError(
                f"HIQCACHE_TRANSFER={settings.transfer} does nothing with HIQCACHE_CODEC={STOCK}, "
                "which keeps SGLang's own transfers. Set HIQCACHE_CODEC "
                f"({', '.join(CODEC_NAMES)}) or unset HIQCACHE_TRANSFER."
            )
        if not settings.quantises and settings.checksum:
            raise SettingsError(
                f"HIQCACHE_CHECKSUM=1 does nothing with HIQCACHE_CODEC={STOCK}, which keeps "
                f"SGLang's own transfers. Set HIQCACHE_CODEC ({', '.join(CODEC_NAMES)}) or unset "
                "HIQCACHE_CHECKSUM."
            )
        if settings.transfer == "mover" and settings.codec != "int8":
            raise SettingsError(
                f"HIQCACHE_TRANSFER=mover serves HIQCACHE_CODEC=int8, not {settings.codec}. Unset "
                "HIQCACHE_TRANSFER."
            )
        return settings


def _version(value: str) -> str:
    """``value`` as one version; a range would let in what nobody has looked at."""
    if not re.fullmatch(r"\d+(\.\w+)+(\+[\w.]+)?", value):
        raise SettingsError(
            f"HIQCACHE_ALLOW_SGLANG={value!r}: it must be one version of SGLang, as pip writes it "
            "(0.5.24, 0.5.24.post1)."
        )
    return value
