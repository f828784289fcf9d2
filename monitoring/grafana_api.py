"""What a benchmark tells a Grafana, if one is there: annotations, and a look at its dashboards.

    python -m monitoring.grafana_api RUNS.jsonl [--since SECONDS]

marks each run of an experiment (bench.tiers) that began after SECONDS of the epoch.

Uses grafana-client, the maintained successor of grafana-api, and only where GRAFANA_URL and
GRAFANA_TOKEN (a service account's, role Editor) are set. Nothing here may stop a benchmark: every
failure is one warning. It is installed by itself (requirements/grafana.lock), and `make bench` runs
it in a process of its own: its HTTP library puts another urllib3 in the place of the one that
SGLang and the load generator use.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiqcache.direct_http import past_proxies

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent / "grafana" / "dashboards"


class Grafana:
    """A Grafana that holds our dashboards; ``api`` is a grafana_client.GrafanaApi."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def missing_dashboards(self) -> list[str]:
        """Titles of our dashboards that it does not serve. Raises GrafanaException or OSError."""
        missing = []
        for file in sorted(FOLDER.glob("*.json")):
            try:
                self._api.dashboard.get_dashboard(file.stem)
            except _client().client.GrafanaClientError as error:
                if error.status_code != 404:
                    raise
                missing.append(json.loads(file.read_text(encoding="utf-8"))["title"])
        return missing

    def annotate(self, text: str, start: float, end: float, tags: Sequence[str] = ()) -> None:
        """Mark ``start`` to ``end`` (seconds of the epoch) on each of our dashboards.

        Raises GrafanaException or OSError.
        """
        for file in sorted(FOLDER.glob("*.json")):
            self._api.annotations.add_annotation(
                dashboard_uid=file.stem,
                time_from=round(1000 * start),
                time_to=round(1000 * end),
                tags=["hiqcache", *tags],
                text=text,
            )


def connect(env: Mapping[str, str] = os.environ) -> Grafana | None:
    """The Grafana that GRAFANA_URL and GRAFANA_TOKEN name, its dashboards checked.

    None after one warning where there is none, or it cannot be reached.
    """
    url, token = env.get("GRAFANA_URL"), env.get("GRAFANA_TOKEN")
    if not (url and token):
        logger.warning(
            "No Grafana annotations: GRAFANA_URL and GRAFANA_TOKEN are not both set. Load runs are "
            "marked on the dashboards all the same, from Prometheus."
        )
        return None
    try:
        client = _client()
    except ImportError:
        logger.warning(
            "No Grafana annotations: grafana-client is not installed. `make bench` installs it; by "
            "hand, pip install -r requirements/grafana.lock in an environment that serves nothing."
        )
        return None
    # Its HTTP library takes the proxies of the environment. This process does nothing else.
    os.environ.update(past_proxies())
    grafana = Grafana(client.GrafanaApi.from_url(url, credential=client.TokenAuth(token)))
    try:
        missing = grafana.missing_dashboards()
    except (client.client.GrafanaException, OSError) as error:
        logger.warning("No Grafana annotations: %s: %s", url, error)
        return None
    if missing:
        logger.warning(
            "%s lacks the dashboards %s: import monitoring/grafana/dashboards/*.json, or mount "
            "them as compose.yaml does.",
            url,
            ", ".join(missing),
        )
    return grafana


def annotate(
    grafana: Grafana | None, text: str, start: float, end: float, tags: Sequence[str] = ()
) -> None:
    """``grafana.annotate``, with a warning in the place of an exception; nothing for None."""
    if grafana is None:
        return
    try:
        grafana.annotate(text, start, end, tags)
    except (_client().client.GrafanaException, OSError) as error:
        logger.warning("The annotation %r was not written: %s", text, error)


def annotate_runs(grafana: Grafana, runs: Path, since: float) -> int:
    """Mark the runs in the JSON lines ``runs`` that began after ``since``; returns how many."""
    marked = 0
    for line in runs.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        # Runs of before the log had times.
        if run.get("started", 0.0) < since:
            continue
        text = f"experiment {run['experiment']}, {run['point']}, repeat {run['repeat'] + 1}"
        end = run.get("ended", run["started"] + run["seconds"])
        annotate(grafana, f"{text}: {run['arm']}", run["started"], end, [run["arm"]])
        marked += 1
    return marked


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m monitoring.grafana_api",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--since", type=float, default=1.0)
    options = parser.parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    grafana = connect()
    if grafana is None:
        return 0
    try:
        count = annotate_runs(grafana, options.runs, options.since)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("No Grafana annotations: %s: %r", options.runs, error)
    else:
        print(f"{count} runs marked in {os.environ['GRAFANA_URL']}")
    return 0


def _client() -> Any:
    """The package grafana_client, which most environments lack. Raises ImportError."""
    return importlib.import_module("grafana_client")


if __name__ == "__main__":
    sys.exit(main())
