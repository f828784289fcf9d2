"""A report: sections of text, tables and plots, as Markdown and as one HTML file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lab import shards
from bench.lab.environment import hardware
from bench.lab.table import Table

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:.3em .6em}"
    "svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    text: Sequence[str]
    tables: Sequence[Table]
    plot: Path | None


def write(folder: Path, sections: Sequence[Section]) -> None:
    """Make report.md and report.html in ``folder``."""
    heading = f"Results: {folder.name}"
    (folder / "report.md").write_text(_markdown(heading, sections))
    (folder / "report.html").write_text(_html(heading, sections))


def made_with(setup: dict[str, Any]) -> str:
    """What made a figure, in a sentence."""
    environment = setup["environment"]
    versions = environment["versions"]
    dummy = ", dummy weights" if setup["dummy_weights"] else ""
    return (
        f"Made by `{setup['command']}` with {setup['model']}{dummy}{shards.described(setup)} on "
        f"{hardware(environment)}; "
        f"SGLang {versions['sglang']}, torch {versions['torch']}, HiQCache {versions['hiqcache']} "
        f"({environment['commit'] or 'no commit'}), {environment['time']}."
    )


def _markdown(heading: str, sections: Sequence[Section]) -> str:
    parts = [f"# {heading}"]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        parts += [table.markdown() for table in section.tables]
        if section.plot:
            parts.append(f"![{section.title}](plots/{section.plot.name})")
    return "\n\n".join(parts) + "\n"


def _html(heading: str, sections: Sequence[Section]) -> str:
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{_STYLE}</style><h1>{heading}</h1>"
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        parts += [table.html() for table in section.tables]
        if section.plot:
            drawing = section.plot.read_text()
            parts.append(drawing[drawing.index("<svg") :])
    return "\n".join([*parts, "</html>\n"])
