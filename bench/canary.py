"""The canary's figure beside the quality harness's, on the same windows and the same servers.

    python -m bench.canary [--model DIR] [--arms NAMES] [--restored 208] [--page-size 64] ...

A lossy arm's server is measured by the harness first: its windows with their prefixes in L1, then
restored. Both tiers are flushed, and the canary gets the same windows as its prompts, pushes, and
compares until each was restored twice: what a codec made of a prompt's rows stays in L2 as it is.
A copy is compared so many times, with the canary's own shorter prompts.

It fails where a copy differs by a bit; where the canary's interval and the harness's lie apart,
both of the tokens that the canary's reference lists; and where the harness's own figure, of far
more tokens, is not what results/quality says. A codec of tokens has one figure at any page size.
Beside the JSON stands a report of the same name.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from bench import REPOSITORY
from bench.lab import environment, models, shards
from bench.lab.arms import Arm, arm_named, arms_argument
from bench.lab.bootstrap import bootstrap
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, serving
from bench.lab.shards import Shards
from bench.lab.table import Table
from bench.lab.texts import TEXTS
from bench.quality.measures import divergence, first_tokens
from bench.quality.prompts import Size, Window, build
from bench.quality.scoring import Scored, Scorer
from hiqcache.canary.command import summary
from hiqcache.canary.metrics import CanaryMetrics
from hiqcache.canary.server import TOP, Client
from hiqcache.canary.watch import Plan, Watch

#: Tokens restored and scored by the canary of a copy, which is not compared with the harness but
#: asked often.
OWN = (256, 32)
#: L1, so small that a few prompts fill it; L2 holds all of them and what pushes them, in the bytes
#: of so many times L1's tokens: half a gigabyte, as SGLang wants ten more to be free.
L1_TOKENS = 3072
L2_RATIO = 4
#: Longer than all prompts take to be filled on a busy CPU.
STALLED_S = 900


@dataclass
class WindowClient(Client):
    """A client whose texts are names of windows, which it has in tokens."""

    windows: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def tokens(self, text: str) -> list[int]:
        return list(self.windows[text])


def harness_windows(model: Path) -> dict[str, Window]:
    """The harness's windows, by name."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    found = build(tokenizer, vocabulary, Size(), list(TEXTS)).windows
    # All lists of one length: whole vocabularies, which the harness asks for now and then, take
    # seconds.
    return {
        f"{window.text}-{number}": replace(window, top=Size.top)
        for number, window in enumerate(found)
    }


def offline(scorer: Scorer, windows: Mapping[str, Window], vocabulary: int) -> dict[str, Any]:
    """What the harness says of a server: KL of restored windows against the same in L1.

    ``listed``: of the tokens that a canary's reference lists, all others as one; ``harness``: of as
    many as the harness lists. Raises RuntimeError where a prefix was not where it must be.
    """

    def ask(window: Window, tier: str) -> Scored:
        (scored,) = scorer.score(window.tokens, window.prefix, window.top)
        if getattr(scored, tier) != scorer.cached_of(window.prefix):
            raise RuntimeError(f"{getattr(scored, tier)} tokens of a prefix came from {tier}.")
        return scored

    references = {}
    for name, window in windows.items():
        scorer.fill(window.tokens[: window.prefix])
        references[name] = ask(window, "device")
    rows: dict[str, list[Any]] = {"listed": [], "harness": []}
    for name, window in windows.items():
        restored = ask(window, "host")
        rows["harness"].append(divergence(references[name], restored, vocabulary))
        rows["listed"].append(divergence(first_tokens(references[name], TOP), restored, vocabulary))
    scorer.flush()
    return {name: bootstrap(found, _mean).as_dict() for name, found in rows.items()}


