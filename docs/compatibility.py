"""Writes docs/compatibility.md from the table in hiqcache/compatibility.py.

python -m docs.compatibility [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from docs.releases import Count, Release, read_all
from hiqcache.compatibility import FAMILIES, Entry, Evidence, Family
from hiqcache.features import FEATURES
from hiqcache.plan import PAGE_SIZE, factor_of
from hiqcache.sglang import SUPPORTED_SGLANG
from hiqcache.sglang.adapters import ADAPTERS

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "compatibility.md"

_HOW = {"trained": "trained weights", "random": "random weights", "unit": "unit test"}

_HEAD = f"""# What is served

Made from hiqcache/compatibility.py by `python -m docs.compatibility`; `make lint` checks it. The
same table is what `hiqcache plan`, `hiqcache doctor`, the containers' entry point and the pool's
refusals go by. What is refused stops the server with the reason before it answers;
`HIQCACHE_CODEC=bf16`, or none, serves everything that SGLang serves.

The factor is how many times the tokens int8 holds in the same bytes (bf16 rows, pages of
{PAGE_SIZE}), with what stays SGLang's own counted on both sides. For a family that is refused it is
what could be had. "Tested" is what there is.

## Models
"""

_CONTRACT = "tests/sglang/test_contract.py"

_RELEASES = f"""## Releases of SGLang

What stands above is for SGLang {SUPPORTED_SGLANG}. This is what came of its tests on each release
that is served, on CPUs: no GPU has run the others yet. What "passes" for a feature that is refused
is its refusal. `make releases` renews it (results/releases).

SGLang 0.5.21 and older are not served. They need torch 2.13, an environment of its own, and
their host pools name no format of their pages, by which encoded pages are kept apart in storage,
and have no seam of their own for the transfer: an adapter would be another host pool. `make
contract SGLANG=0.5.21` says what is lacking. Any other release is refused by what it lacks, or
served untested where it lacks nothing and HIQCACHE_ALLOW_SGLANG names it.
"""


def render() -> str:
    """The document's text."""
    families = [
        ("Family", "Models", "SGLang's host pools", "Quantised", "Factor", "Served", "Tested"),
        *(_family(family) for family in FAMILIES.values()),
    ]
    features = [
        ("Feature", "Served", "Tested"),
        *((entry.name, _served(entry), _tested(entry.tested)) for entry in FEATURES.values()),
    ]
    return "\n".join(
        [
            *(_HEAD, *_table(families), "", "## Features", "", *_table(features), ""),
            *(_RELEASES, *_table(_releases(read_all())), ""),
        ]
    )


def _releases(releases: Sequence[Release]) -> list[tuple[str, ...]]:
    """Lines for what was tried on any of them, by the tests that the entries name."""
    rows = [("", *(f"SGLang {release.sglang}" for release in releases))]
    lines = [("What HiQCache needs of SGLang, by its source", {_CONTRACT})]
    for entry in (*FAMILIES.values(), *FEATURES.values()):
        lines.append((entry.name, {proof.where for proof in entry.tested}))
    latent = {family.name for family in FAMILIES.values() if "MLATokenToKVPoolHost" in family.pools}
    for name, tests in lines:
        cells = [
            "refused: see below"
            if name in latent and not ADAPTERS[release.sglang].LATENT
            else _cell([release.of(test) for test in tests])
            for release in releases
        ]
        if any(cells):
            rows.append((name, *(cell or "not tried" for cell in cells)))
    return rows


def _cell(counts: Sequence[Count]) -> str:
    passed, failed = sum(c.passed for c in counts), sum(c.failed for c in counts)
    if failed:
        return f"**{failed} of {passed + failed} cases fail**"
    cases = "case" if passed == 1 else "cases"
    return f"passes ({passed} {cases})" if passed else ""


def _family(family: Family) -> tuple[str, ...]:
    factor = factor_of(family)
    example = "" if factor is None else f"{factor:.2f}x ({family.example.model})"  # type: ignore[union-attr]
    return (
        family.name,
        ", ".join(family.models),
        " + ".join(family.pools),
        family.quantised,
        example,
        _served(family),
        _tested(family.tested),
    )


def _served(entry: Entry) -> str:
    return "yes" if entry.served else f"no: {entry.refused}"


def _tested(tested: Iterable[Evidence]) -> str:
    return "<br>".join(map(_proof, tested)) or "nothing yet"


def _proof(proof: Evidence) -> str:
    file = proof.where.split("::")[0]
    return f"{proof.what}, {_HOW[proof.how]}, {proof.on} ([{Path(file).name}](../{file}))"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = [f"| {' | '.join(cells)} |" for cells in rows]
    return [head, "|" + " --- |" * len(rows[0]), *rest]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the document, or (--check) say whether it is as the table says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.compatibility", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if it differs"
    )
    if parser.parse_args(argv).check:
        if DOCUMENT.is_file() and DOCUMENT.read_text() == render():
            return 0
        print(
            f"{DOCUMENT} is not what the table says: python -m docs.compatibility", file=sys.stderr
        )
        return 1
    DOCUMENT.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
