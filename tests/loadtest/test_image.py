"""What the load image carries: the load generator alone, which imports nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_load_image_carries_loadtest_alone() -> None:
    dockerfile = (ROOT / "docker" / "loadgen.Dockerfile").read_text()
    copied = re.findall(r"^COPY (?:--\S+ )*(.*) \S+$", dockerfile, flags=re.MULTILINE)
    assert copied == ["requirements/loadgen.lock", "loadtest"]
    # Nothing that measures lies in its folder either.
    folder = ROOT / "loadtest"
    assert {path.relative_to(folder).parts[0] for path in folder.rglob("*.py")} == {
        *("__init__.py", "health.py", "locustfile.py", "options.py", "streaming.py", "summary.py"),
        *("telemetry.py", "token_times.py", "web_page.py", "workloads"),
    }
