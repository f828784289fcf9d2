"""`python -m loadtest.health URL` ends with status 0 where URL answers: the container's health."""

from __future__ import annotations

import sys

from loadtest.streaming import direct_session


def main(url: str) -> int:
    """The exit status; what is wrong goes to stderr."""
    try:
        with direct_session() as session:
            session.get(url, timeout=4).raise_for_status()
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
