"""Measures candidates for a codec on real models, in fp32, without a server.

    python -m bench.codec_study [--models SmolLM2-135M-Instruct,...] [--only GLOB] [--windows N]

Two protocols. Restored: a prefix's rows pass the codec once and the suffix is computed exactly, as
after a restore from L2. Whole: every row passes it before attention reads it, in every layer.
Results are kept after each candidate, so a run that was stopped goes on where it was; a candidate
that has changed is measured again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import REPOSITORY
from bench.codec_study import report
from bench.codec_study.candidates import CANDIDATES, DRIFT, WHOLE, Candidate
from bench.codec_study.measures import moved, summary
from bench.codec_study.subject import Rows, Subject
from bench.lab import environment
from bench.lab.models import SOURCES, prepare
from bench.lab.texts import TEXTS, tokens_of, windows

OUT = REPOSITORY / "results" / "codec-study"

#: Tokens of a restored prefix, of the exact suffix, and windows of each text unless told.
PREFIX, SUFFIX, WINDOWS = 1024, 64, 2
#: Tokens of a window whose every row passes a codec, and windows of each text.
WHOLE_TOKENS, WHOLE_WINDOWS = 256, 1
#: Restored rows that are stored again, so many times; and when they are looked at.
CYCLES = (1, 2, 5, 10, 20)


class Study:
    """One model and what was measured on it, kept in a file."""

    def __init__(self, name: str, out: Path, windows_per_text: int, fresh: bool) -> None:
        self._subject = Subject(prepare(source=SOURCES[name]))
        self._file = out / f"{name}.json"
        tokens = {text: tokens_of(text, self._subject.tokenizer) for text in TEXTS}
        self._restored = [
            (self._subject.rows(window[:PREFIX]), window[PREFIX:])
            for text in TEXTS
            for window in windows(tokens[text], windows_per_text, PREFIX + SUFFIX)
        ]
        self._exact = [self._subject.after(rows, suffix) for rows, suffix in self._restored]
        self._whole = [
            window
            for text in TEXTS
            for window in windows(tokens[text], WHOLE_WINDOWS, WHOLE_TOKENS)
        ]
        self._exact_whole = [
            self._subject.throughout(window, lambda k, v, _: (k, v)) for window in self._whole
        ]
        setting = {
            "model": name,
            "config_digest": environment.config_digest(prepare(source=SOURCES[name])),
            "head_dim": self._subject.width,
            "layers": self._subject.layers,
            "texts": {text: TEXTS[text].title for text in TEXTS},
            "restored": {
                "prefix": PREFIX,
                "suffix": SUFFIX,
                "windows_per_text": windows_per_text,
            },
            "whole": {"tokens": WHOLE_TOKENS, "windows_per_text": WHOLE_WINDOWS},
            "dtype": "float32",
        }
        kept = json.loads(self._file.read_text()) if self._file.exists() and not fresh else {}
        if kept.get("setting") != setting:
            kept = {"setting": setting, "candidates": {}, "drift": {}}
        self._kept: dict[str, Any] = kept

    def measure(self, candidate: Candidate, command: str) -> dict[str, Any]:
        """What ``candidate`` costs: from the file where it is there."""
        known: dict[str, Any] | None = self._kept["candidates"].get(candidate.name)
        if known and known["definition"] == repr(candidate):
            return known
        subject = self._subject
        result = {
            "definition": repr(candidate),
            "times_bf16_at_128": candidate.times_bf16(128, subject.layers),
            "times_bf16_here": candidate.times_bf16(subject.width, subject.layers),
            "block": candidate.block,
            "restored": summary(
                [
                    moved(exact, subject.after(subject.through(rows, candidate), suffix), suffix)
                    for (rows, suffix), exact in zip(self._restored, self._exact, strict=True)
                ]
            ),
        }
        if candidate in WHOLE:
            result["whole"] = summary(
                [
                    moved(exact, subject.throughout(window, candidate), window)
                    for window, exact in zip(self._whole, self._exact_whole, strict=True)
                ]
            )
        return self._keep("candidates", candidate, result, command)

    def drift(self, candidate: Candidate, command: str) -> dict[str, Any]:
        """Restored KL after each of CYCLES: restored rows, rounded to bf16, are stored again."""
        known: dict[str, Any] | None = self._kept["drift"].get(candidate.name)
        if known and known["definition"] == repr(candidate):
            return known
        measured: dict[int, list[Any]] = {cycle: [] for cycle in CYCLES}
        for (rows, suffix), exact in zip(self._restored, self._exact, strict=True):
            now = rows
            for cycle in range(1, CYCLES[-1] + 1):
                now = _bf16(self._subject.through(now, candidate))
                if cycle in measured:
                    measured[cycle].append(moved(exact, self._subject.after(now, suffix), suffix))
        result = {
            "definition": repr(candidate),
            "cycles": {str(cycle): summary(found) for cycle, found in measured.items()},
        }
        return self._keep("drift", candidate, result, command)

    def _keep(
        self, part: str, candidate: Candidate, result: dict[str, Any], command: str
    ) -> dict[str, Any]:
        result["command"] = command
        result["environment"] = environment.describe()
        self._kept[part][candidate.name] = result
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._kept, indent=1) + "\n")
        return result


def _bf16(rows: Rows) -> Rows:
    return [(k.bfloat16().float(), v.bfloat16().float()) for k, v in rows]


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    command = shlex.join(["python", "-m", "bench.codec_study", *sys.argv[1:]])
    for name in options.models.split(","):
        study = Study(name, options.out, options.windows, options.fresh)
        for candidate in CANDIDATES:
            if _asked(candidate, options.only):
                found = study.measure(candidate, command)
                print(
                    f"{name}: {candidate.name}: {found['times_bf16_at_128']:.2f}x, restored KL "
                    f"{found['restored']['kl']:.2e}",
                    flush=True,
                )
        for candidate in () if options.no_drift else DRIFT:
            if _asked(candidate, options.only):
                found = study.drift(candidate, command)
                kls = ", ".join(f"{n}: {s['kl']:.2e}" for n, s in found["cycles"].items())
                print(f"{name}: {candidate.name}: KL after cycles {kls}", flush=True)
    report.write(options.out)
    return 0


def _asked(candidate: Candidate, globs: Sequence[str] | None) -> bool:
    return globs is None or any(fnmatch.fnmatchcase(candidate.name, glob) for glob in globs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.codec_study", description=__doc__)
    parser.add_argument("--models", default=",".join(SOURCES), help="of %(default)s")
    parser.add_argument(
        "--only", action="append", help="candidates whose name matches this glob; repeatable"
    )
    parser.add_argument("--windows", type=int, default=WINDOWS, help="restored, of each text")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--no-drift", action="store_true", help="leave out the many cycles")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
