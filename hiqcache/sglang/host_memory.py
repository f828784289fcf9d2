"""How much host memory a pool may take: SGLang's own reading, which decides when it is built."""

from __future__ import annotations

import psutil


def memory_left() -> tuple[int, str]:
    """Bytes of host memory still to be had, and what limits them, as words after the number.

    SGLang heeds every cgroup above this process; where it cannot find them it goes by the machine.
    """
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes

    machine = psutil.virtual_memory().available
    left = int(available_host_memory_bytes(allow_cgroup_fallback=True))
    # Two readings of one machine differ by what was allocated between them.
    if left > machine * 0.99:
        return left, "of the machine's memory"
    return left, f"under a cgroup's limit; the machine has {machine / 1e9:.2f} GB"


def reserve_bytes() -> int:
    """Bytes that SGLang leaves free when it sizes pools."""
    from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES

    return int(HICACHE_HOST_MEMORY_RESERVE_BYTES)
