"""`make demo`: real SGLang, a real model, two host KV tiers of the same bytes.

Starts a BF16 and a quantised server on this machine's CPU and sends both the same shared-prefix
workload: passages of English text, asked about in three rounds, the first cold, the others in new
orders. Large working set: it fits the quantised tier and not the BF16 one. Small: it fits both, so
no gain is expected. Each answer whose prompt came back from the host tier is compared with a
never-evicted reference: the same request, asked again while its prefix was still in L1 as computed.
Beside that stands the noise: the same comparison of answers that no codec has touched, each prompt
computed cold, in one piece, where the reference computes its tail alone. What differs there differs
by the order of bfloat16 sums.

    python -m bench.demo [--codec CODEC] [--out DIR]

Writes DIR/summary.json; `make demo-results` renews the one that the documentation quotes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from openai import OpenAIError
from tqdm import tqdm

from bench import REPOSITORY
from bench.lab import environment
from bench.lab.completions import Completion, client_of, complete
from bench.lab.models import prepare
from bench.lab.server_metrics import scrape
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, ServerError, started
from hiqcache import direct_http
from hiqcache.codecs import CODEC_NAMES, get_codec
from hiqcache.direct_http import HttpError

#: L1, in tokens, and SGLang's default ratio of L2 to it: BF16 then holds 4,097 tokens in L2.
L1_TOKENS = 2048
RATIO = 2
PASSAGE_TOKENS = 600
#: Whole pages are cached. A prompt that ends inside a page has its tail computed anew whether its
#: prefix comes from L1 or from L2, so both answers run the same shapes to the last token; with
#: pages of 1, a prefix in L1 would bring the tail's rows too, as another shape computed them. Both
#: arms have the same: a codec of whole pages takes the smallest that it stores.
PAGE_TOKENS = 16
ANSWER_TOKENS = 8
ROUNDS = 3
#: What the demo is there to show, in the large working set; less ends it with an error. 384 B
#: against 198 B per row are 1.939 times the tokens, and against 121 B 3.18 (int4 at pages of 32),
#: less what whole pages cost.
LEAST_CAPACITY_RATIO = {"int8": 1.93, "int8-rot": 1.93, "int4": 3.1}
LEAST_HIT_GAIN = 0.15
LEAST_AGREEMENT = 0.9
#: What each passage is asked, as SmolLM2's chat format says it.
QUESTION = (
    "<|im_start|>user\n{passage}\n\nWhat is this text about? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
#: Passages a working set: 12 x 600 tokens are 1.8 times BF16's L2 and fit INT8's; 5 fit both.
WORKING_SETS = {"large": 12, "small": 5}


@dataclass(frozen=True)
class Answer:
    """A completion, and what its prompt was answered with while it had never left L1."""

    given: Completion
    reference: Completion

    @property
    def restored(self) -> bool:
        """Whether its prompt was restored, to the tokens that the reference found in L1.

        Then the model ran the same shapes, and only the restored rows can make a difference.
        """
        cached = self.given.device_tokens + self.given.host_tokens
        return self.given.host_tokens > 0 and cached == self.reference.device_tokens

    @property
    def cold(self) -> bool:
        """Whether no row of its prompt came from a cache."""
        return not self.given.device_tokens and not self.given.host_tokens

    @property
    def agreement(self) -> float:
        """Share of the answer before its first token that differs from the reference's."""
        lengths = (len(self.given.tokens), len(self.reference.tokens))
        pairs = zip(self.given.tokens, self.reference.tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(lengths))
        return same / max(lengths)


