"""L3 on a disk: SGLang's file backend, with a folder of its own and the same cap for each arm."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Smaller pages make so many files that what is measured is the file system.
PAGE_TOKENS_AT_LEAST = 16

#: SGLang fetches nothing shorter from storage by default (prefetch_threshold), in tokens.
FETCHED_FROM = 256


class Held(NamedTuple):
    """What lies in an arm's folder: pages' files, and bytes of all."""

    files: int
    nbytes: int


@dataclass(frozen=True)
class Disk:
    """What each arm may keep on disk.

    nbytes: the cap of all its files.
    fetched_from: prefixes shorter than this, in tokens, are computed rather than fetched.
    """

    nbytes: int
    fetched_from: int = FETCHED_FROM

    def args(self, folder: Path) -> tuple[str, ...]:
        """SGLang's arguments for this cap in ``folder``.

        A request waits until all of its prefix has come (wait_complete), so that hits are what the
        cap decides, and TTFT holds the reading. Only the least recent files go, as the cap demands.
        """
        more = {
            "file_storage_path": str(folder),
            "max_size": self.nbytes,
            "eviction_ratio": 1.0,
            "prefetch_threshold": self.fetched_from,
        }
        return (
            *("--hicache-storage-backend", "file"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", json.dumps(more)),
        )

    def reasons_invalid(self, held: Held, page_bytes: int) -> list[str]:
        """Why an arm that left ``held`` does not count, its pages taking ``page_bytes``."""
        if not held.files:
            return ["nothing was written to disk"]
        reasons = []
        if held.nbytes != held.files * page_bytes:
            reasons.append(
                f"{held.files} files hold {held.nbytes} B where a page of the layout takes "
                f"{page_bytes} B"
            )
        if held.nbytes > self.nbytes:
            reasons.append(f"{held.nbytes} B are on disk, more than the {self.nbytes} B it may be")
        return reasons


def held(folder: Path) -> Held:
    """What is in ``folder`` now."""
    with os.scandir(folder) as entries:
        sizes = [entry.stat().st_size for entry in entries if entry.name.endswith(".bin")]
    return Held(len(sizes), sum(sizes))


@contextlib.contextmanager
def emptied(*folders: Path) -> Iterator[None]:
    """Remove ``folders`` and what they hold, before and afterwards."""
    try:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
