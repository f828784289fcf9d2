"""The soak's file: what each arm has been through, over as many sessions as it took."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lab import environment
from bench.soak import report


@dataclass
class Record:
    """A JSON file with counts per arm, which a later session goes on from; a report beside it.

    ``command``: of this session, for its entry.
    """

    path: Path
    mode: str
    command: str
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises ValueError where the file is another mode's, or no JSON."""
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found.get("mode") != self.mode:
                raise ValueError(
                    f"{self.path} is of mode {found.get('mode')}, not {self.mode}: name another "
                    "file with --out."
                )
            self.arms, self.sessions = found["arms"], found["sessions"]
        self.sessions.append(
            {
                "command": self.command,
                # SGLang's own switches, such as the one that slows the link.
                "variables": {k: v for k, v in os.environ.items() if k.startswith("SGLANG_TEST_")},
                "environment": environment.describe(),
            }
        )

    @property
    def session(self) -> int:
        """The number of this session, from 0 on: part of every seed, so that none is run twice."""
        return len(self.sessions) - 1

    def done(self, arm: str) -> int:
        """Restores of ``arm`` that were checked so far, in all sessions."""
        return int(self.arms.get(arm, {}).get("counts", {}).get("checked_restores", 0))

    def add(
        self, arm: str, counts: Counter[str], seconds: float, faults: list[Any], **more: Any
    ) -> None:
        """Add what ``arm`` went through since the last call, and write the file."""
        entry = self.arms.setdefault(arm, {"counts": {}, "seconds": 0.0, "faults": []})
        total = Counter(entry["counts"])
        total.update(counts)
        entry["counts"] = dict(sorted(total.items()))
        entry["seconds"] = round(entry["seconds"] + seconds, 1)
        entry["faults"] += [{"session": self.session, **fault} for fault in faults]
        entry.update(more)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        document = {"mode": self.mode, "arms": self.arms, "sessions": self.sessions}
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(self.path)
        self.path.with_suffix(".md").write_text(report.markdown(document))
