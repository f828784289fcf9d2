"""Real English text that the pinned environment carries, cut into windows."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str) -> list[int]: ...


def _python_topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _opticks() -> str:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "Newton's Opticks comes with the package apache-tvm-ffi, which is not installed: run "
            "`make env`."
        )
    path = Path(spec.origin).parent / "3rdparty" / "libbacktrace" / "Isaac.Newton-Opticks.txt"
    return path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Text:
    """A text and where it comes from."""

    title: str
    load: Callable[[], str]


#: Reference documentation, and prose of 1730: as different as two English texts get.
TEXTS: Mapping[str, Text] = MappingProxyType(
    {
        "python-topics": Text("Python's language reference (pydoc_data.topics)", _python_topics),
        "opticks": Text("Newton's Opticks, 4th edition (in apache-tvm-ffi)", _opticks),
    }
)


def paragraphs(text: str) -> str:
    """``text`` with each paragraph on one line: hard line breaks are the printer's, not prose."""
    blocks = (re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(block for block in blocks if block)


def windows(tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
    """``count`` windows of ``width`` tokens, spread evenly and without overlap.

    Raises ValueError where the text is too short.
    """
    stride = len(tokens) // count
    if stride < width:
        raise ValueError(f"{len(tokens)} tokens do not hold {count} windows of {width}.")
    return [list(tokens[i * stride : i * stride + width]) for i in range(count)]


def tokens_of(name: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the text called ``name``."""
    return tokenizer.encode(paragraphs(TEXTS[name].load()))