def measure(
    arm: Arm,
    model: Path,
    windows: Mapping[str, Window],
    restored: int,
    cut: Shards,
    cpu: bool,
    log: Path,
) -> dict[str, Any]:
    """One arm's figures: the canary's own summary, and an interval over its prompts."""
    server = Server(
        arm.name,
        model,
        log,
        (
            *(CPU_ARGS if cpu else ()),
            *("--max-total-tokens", str(L1_TOKENS), "--hicache-ratio", str(L2_RATIO)),
            *("--skip-server-warmup", *cut.args, *arm.args),
        ),
        {**(CPU_ENV if cpu else {}), **arm.env},
    )
    harness = None
    with serving(server), tqdm(total=restored, desc=arm.name, unit="prompt") as bar:
        prefix, scored = OWN
        if arm.quantises:
            vocabulary = AutoConfig.from_pretrained(model).vocab_size
            harness = offline(Scorer(server.url, page_size=cut.page_size), windows, vocabulary)
            prefix, scored = Size.prefix, Size.suffix
        plan = Plan(1.0, prefix, scored, 10**9, 0.01, {name: name for name in windows})
        client = WindowClient(
            server.url, windows={name: window.tokens for name, window in windows.items()}
        )
        watch = Watch(arm.name, client, plan, CanaryMetrics(CollectorRegistry()))
        latest = time.monotonic()
        while (compared := len(watch.comparisons)) < restored:
            watch.visit()
            if len(watch.comparisons) > compared:
                bar.update()
                latest = time.monotonic()
            elif time.monotonic() > latest + STALLED_S:
                raise RuntimeError(
                    f"{arm.name}: nothing was compared for {STALLED_S} s.\n{server.tail()}"
                )
        tiers = watch.client.tiers()
    by_prompt = {one.prompt: one.divergences for one in watch.comparisons}
    return {
        **summary(watch),
        "prefix_tokens": prefix,
        "scored_tokens_per_prompt": scored,
        "prompts": len(by_prompt),
        # A prompt's rows in L2 stay what they are, so it counts once.
        "kl_nats_interval": bootstrap(
            [np.array(row) for row in by_prompt.values()], _mean
        ).as_dict(),
        "harness_kl_nats": harness,
        "l2_tokens_at_most": watch.budget.taken(tiers),
        "l2_tokens_allowed": watch.budget.allowed(tiers),
        "stored_tokens": tiers.stored,
    }


def _mean(values: Any) -> float:
    return float(values.mean())


def problems(arms: Mapping[str, Mapping[str, Any]], restored: int) -> list[str]:
    """What is wrong with the arms' figures, in words; none where nothing is.

    A copy must have been compared ``restored`` times and read exactly zero each time. Of a codec,
    the canary's interval and the harness's must meet, and the harness's own and the published one.
    """
    found = []
    for name, arm in arms.items():
        if not arm_named(name).quantises:
            if arm["restored"] < restored:
                found.append(f"{name}: {arm['restored']} compared, not {restored}.")
            if arm["identical"] < arm["restored"] or arm["kl_nats_max"] > 0:
                found.append(
                    f"{name}: {arm['restored'] - arm['identical']} of {arm['restored']} restored "
                    f"copies differ from their references, by {arm['kl_nats_max']:g} nats at most."
                )
            continue
        ours, theirs = arm["kl_nats_interval"], arm["harness_kl_nats"]
        published = arm["published_kl_nats"]
        if _apart(ours, theirs["listed"]):
            found.append(
                f"{name}: {_figure(ours)} nats, where the harness has {_figure(theirs['listed'])}."
            )
        if published and _apart(theirs["harness"], published):
            found.append(
                f"{name}: the harness has {_figure(theirs['harness'])} nats, where results/quality "
                f"has {_figure(published)}."
            )
    return found


