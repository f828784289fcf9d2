"""Writes the dashboards' JSON, or checks that it is up to date.

python -m monitoring.dashboards [--check]
"""

from __future__ import annotations

import argparse
import sys

from monitoring.dashboards import FOLDER, dashboards, text_of


def main() -> int:
    """The exit status: 1 where --check finds a file that the code would write otherwise."""
    parser = argparse.ArgumentParser(prog="python -m monitoring.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; report differences")
    check = parser.parse_args().check
    wanted = {f"{uid}.json": text_of(dashboard) for uid, dashboard in dashboards().items()}
    found = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json")}
    stale = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    if check:
        for name in stale:
            print(f"{FOLDER / name}: not what the code makes. Run python -m monitoring.dashboards.")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
