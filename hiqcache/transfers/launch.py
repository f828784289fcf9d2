"""How wide the kernels run, chosen by measurement."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """How wide a kernel runs: ``elements`` a tile, ``programs`` in the grid, ``warps`` of each.

    ``stages`` is Triton's num_stages of the kernel's inner loop. A tile is decoded while the
    records of ``stages`` - 2 more are under way, or encoded while the rows of so many are; with
    int8-rot of half as many. With one stage, none are.
    """

    elements: int
    programs: int
    warps: int
    stages: int = 1


# Chosen on an H200 with 2,048 tokens of Qwen3-8B (bench/launches.py, whose figures are in
# results/h200/launches.md). A backup's writes wait for no answer: a kernel that encodes faster than
# PCIe takes them fills the queues that the other multiprocessors' loads pass too, and a decode step
# beside it can take twice as long. So a backup has what it takes to come near PCIe's speed and
# no more: rows of int8 are loaded as they are needed, by four warps. In layer_first, records are in
# smaller pieces, and random slots want more programs. Restore: few programs, with several tiles
# each on their way; more are no faster, and a decode step beside them loses more. int8-rot's take
# longer to decode one.
BACKUP = {
    ("int8", "page_first"): Launch(8192, 8, 4),
    ("int8", "layer_first"): Launch(8192, 12, 4),
    ("int8-rot", "page_first"): Launch(8192, 8, 4, 5),
    ("int8-rot", "layer_first"): Launch(8192, 16, 8),
    # A tile of int4 is a page of one head, whatever the launch says. Not tuned: it goes by dma.
    ("int4", "page_first"): Launch(8192, 32, 8),
    ("int4", "layer_first"): Launch(8192, 32, 8),
}
RESTORE = {
    "int8": Launch(8192, 6, 8, 5),
    "int8-rot": Launch(8192, 12, 4, 5),
    "int4": Launch(8192, 32, 8),
}

# Behind the copy engine kernels read and write device memory, and need no more than to keep up with
# it: two programs a multiprocessor of an H200, or four (python -m bench.launches --dma, whose
# figures are in results/h200/launches_dma.md).
ENCODE = {
    "int8": Launch(8192, 528, 4),
    "int8-rot": Launch(8192, 264, 4),
    "int4": Launch(8192, 264, 8),
}
DECODE = {
    "int8": Launch(8192, 264, 4),
    "int8-rot": Launch(8192, 264, 4),
    "int4": Launch(8192, 264, 8),
}

#: The ring: so many batches of so many bytes, three layers of 2,048 tokens of Qwen3-8B each, or
#: three of its pages of 64 with all layers. More and smaller batches cost the CPU more.
RING_SLOTS = 2
RING_SLOT_BYTES = 15_000_000

#: Most bytes of a backup's batch. The link waits for the first batch to be encoded, and wherever a
#: batch takes longer to encode than the one before to copy: with int4, small ones.
BACKUP_BYTES = {"int8": 15_000_000, "int8-rot": 15_000_000, "int4": 15_000_000}

#: Tokens times layers of a restore's launch, at most, where it has more than one layer: some 90 us
#: of Qwen3-8B's on an H200. A layer waits for the others of its launch. With twice as many,
#: 2,048 tokens take a little less time, and a GEMM beside them much more (launches.md).
LAUNCH_TOKENS = 2048
