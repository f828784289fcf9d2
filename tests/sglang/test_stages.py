"""L2 of pipeline stages under --hicache-size, of which SGLang gives each stage the same bytes.

Stages hold different layers, so SGLang has them agree on the smallest number of tokens, pool by
pool: here they are processes of a real group that ask each other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.runtime_context import get_parallel

from tests.sglang.assembled import Assembled, apart, assembled, latent, plain, recurrent, sliding
from tests.sglang.builders import needs_latent_rows

GIGABYTE = 10**9


def met(
    shape: Callable[..., CacheInitParams], meeting: str, page_size: int, **pool: int
) -> CacheInitParams:
    """``shape``'s pools, once the stages have found each other by the file ``meeting``."""
    parallel = get_parallel()
    init_distributed_environment(
        parallel.pp_size, parallel.pp_rank, f"file://{meeting}", parallel.pp_rank, "gloo"
    )
    initialize_model_parallel("gloo")
    return shape(page_size, **pool)


def pipeline(
    shape: Callable[..., CacheInitParams],
    stages: list[dict[str, int]],
    codec: str,
    page_size: int,
    folder: Path,
) -> list[Assembled]:
    """What SGLang assembles for each of ``stages``, beside each other."""
    flags = {"pp_size": len(stages), "hicache_ratio": None, "hicache_size": 1}
    flags["page_size"] = page_size
    pools = partial(met, shape, str(folder / f"{codec}-meeting"))

    def assemble(rank: int) -> Assembled:
        return apart(assembled, pools, codec, flags=flags, rank=rank, **stages[rank])

    with ThreadPoolExecutor(len(stages)) as beside:
        return list(beside.map(assemble, range(len(stages))))


@pytest.mark.parametrize(
    ("shape", "stages", "page_size"),
    [
        (plain, [{"layers": 2}, {"layers": 4}], 16),
        pytest.param(latent, [{"layers": 2}, {"layers": 4}], 16, marks=needs_latent_rows),
        (sliding, [{"full": 1, "swa": 4}, {"full": 3, "swa": 2}], 16),
        (recurrent, [{"full": 1, "linear": 2}, {"full": 2, "linear": 5}], 1),
    ],
    ids=["plain", "latent", "sliding", "recurrent"],
)
def test_stages_hold_the_same_slots_within_the_bytes_of_each(
    shape: Callable[..., CacheInitParams],
    stages: list[dict[str, int]],
    page_size: int,
    tmp_path: Path,
) -> None:
    stock, ours = (
        pipeline(shape, stages, codec, page_size, tmp_path) for codec in ("bf16", "int8")
    )
    for found in (stock, ours):
        slots = [{name: pool.slots for name, pool in stage.pools.items()} for stage in found]
        assert slots[0] == slots[1]
        # SGLang adds a page to each pool.
        spare = [
            sum(pool.bytes_per_slot for pool in stage.pools.values()) * page_size for stage in found
        ]
        assert all(stage.bytes <= GIGABYTE + more for stage, more in zip(found, spare, strict=True))
    for name, pool in ours[0].pools.items():
        gain = pool.slots / stock[0].pools[name].slots
        assert gain > (1 if shape is recurrent else 1.8), name
    if shape is not recurrent:  # of whose pools either stage may hold the smallest
        assert max(stage.bytes for stage in ours) > 0.7 * GIGABYTE