def passages(model: Path, count: int) -> list[str]:
    """``count`` different passages of about PASSAGE_TOKENS tokens of Python's own documentation."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = re.sub(r"[ \t]+", " ", "\n".join(topics[name] for name in sorted(topics)))
    ids = tokenizer(text[: count * PASSAGE_TOKENS * 8])["input_ids"]
    return [
        tokenizer.decode(ids[i * PASSAGE_TOKENS : (i + 1) * PASSAGE_TOKENS]) for i in range(count)
    ]


def orders(count: int) -> Iterator[list[int]]:
    """Which passage is asked about when, a round a list: first in order, then shuffled."""
    shuffler = random.Random(7)
    order = list(range(count))
    for _ in range(ROUNDS):
        yield list(order)
        shuffler.shuffle(order)


def run(server: Server, prompts: list[str], progress: tqdm[Any]) -> list[Answer]:
    """Ask ``server`` about every prompt in ROUNDS rounds, from empty caches."""
    direct_http.post(f"{server.url}/flush_cache", timeout=60)
    client = client_of(server.url)
    references: dict[int, Completion] = {}
    answers = []
    for order in orders(len(prompts)):
        for index in order:
            given = complete(client, prompts[index], ANSWER_TOKENS)
            if index not in references:
                references[index] = complete(client, prompts[index], ANSWER_TOKENS)
            answers.append(Answer(given, references[index]))
            progress.update()
    return answers


def summarise(server: Server, answers: list[Answer]) -> dict[str, Any]:
    """The figures of one arm in one working set."""
    info = direct_http.get(f"{server.url}/server_info", timeout=60).json()
    metrics = scrape(server)
    tokens = int(metrics["sglang:hicache_host_total_tokens"])
    per_token = (
        metrics["sglang:hicache_backup_bytes_total"] / metrics["sglang:hicache_backup_tokens_total"]
    )
    asked = sum(a.given.prompt_tokens for a in answers)
    device = sum(a.given.device_tokens for a in answers)
    host = sum(a.given.host_tokens for a in answers)
    ttft = sorted(a.given.ttft_ms for a in answers)
    compared = [a for a in answers if a.restored and a.given.prompt_tokens % PAGE_TOKENS]
    # One a prompt: what is computed cold again later is computed the same way.
    cold = list({a.reference: a for a in answers if a.cold}.values())
    return {
        "l2_bytes": round(tokens * per_token),
        "l2_tokens": tokens,
        "l1_tokens": info["max_total_num_tokens"],
        "bytes_per_token": per_token,
        "hit_ratio": (device + host) / asked,
        "device_ratio": device / asked,
        "host_ratio": host / asked,
        "device_tokens": device,
        "host_tokens": host,
        "prompt_tokens": asked,
        "ttft_ms": {
            "mean": statistics.fmean(ttft),
            "p50": statistics.median(ttft),
            "p99": statistics.quantiles(ttft, n=100, method="inclusive")[98],
        },
        "answers_equal": _equal(compared),
        "agreement": statistics.fmean(a.agreement for a in compared) if compared else None,
        "prompts": len(compared),
        "cold_answers_equal": _equal(cold),
        "cold_prompts": len(cold),
        "requests": len(answers),
    }


def _equal(answers: Sequence[Answer]) -> int:
    return sum(answer.given.tokens == answer.reference.tokens for answer in answers)


def table(name: str, arms: Mapping[str, Mapping[str, Any]]) -> str:
    """One working set as text: a line per figure, a column per arm."""
    rows: list[tuple[str, list[str]]] = [
        ("L2 bytes", [f"{a['l2_bytes']:,}" for a in arms.values()]),
        ("L2 tokens", [f"{a['l2_tokens']:,}" for a in arms.values()]),
        ("bytes per token", [f"{a['bytes_per_token']:,.0f}" for a in arms.values()]),
        ("hit ratio", [f"{a['hit_ratio']:.1%}" for a in arms.values()]),
        ("  from L1 (device)", [f"{a['device_ratio']:.1%}" for a in arms.values()]),
        ("  from L2 (host)", [f"{a['host_ratio']:.1%}" for a in arms.values()]),
        ("tokens restored from L2", [f"{a['host_tokens']:,}" for a in arms.values()]),
        ("TTFT mean ms", [f"{a['ttft_ms']['mean']:.0f}" for a in arms.values()]),
        ("TTFT p50 ms", [f"{a['ttft_ms']['p50']:.0f}" for a in arms.values()]),
        ("TTFT p99 ms", [f"{a['ttft_ms']['p99']:.0f}" for a in arms.values()]),
        (
            "answers equal to reference",
            [f"{a['answers_equal']} of {a['prompts']}" for a in arms.values()],
        ),
        (
            "  noise: cold ones equal",
            [f"{a['cold_answers_equal']} of {a['cold_prompts']}" for a in arms.values()],
        ),
        (
            "agreement with reference",
            ["-" if a["agreement"] is None else f"{a['agreement']:.1%}" for a in arms.values()],
        ),
    ]
    head = f"{name:<28}" + "".join(f"{arm:>16}" for arm in arms)
    lines = [f"{label:<28}" + "".join(f"{v:>16}" for v in values) for label, values in rows]
    return "\n".join([head, "-" * len(head), *lines])


def tables(summary: Mapping[str, Any], *names: str) -> str:
    """The working sets called ``names`` of a summary.json, or all of them, as text."""
    titles = {
        "large": "Fits the quantised L2 only",
        "small": "Fits both (no gain expected)",
    }
    return "\n\n".join(
        table(title, {arm.upper(): figures for arm, figures in summary[name].items()})
        for name, title in titles.items()
        if name in (names or titles)
    )


def problems(summary: Mapping[str, Any]) -> list[str]:
    """What in ``summary`` contradicts what the demo is there to show."""
    codec = summary["made_by"]["codec"]
    found = []
    for name in WORKING_SETS:
        bf16 = summary[name]["bf16"]
        if bf16["answers_equal"] != bf16["prompts"]:
            found.append(f"{name}: BF16 restored answers differ from their references")
        found += [
            f"{name}: no answer of {arm} could be compared: nothing came back whole from L2"
            for arm in ("bf16", codec)
            if not summary[name][arm]["prompts"]
        ]
    bf16, ours = summary["large"]["bf16"], summary["large"][codec]
    if ours["l2_bytes"] > bf16["l2_bytes"]:
        found.append("the quantised pool is larger than the BF16 one")
    if ours["l2_tokens"] < LEAST_CAPACITY_RATIO[codec] * bf16["l2_tokens"]:
        found.append(f"L2 holds less than {LEAST_CAPACITY_RATIO[codec]} times BF16's tokens")
    if ours["hit_ratio"] < bf16["hit_ratio"] + LEAST_HIT_GAIN:
        found.append(f"the hit ratio rose by less than {LEAST_HIT_GAIN:.0%}")
    if (ours["agreement"] or 0) < LEAST_AGREEMENT:
        found.append(f"restored answers agree with their references by under {LEAST_AGREEMENT:.0%}")
    return found


def demo(codec: str, out: Path) -> int:
    """Run the demo and write ``out``/summary.json; the exit status."""
    print("Preparing SmolLM2-135M (about 30 s the first time) ...", flush=True)
    try:
        model = prepare()
    except FileNotFoundError as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    page_tokens = min(get_codec(codec).page_sizes or (PAGE_TOKENS,))
    args = (
        *CPU_ARGS,
        *("--page-size", str(page_tokens), "--max-total-tokens", str(L1_TOKENS)),
        *("--hicache-ratio", str(RATIO), "--skip-server-warmup"),
    )
    arms = {
        name: Server(
            f"the {name} server",
            model,
            out / f"server-{name}.log",
            args,
            {**CPU_ENV, "HIQCACHE_CODEC": name},
        )
        for name in ("bf16", codec)
    }
    texts = [
        QUESTION.format(passage=passage) for passage in passages(model, max(WORKING_SETS.values()))
    ]
    summary: dict[str, Any] = {name: {} for name in WORKING_SETS}
    try:
        with started(*arms.values()):
            with tqdm(total=len(arms), desc="starting servers", unit="server") as progress:
                for server in arms.values():
                    # A terminal sees the clock run; a log file gets no line a tick.
                    server.wait(tick=progress.refresh if sys.stderr.isatty() else _nothing)
                    # The first request pays for what is set up once; it measures nothing.
                    complete(client_of(server.url), "Hello", 1)
                    progress.update()
            for name, count in WORKING_SETS.items():
                for arm, server in arms.items():
                    label = f"{name} working set, {arm}"
                    with tqdm(total=count * ROUNDS, desc=label, unit="request") as progress:
                        answers = run(server, texts[:count], progress)
                    summary[name][arm] = summarise(server, answers)
    except (ServerError, OpenAIError, HttpError, RuntimeError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        if not isinstance(error, ServerError):
            print("\n".join(server.tail() for server in arms.values()), file=sys.stderr)
        return 1

    summary["made_by"] = {
        "command": "make demo" + ("" if codec == "int8" else f" HIQCACHE_CODEC={codec}"),
        "codec": codec,
        "environment": environment.describe(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + tables(summary))
    found = problems(summary)
    print(f"\nWritten: {out / 'summary.json'}")
    for problem in found:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if found else 0


def _nothing() -> None:
    pass


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--codec", choices=CODEC_NAMES, default="int8")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".cache" / "demo")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)  # ends the servers, as Ctrl-C does
    try:
        return demo(arguments.codec, arguments.out)
    except KeyboardInterrupt:
        print("\nInterrupted; the servers are stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
