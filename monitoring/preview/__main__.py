"""Draws every dashboard to docs/images, from a stack that it starts and loads, or from another.

python -m monitoring.preview [--prometheus URL --minutes N] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.lab.servers import ServerError
from hiqcache.direct_http import HttpError
from monitoring.dashboards import dashboards
from monitoring.preview.draw import PreviewError, QueryRange, bundle, collect, draw
from monitoring.stack import StackError, query_range, stack

#: Seconds of load and of rest: two runs, so that a picture shows where one begins and ends.
RUNS = ((70.0, 20.0), (110.0, 5.0))


def main() -> int:
    """The exit status: 1 with a message where something is missing or failed."""
    parser = argparse.ArgumentParser(prog="python -m monitoring.preview", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--prometheus", help="draw from this Prometheus", metavar="URL")
    parser.add_argument("--minutes", type=float, default=5, help="how much of it (default 5)")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="hiqcache-preview-") as name:
            folder = Path(name)
            bundle(folder)
            if arguments.prometheus:
                now = time.time()
                url = arguments.prometheus.rstrip("/")
                _draw_all(
                    lambda *query: query_range(url, *query),
                    now - 60 * arguments.minutes,
                    now,
                    folder,
                    arguments.out,
                )
            else:
                _from_a_stack(folder, arguments.out)
    except (PreviewError, StackError, ServerError, HttpError) as error:
        print(f"preview: {error}", file=sys.stderr)
        return 1
    return 0


def _from_a_stack(folder: Path, out: Path) -> None:
    print("Starting two servers, Prometheus and the exporter ...", flush=True)
    with stack(folder) as running:
        start = time.time()
        time.sleep(10)
        for seconds, rest in RUNS:
            print(f"Load for {seconds:.0f} s ...", flush=True)
            with running.load(seconds) as load:
                assert load.process is not None
                load.process.wait(seconds + 120)
            time.sleep(rest)
        _draw_all(running.query_range, start, time.time(), folder, out)


def _draw_all(ask: QueryRange, start: float, end: float, folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for uid, dashboard in dashboards().items():
        picture = (out / f"{uid}.png").resolve()
        draw(collect(dashboard, ask, start, end), folder, picture)
        print(picture)


if __name__ == "__main__":
    sys.exit(main())
