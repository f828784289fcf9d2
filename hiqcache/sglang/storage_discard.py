"""Takes a corrupt page out of storage, where SGLang's backend lets one: the next write replaces it.

Backends pass over keys that they hold, so a corrupt page that stays would be a miss for ever. Both
ways below are the backend's own, of SGLang 0.5.23: HiQCache calls nothing else of their insides.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def discard(backend: Any, key: str) -> bool:
    """Have ``backend`` forget the page ``key`` of this rank; whether it could."""
    forget = {"HiCacheFile": _from_files, "MooncakeStore": _from_mooncake}.get(
        type(backend).__name__
    )
    if forget is None:
        return False
    try:
        return forget(backend, key)
    except Exception as error:
        logger.warning("HiQCache: %s keeps the corrupt page %s: %r", backend, key, error)
        return False


def _from_files(backend: Any, key: str) -> bool:
    """HiCacheFile (hicache_storage.py): a file per page, and what it remembers of it."""
    name = backend._get_suffixed_key(key)
    with contextlib.suppress(FileNotFoundError):
        (Path(backend.file_path) / f"{name}.bin").unlink()
    backend._evictor.abort(name)
    if backend.metadata_cache is not None:
        backend.metadata_cache.remove(name)
    return True


def _from_mooncake(backend: Any, key: str) -> bool:
    """MooncakeStore (mooncake_store.py): an object per piece of a page."""
    rank = backend.mla_suffix if backend.is_mla_backend else backend.mha_suffix
    pieces = ("k",) if backend.is_mla_backend else ("k", "v")
    names = [f"{tagged}_{rank}_{piece}" for tagged in backend._tag_keys([key]) for piece in pieces]
    # By force: the read that found it left a lease on it, and every later one would. Whoever reads
    # it at this moment proves it too.
    removed = [backend.store.remove(name, True) for name in names]
    return not any(removed)