def report(document: Mapping[str, Any]) -> str:
    """A document of this measurement in Markdown."""
    rows = []
    for name, arm in document["arms"].items():
        interval, theirs = arm["kl_nats_interval"], arm["harness_kl_nats"] or {}
        figures = (theirs.get("listed"), theirs.get("harness"), arm["published_kl_nats"])
        rows.append(
            (
                name,
                f"{arm['prefix_tokens']} + {arm['scored_tokens_per_prompt']}",
                f"{arm['restored']} of {arm['prompts']}",
                str(arm["identical"]),
                _figure(interval),
                *(_figure(figure) if figure else "–" for figure in figures),
                f"{arm['kl_nats_max']:.2g}",
                f"{arm['top1_agreement']:.2%}",
            )
        )
    table = Table(
        (
            *("arm", "tokens restored + scored", "comparisons of prompts", "bit-identical"),
            *("KL, nats per token", "the harness's, of as many tokens listed"),
            *("the harness's own", "results/quality", "largest", "top-1"),
        ),
        rows,
    )
    made = document["environment"]
    versions = made["versions"]
    lines = [
        f"# The canary beside the quality harness: {document['model']}",
        "",
        table.markdown(),
        "",
        "KL of restored prefixes against the same prefixes in L1; intervals: 95 %, bootstrap over "
        f"prompts. At each position the canary counts the {TOP} tokens of its reference one by one "
        f"and all others as one, the harness {Size.top}: the fewer, the lower"
        f"{shards.described(document)}.",
        "",
        *(f"- **{problem}**" for problem in document["problems"] or ()),
        *([""] if document["problems"] else ()),
        f"Made by `{document['command']}` on {environment.hardware(made)}; SGLang "
        f"{versions['sglang']}, torch {versions['torch']} ({made['commit']}), {made['time']}.",
    ]
    return "\n".join(lines) + "\n"


def _figure(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.3g} ({interval['low']:.3g} to {interval['high']:.3g})"


def _apart(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one["high"] < other["low"] or other["high"] < one["low"]


def published(model: Path) -> dict[str, Any]:
    """The quality harness's mean KL of the same model, by arm, where there is a result."""
    file = REPOSITORY / "results" / "quality" / model.name / "summary.json"
    if not file.exists():
        return {}
    arms = json.loads(file.read_text())["arms"]
    return {name: figures["kl_mean"] for name, figures in arms.items()}


def main() -> int:
    """The exit status: 1 where a copy did not read exactly zero."""
    parser = argparse.ArgumentParser(prog="python -m bench.canary", description=__doc__)
    parser.add_argument("--model", type=Path, help="a local model; default: SmolLM2-135M")
    parser.add_argument("--arms", type=arms_argument, default="bf16,int8,int8-rot")
    parser.add_argument("--restored", type=int, default=208, help="comparisons of a copy")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, with a GPU or without")
    parser.add_argument("--out", type=Path, help="default: results/canary/<model>.json")
    shards.add_arguments(parser)
    arguments = parser.parse_args()
    model = arguments.model or models.prepare()
    out = arguments.out or REPOSITORY / "results" / "canary" / f"{model.name}.json"
    windows, known = harness_windows(model), published(model)
    cpu = arguments.cpu or not torch.cuda.is_available()
    cut = shards.chosen(arguments, cpu)
    document: dict[str, Any] = {
        "command": " ".join(["python -m bench.canary", *sys.argv[1:]]),
        "model": model.name,
        "environment": environment.describe(),
        "page_size": cut.page_size,
        "tp_size": cut.tp_size,
        "arms": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for arm in arguments.arms:
            log = Path(folder, f"{arm.file_name}.log")
            wanted = 2 * len(windows) if arm.quantises else arguments.restored
            found = measure(arm, model, windows, wanted, cut, cpu, log)
            found["published_kl_nats"] = known.get(arm.name)
            document["arms"][arm.name] = found
            print(json.dumps({arm.name: found}, indent=2), flush=True)
            document["problems"] = problems(document["arms"], arguments.restored)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=2) + "\n")
            out.with_suffix(".md").write_text(report(document))
    for problem in document["problems"]:
        print(f"bench.canary: {problem}", file=sys.stderr)
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
