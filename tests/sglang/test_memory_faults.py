"""Host memory that is not there, or cannot be pinned: no pool comes of it, and it is said why.

That a server ends with the error of a pool that it could not build, and with nothing else, is seen
in tests/e2e/test_starts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

from hiqcache.sglang import host_pool as module
from hiqcache.sglang.copying_pool import MHATokenToKVPoolHostCopy
from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost
from tests.sglang.builders import buffer_info, host_pool

POOLS = [QuantisedMHATokenToKVPoolHost, MHATokenToKVPoolHostCopy]


@pytest.fixture(autouse=True)
def _int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")


@pytest.mark.parametrize("pool", POOLS)
def test_more_than_there_is_is_refused_with_both_sizes(pool: type) -> None:
    with pytest.raises(ValueError, match=r"Requesting 2\.00 GB but only have 1\.00 GB free"):
        host_pool(buffer_info(), size_gb=2, cls=pool)


@pytest.mark.parametrize("pool", POOLS)
def test_memory_that_the_kernel_does_not_give_is_an_error(pool: type) -> None:
    """More than an address space: where SGLang's reckoning was wrong, the kernel's word counts."""
    with host_memory_budget_scope(10**18), pytest.raises((OSError, MemoryError, RuntimeError)):
        host_pool(buffer_info(), size_gb=10**6, cls=pool)


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's allocator raises it on a GPU; nothing falls back to memory that is not pinned."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("cudaHostRegister failed (rc=2, out of memory)")

    monkeypatch.setitem(module.ALLOC_MEMORY_FUNCS, "cpu", refuse)
    with pytest.raises(RuntimeError, match="cudaHostRegister failed"):
        host_pool(buffer_info())
