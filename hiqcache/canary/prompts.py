"""The canary's texts: its own, or an operator's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from hiqcache.canary.server import Client

#: Articles of Python's own reference, English that every CPython carries; prose, grammar and code,
#: each of 5,000 characters or more.
TOPICS = (
    *("assignment", "attribute-access", "calls", "comparisons", "compound", "customization"),
    *("debugger", "execmodel", "formatstrings", "function", "import", "numeric-types"),
    *("specialnames", "string-methods", "try", "types"),
)


@dataclass(frozen=True)
class Prompt:
    """Tokens, of which the first ``prefix`` are cached and the others scored."""

    name: str
    tokens: tuple[int, ...]
    prefix: int


def texts(file: Path | None) -> dict[str, str]:
    """Texts by name: of ``file``, a JSON list of strings, or the canary's own.

    Raises ValueError for a file that holds something else, OSError for one that cannot be read.
    """
    if file is None:
        return {name: str(topics[name]) for name in TOPICS if name in topics}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Give a list of texts.") from error
    if not (isinstance(found, list) and found and all(isinstance(text, str) for text in found)):
        raise ValueError(f"{file}: it must be a JSON list of texts, one per prompt.")
    return {f"{file.stem}-{number}": text for number, text in enumerate(found)}


def prompts(
    given: dict[str, str], client: Client, page_size: int, prefix: int, scored: int
) -> list[Prompt]:
    """The texts in a server's tokens: at least ``prefix`` tokens of whole pages, then ``scored``.

    Raises ValueError where a text is too short, direct_http.HttpError and ServerError.
    """
    prefix = -(-prefix // page_size) * page_size
    found = []
    for name, text in given.items():
        tokens = client.tokens(text)
        if len(tokens) < prefix + scored:
            raise ValueError(
                f"prompt {name} has {len(tokens)} tokens of the {prefix} + {scored} that are asked "
                f"for (pages of {page_size}): lower --prefix-tokens or give longer texts."
            )
        found.append(Prompt(name, tuple(tokens[: prefix + scored]), prefix))
    return found
