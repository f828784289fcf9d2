"""The log of runs: JSON lines, one per run, appended when it is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.lab.arms import name_today
from bench.lab.shards import Shards

Run = dict[str, Any]


class RunLog:
    """Runs of ``file``, those of earlier sittings included.

    setup: what this sitting measures with (model, versions, hardware, command); kept with each of
        its runs by number, so that a report can say what made a figure.
    """

    def __init__(self, file: Path, setup: dict[str, Any]) -> None:
        self._file = file
        self._setup = setup
        self._identity = _identity(setup)
        _drop_unfinished_line(file)
        self.runs = read(file)

    def find(self, experiment: str, point: str, repeat: int, arm: str) -> Run | None:
        """The last valid run of that name with the same model, versions and hardware."""
        key = (experiment, point, repeat, arm)
        found = [run for run in self._own() if _key(run) == key and not run["invalid"]]
        return found[-1] if found else None

    def add(self, run: Run) -> None:
        """Append a run."""
        run = {**run, "setup": self._setup}
        self.runs.append(run)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(run, separators=(",", ":")) + "\n")

    @property
    def foreign(self) -> int:
        """Runs with another model, L2, page size, ranks, SGLang arguments, versions or hardware."""
        return len(self.runs) - len(self._own())

    def latest(self) -> list[Run]:
        """The last run under each name."""
        return list({_key(run): run for run in self._own()}.values())

    def _own(self) -> list[Run]:
        return [run for run in self.runs if _identity(run["setup"]) == self._identity]


def read(file: Path) -> list[Run]:
    """The runs in ``file``; none where it does not exist. Raises ValueError for a damaged line."""
    if not file.exists():
        return []
    runs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            runs.append(_renamed(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    return runs


#: What experiments were called in logs of before December 2026.
_FORMERLY = {"a": "same-tokens", "b": "same-bytes"}


def _renamed(run: Run) -> Run:
    experiment = _FORMERLY.get(run["experiment"], run["experiment"])
    return run | {"experiment": experiment, "arm": name_today(run["arm"])}


def turn_of(run: Run) -> tuple[int | None, float | None]:
    """The same for arms that took turns with each other: requests a turn, and when they began."""
    turn = run["workload"].get("turn")
    return turn, run["started"] if turn else None


def _drop_unfinished_line(file: Path) -> None:
    """Cut off what a sitting that was killed while it wrote has left."""
    if file.exists():
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            file.write_bytes(whole)


def _key(run: Run) -> tuple[str, str, int, str]:
    return run["experiment"], run["point"], run["repeat"], run["arm"]


def _identity(setup: dict[str, Any]) -> str:
    # Some are younger than the first results, which had one rank and pages of one token.
    names = ("model", "model_config", "l2_gigabytes", "server_args")
    cut = Shards(setup.get("page_size", 1), setup.get("tp_size", 1))
    kept = {**cut._asdict(), **{key: setup.get(key) for key in names}}
    hardware = {key: setup["environment"][key] for key in ("versions", "cpu", "gpus")}
    return json.dumps([kept, hardware], sort_keys=True)
