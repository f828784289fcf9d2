"""Recorded traffic through both tiers.

    python -m bench.traces simulate TRACE.jsonl ...   hit ratios at any capacity, offline
    python -m bench.traces replay TRACE.jsonl ...     its beginning on real servers
    python -m bench.traces report [DIR]               the report of what is in DIR, again

A trace is Mooncake's JSONL: a request a line, with timestamp (ms), input_length, output_length and
hash_ids, one id for each block of 512 tokens. `simulate --help` and `replay --help` say more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import REPOSITORY
from bench.traces import replay, report, simulate


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, module in (("simulate", simulate), ("replay", replay)):
        command = commands.add_parser(
            name,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    again = commands.add_parser("report", description=report.__doc__)
    again.add_argument("out", nargs="?", type=Path, default=REPOSITORY / "results" / "traces")
    again.set_defaults(run=lambda *_: 0)
    options = parser.parse_args()
    status: int = options.run(options)
    try:
        report.write(options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {options.out}/report.md, {options.out}/report.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
