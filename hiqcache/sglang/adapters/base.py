"""What an adapter does: one module a release of SGLang, for what the served releases do otherwise.

The rest of the package knows one way to describe the device's rows, that of SGLang 0.5.23's
MHABufferInfo: ``buffers`` (``k`` and ``v``, a tensor ``[slot, head, width]`` for each layer, and
``layout``), ``head_num``, ``head_dim``, ``v_head_dim``, ``dtype``, ``device`` and ``scales``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hiqcache.sglang.terms import Need


class Adapter(Protocol):
    """A module of this package."""

    @property
    def NEEDS(self) -> tuple[Need, ...]:
        """What is needed of this release and not of every one."""

    @property
    def HOOKS(self) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """Targets in SGLang, and what goes around them."""

    @property
    def LATENT(self) -> bool:
        """Whether the release describes latent rows, as 0.5.23's MLABufferInfo does."""

    def rows(self, given: Any) -> Any:
        """The device's rows, of what SGLang hands its selector and its host pools."""

    def rows_of_device_pool(self, kv_pool: Any) -> Any:
        """The rows of a device pool of plain heads."""

    def rows_of_host_pool(self, pool: Any) -> Any:
        """The device's rows that a host pool of SGLang's own class moves."""

    def packed_drafts(self, arguments: Mapping[str, Any]) -> int:
        """How many draft layers SGLang packs into a host pool that it builds with ``arguments``."""

    def sidecar_drafts(self, params: Any) -> tuple[Any, ...]:
        """Device pools of draft models beside the target that ``params`` (CacheInitParams) is."""
