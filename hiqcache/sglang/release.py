"""Checks releases of SGLang before they are installed: what a maintainer runs when one appears.

    python -m hiqcache.sglang.release WHEEL ...

Says what each release lacks of the contract, and which functions that the contract names read
otherwise than in the installed one: those are to be looked at, though nothing may be amiss. Status
1 where something is lacking. `make contract SGLANG=x.y.z` downloads the wheel and runs this;
`make contract` does so for every release that is served.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from hiqcache.sglang.adapters import SERVED, adapter_for
from hiqcache.sglang.contract import breaches, terms
from hiqcache.sglang.source import Source
from hiqcache.sglang.terms import Metric


def moved(before: Source, after: Source) -> list[str]:
    """Paths of the contract's functions and methods that read differently in ``after``."""
    paths = []
    for term in terms(adapter_for(after)):
        if isinstance(term, Metric):
            continue
        texts = [_text(source, term.module, term.name) for source in (before, after)]
        if None not in texts and texts[0] != texts[1] and term.path not in paths:
            paths.append(term.path)
    return paths


def _text(source: Source, module: str, name: str) -> str | None:
    """The code of a function, without comments, annotations' layout and docstring."""
    found = source.find(module, name)
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    body = found.body[1:] if ast.get_docstring(found, clean=False) is not None else found.body
    return "\n".join([ast.unparse(found.args), *map(ast.unparse, body)])


def main(argv: Sequence[str] | None = None) -> int:
    """Check wheels; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hiqcache.sglang.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheel", type=Path, nargs="+")
    # A list: every wheel is judged, whatever is found in those before it.
    return max([_judge(Source.wheel(wheel)) for wheel in parser.parse_args(argv).wheel])


def _judge(source: Source) -> int:
    lacking = breaches(source)
    installed = Source.installed()
    if installed is not None and installed.version != source.version:
        changed = moved(installed, source)
        print(f"Of {installed.version}'s code that HiQCache relies on, {len(changed)} changed:")
        print("".join(f"  {path}\n" for path in changed), end="")
    for sentence in lacking:
        print(f"LACKS  {sentence}")
    verdict = f"{len(lacking)} lacking" if lacking else "it holds"
    served = "served" if source.version in SERVED else "not served"
    print(f"SGLang {source.version} ({served}): {verdict}.")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
