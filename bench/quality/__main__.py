"""Measures what restoring a quantised prefix costs in quality, on real servers.

    python -m bench.quality [--model DIR] [--arms bf16,int8,int8-rot,fp8] [--dtype float16] ...

Starts one server after the other: BF16 first, whose answers from L1 are the reference. Answers are
kept in the work folder, so a run that was interrupted goes on where it stopped; --fresh discards
them. Ends with a non-zero status, and says why, where a server reports that less than 95 % of a
scored prefix came from L2, where BF16 restored differs from L1, or where the bytes that a server
restored are not its codec's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import REPOSITORY
from bench.lab import environment, shards
from bench.lab.arms import Arm, arms_argument
from bench.lab.models import prepare
from bench.lab.servers import Server, ServerError, serving
from bench.lab.shards import Shards
from bench.lab.texts import TEXTS
from bench.quality import report, summary
from bench.quality.arm_run import (
    PASSES,
    InvalidRunError,
    Reference,
    Rows,
    batched_pass,
    cold_pass,
    fill_pass,
    reference_pass,
    restored_pass,
)
from bench.quality.prompts import QUICK, Prompts, Size, build
from bench.quality.scoring import Scorer
from bench.quality.served import check_bytes, server_args, server_env, serves_on_gpu
from hiqcache.geometry import ITEM_BYTES, KVGeometry
from hiqcache.model import read_model

DEFAULT_ARMS = "bf16,int8,int8-rot,fp8"


def main() -> int:
    options = _options()
    model = options.model or prepare()
    size = QUICK if options.quick else Size()
    try:
        cut = shards.chosen(options, cpu=not serves_on_gpu())
        geometry = read_model(model, cut.tp_size).geometry
        further = shards.further_arguments(options.server_args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if torch.cuda.is_available() and not serves_on_gpu():
        print("This Python has no SGLang kernels for the GPU: measuring on the CPU.", flush=True)
    prompts = _prompts(model, size)
    name = f"{model.name}-{options.dtype}" if options.dtype else model.name
    out = options.out or REPOSITORY / "results" / "quality" / name
    dtype = options.dtype or geometry.dtype
    extra = [*cut.args, "--dtype", dtype, *further]
    # Answers kept from before are only of use if the same would be measured again.
    made_with = environment.describe()
    made_by = [
        PASSES,
        extra,
        made_with["versions"],
        made_with["gpus"],
        environment.config_digest(model),
    ]
    served = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:8]
    work = REPOSITORY / ".cache" / "quality" / model.name / f"{prompts.fingerprint()}-{served}"
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    try:
        for arm in options.arms:
            _run(arm, model, geometry, prompts, work, extra, cut.page_size)
        names = [arm.name for arm in options.arms]
        result = _summarise(model, dtype, cut, prompts, work, names)
    except (InvalidRunError, ServerError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "report.md").write_text(report.markdown(result))
    print(f"\n{report.markdown(result)}\nwritten: {out}/summary.json, {out}/report.md")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a local model; default: SmolLM2-135M")
    parser.add_argument("--arms", type=arms_argument, default=DEFAULT_ARMS, help="needs bf16, once")
    parser.add_argument(
        "--dtype",
        choices=list(ITEM_BYTES),
        help="what the model computes in; default: its own. In float16 the noise is about a "
        "hundredth of bfloat16's, so that a codec's own error shows",
    )
    parser.add_argument("--out", type=Path, help="default: results/quality/<model>")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--fresh", action="store_true", help="discard answers kept from before")
    shards.add_arguments(parser)
    parser.add_argument("--server-args", default="", help="further SGLang arguments, quoted")
    return parser.parse_args()


def _prompts(model: Path, size: Size) -> Prompts:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return build(tokenizer, AutoConfig.from_pretrained(model).vocab_size, size, list(TEXTS))


def _run(
    arm: Arm,
    model: Path,
    geometry: KVGeometry,
    prompts: Prompts,
    work: Path,
    extra: list[str],
    page_size: int,
) -> None:
    """Measure one arm, unless its rows are in the work folder."""
    rows_file, reference_file = work / f"{arm.file_name}.json", work / "reference.npz"
    if rows_file.exists():
        print(f"{arm.name}: kept from before ({rows_file})")
        return
    if arm.name != "bf16" and not reference_file.exists():
        raise InvalidRunError("the reference is missing: run the arm bf16 first.")
    started = time.monotonic()
    print(f"{arm.name}: starting its server", flush=True)
    server = _server(arm, model, geometry, prompts, work, extra)
    count = len(prompts.windows) + len(prompts.recalls)
    noise = len(prompts.windows) + len(prompts.windows) // 2 * 2
    passes = 2 * count + (noise if arm.name == "bf16" else 0)
    with serving(server), tqdm(total=passes, desc=arm.name, unit="request") as bar:
        scorer = Scorer(server.url, page_size=page_size)

        def tick(step: str) -> None:
            bar.set_postfix_str(step, refresh=False)
            bar.update()

        if arm.name == "bf16":
            reference = reference_pass(scorer, prompts, tick)
            reference.save(reference_file)
        else:
            reference = Reference.load(reference_file)
            fill_pass(scorer, prompts, tick)
        rows = restored_pass(scorer, prompts, reference, tick)
        reported = sum(row["host"] for row in [*rows.windows, *rows.recalls])
        restored = check_bytes(arm.bytes_per_token(geometry, page_size), arm.name, server, reported)
        if arm.name == "bf16":
            _write(work / "batched.json", batched_pass(scorer, prompts, reference, tick))
            _write(work / "cold.json", cold_pass(scorer, prompts, reference, tick))
    _write(rows_file, rows, seconds=time.monotonic() - started, restored=restored)


def _server(
    arm: Arm, model: Path, geometry: KVGeometry, prompts: Prompts, work: Path, extra: list[str]
) -> Server:
    tokens = sum(len(w.tokens) + w.generate for w in prompts.windows)
    tokens += sum(len(r.prefix) + len(r.question) + len(r.answer) + 1 for r in prompts.recalls)
    # Twice what is asked: nothing that will be asked again may leave L2.
    gigabytes = math.ceil(2 * tokens * geometry.stock_bytes_per_token / 1e9)
    return Server(
        arm.name,
        model,
        work / f"{arm.file_name}.log",
        (*server_args(prompts.size.l1_tokens, gigabytes), *arm.args, *extra),
        {**server_env(), **arm.env},
    )


def _write(file: Path, rows: Rows, **more: Any) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({**asdict(rows), **more}))
    partial.rename(file)


def _summarise(
    model: Path,
    dtype: str,
    cut: Shards,
    prompts: Prompts,
    work: Path,
    names: Sequence[str],
) -> dict[str, Any]:
    rows = {
        name: json.loads((work / f"{name}.json").read_text())
        for name in ("cold", "batched", *dict.fromkeys([*DEFAULT_ARMS.split(","), *names]))
        if (work / f"{name}.json").exists()
    }
    arms = {
        name: {
            **summary.summarise(own["windows"], own["recalls"], prompts.size.generate),
            "texts": summary.by_text(own["windows"]),
            "restored": own.get("restored"),
            "seconds": own.get("seconds"),
        }
        for name, own in rows.items()
    }
    share = None
    if {"int8", "int8-rot"} <= rows.keys():
        share = summary.kl_share(rows["int8-rot"]["windows"], rows["int8"]["windows"])
    met = summary.acceptance(arms, share)
    if met["bf16_restored_identical"] is False:
        raise InvalidRunError(
            "INVALID RUN: BF16 restored from L2 differs from the same requests in L1, in "
            f"{arms['bf16']['comparable'] - arms['bf16']['identical']} of "
            f"{arms['bf16']['comparable']} answers; every other row would measure that too."
        )
    return {
        "model": model.name,
        "dtype": dtype,
        **cut._asdict(),
        "command": shlex.join(["python", "-m", "bench.quality", *sys.argv[1:]]),
        "environment": environment.describe(),
        "size": asdict(prompts.size),
        "texts": sorted({window.text for window in prompts.windows}),
        "valid": True,
        "acceptance": met,
        "arms": arms,
    }


if __name__ == "__main__":
    sys.exit(main())
