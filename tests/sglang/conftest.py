"""What the tests of pools share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope


@pytest.fixture(autouse=True)
def _some_memory() -> Iterator[None]:
    """A gigabyte for the pools of a test: SGLang wants 10 GiB more than it takes to be free."""
    with host_memory_budget_scope(10**9):
        yield
