"""Times backups and restores of latent rows (MLA) on a GPU, SGLang's own next to ours.

As `python -m bench.transfers` does for plain rows: DeepSeek-V2-Lite's (27 layers of 512 + 64) and
DeepSeek-V3's (61), host pools of 2 GB, pages of 64, page_first.

    python -m bench.transfers.latent --out FILE
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.transfers.__main__ import measure
from bench.transfers.contenders import DEVICE_SLOTS, Contender
from bench.transfers.indices import SLOTS
from bench.transfers.targets import TOKENS
from bench.transfers.timing import pcie_ceiling
from hiqcache.codecs import get_codec
from hiqcache.record import Order, RecordLayout, latent_parts, tokens_in_gigabytes
from hiqcache.transfers.base import Arena, Transfer, as_blocks

LATENT, ROPE = 512, 64
MODELS = {"DeepSeek-V2-Lite": 27, "DeepSeek-V3": 61}
OURS = (("int8", "dma"), ("int8", "fused"), ("int8-rot", "dma"))
PAGE = 64
ORDER: Order = "page_first"
POOL_GB = 2
LENGTHS = (TOKENS, 8192)
#: Most that a restored element may be off: of standard normal rows, a code's step and bfloat16's.
BOUND = {"bf16": 0.0, "int8": 0.06, "int8-rot": 0.15}
#: Of a restore's time, by stock's.
TARGET = 0.52


def rows_of(layers: int, slots: int = DEVICE_SLOTS) -> list[torch.Tensor]:
    """Random rows ``[slots, 1, LATENT + ROPE]``, one tensor a layer."""
    shape = (slots, 1, LATENT + ROPE)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]


def stock(rows: list[torch.Tensor]) -> Contender:
    """SGLang's own pool of POOL_GB."""
    from bench.transfers.stock import StockLatentTransfer

    slots = tokens_in_gigabytes(POOL_GB, len(rows) * rows[0][0].nbytes, PAGE)
    mover = StockLatentTransfer(rows, LATENT, PAGE, ORDER, slots)
    return Contender(
        "bf16",
        "stock",
        mover,
        mover.bytes_per_token,
        slots,
        PAGE,
        ("backup",) if mover.backup_wants_cpu_slots else (),
        mover.kernels(),
        len(rows),
    )


def ours(name: str, transfer: str, rows: list[torch.Tensor], host: torch.Tensor) -> Contender:
    """A pool of ours in ``host``, uint8 of registered memory."""
    from hiqcache.transfers.dma import DmaTransfer
    from hiqcache.transfers.fused import FusedTransfer

    codec = get_codec(name)
    layout = RecordLayout(len(rows), PAGE, codec.row_formats(latent_parts(LATENT, ROPE)), ORDER)
    pages = layout.pages_in(len(host))
    arena = Arena(host[: layout.arena_bytes(pages)], layout, pages)
    # Parts of the same rows, side by side.
    parts = list(zip(*(torch.split(each, [LATENT, ROPE], dim=-1) for each in rows), strict=True))
    cls: type[Transfer] = DmaTransfer if transfer == "dma" else FusedTransfer
    return Contender(
        name,
        transfer,
        cls(codec, arena, as_blocks(parts)),
        layout.bytes_per_token,
        pages * PAGE,
        PAGE,
        ("backup", "restore"),
        layers=len(rows),
    )


def worst(contender: Contender, rows: list[torch.Tensor]) -> float:
    """How far off an element comes back, of 1,024 tokens of every layer; bounded by BOUND."""
    indices = contender.indices(1024, "random")[0]
    sent = [buffer[indices.rows].clone() for buffer in rows]
    contender.run("backup", indices)
    for buffer in rows:
        buffer[indices.rows] = torch.nan
    contender.run("restore", indices)
    off = max(
        (buffer[indices.rows].float() - given.float()).abs().nan_to_num(torch.inf).max().item()
        for buffer, given in zip(rows, sent, strict=True)
    )
    for buffer, given in zip(rows, sent, strict=True):
        buffer[indices.rows] = given
    return off


def run(out: Path) -> bool:
    """Measure, writing ``out`` after every setting; whether rows came back and the target holds."""
    from bench.transfers.stock import host_memory

    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    hosts = {codec: host_memory(POOL_GB * 10**9) for codec in ("int8", "int8-rot")}
    ceiling = pcie_ceiling(hosts["int8"])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.transfers.latent", *sys.argv[1:]]),
        "versions": environment.versions(),
        "environment": environment.describe(),
        "card": torch.cuda.get_device_name(),
        "pool_gb": POOL_GB,
        "pcie_gbps": ceiling,
        "target": TARGET,
        "left_out": [],
        "rows": [],
        "restore_ratios": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    well = True
    for model, layers in MODELS.items():
        rows = rows_of(layers)
        given = []
        for contender in (stock(rows), *(ours(*each, rows, hosts[each[0]]) for each in OURS)):
            off = worst(contender, rows)
            if off <= BOUND[contender.codec]:
                given.append(contender)
            else:
                well = False
                result["left_out"].append(
                    f"{model} {contender.codec} {contender.transfer}: restored rows off by {off}"
                )
        for tokens in LENGTHS:
            for slots in SLOTS:
                for direction, way in (("backup", "d2h"), ("restore", "h2d")):
                    found = measure(direction, tokens, slots, ORDER, given, ceiling[way])
                    result["rows"] += [{"model": model, "layers": layers, **row} for row in found]
                    texts = (
                        f"{row['codec']}/{row['transfer']} {row['ms_median']:.3f}" for row in found
                    )
                    print(model, tokens, slots, f"{direction}:", *texts, flush=True)
                    if direction == "restore":
                        result["restore_ratios"] += ratios(model, found)
                    out.write_text(json.dumps(result, indent=1) + "\n")
        given[0].mover.close()  # type: ignore[attr-defined]
    for text in (*result["left_out"], *result["restore_ratios"]):
        print(text)
    return well and all(
        each["ratio"] <= TARGET for each in result["restore_ratios"] if each["transfer"] == "dma"
    )


def ratios(model: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of ours' restore time over stock's; none where stock is not among ``found``."""
    theirs = [row for row in found if row["codec"] == "bf16"]
    return [
        {
            "model": model,
            **{key: row[key] for key in ("codec", "transfer", "tokens", "slots")},
            "ratio": round(row["ms_median"] / theirs[0]["ms_median"], 4),
            "ratio_ahead": round(row["ms_ahead"] / theirs[0]["ms_ahead"], 4)
            if row["ms_ahead"]
            else None,
        }
        for row in found
        if theirs and row["codec"] != "bf16"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfers.latent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results/h200/transfers_latent.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    return 0 if run(options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
