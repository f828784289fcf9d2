"""The format tag: whatever changes the meaning of a page's bytes changes it."""

from __future__ import annotations

from typing import Any

import pytest

from hiqcache.codecs import get_codec
from hiqcache.record import Part, RecordLayout, kv_parts
from hiqcache.storage import tag as tag_module
from hiqcache.storage.seal import SEAL_BYTES
from hiqcache.storage.tag import PageFormat


def layout(page_size: int = 16, layers: int = 4, **changed: Any) -> RecordLayout:
    parts = changed.pop("parts", kv_parts(2, 64))
    codec = changed.pop("codec", "int8")
    rows = get_codec(codec).row_formats(parts)
    return RecordLayout(layers, page_size, rows, **{"trailer_bytes": SEAL_BYTES, **changed})


BASE = PageFormat("int8", layout(), (0, 4), kv_parts(2, 64), "bfloat16", 1)

OTHERS = {
    "codec": BASE._replace(codec="int8-rot"),
    "page size": BASE._replace(layout=layout(page_size=32)),
    "a page without a seal": BASE._replace(layout=layout(trailer_bytes=0)),
    "other layers of the same number": BASE._replace(layers=(4, 8)),
    "heads": BASE._replace(parts=kv_parts(4, 64), layout=layout(parts=kv_parts(4, 64))),
    "fewer heads, as wide together": BASE._replace(parts=kv_parts(1, 128)),
    "width": BASE._replace(parts=kv_parts(2, 128), layout=layout(parts=kv_parts(2, 128))),
    "parts": BASE._replace(parts=(Part("latent", 2, 64), Part("rope", 2, 64))),
    "dtype": BASE._replace(dtype="float16"),
    "ranks": BASE._replace(ranks=2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_meaning_is_another_tag(other: PageFormat) -> None:
    assert other.tag != BASE.tag


def test_a_version_of_the_format_is_another_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BASE.tag
    monkeypatch.setattr(tag_module, "FORMAT_VERSION", 2)
    assert BASE.tag != before


def test_the_order_of_the_arena_is_none_of_it() -> None:
    assert BASE._replace(layout=layout(order="layer_first")).tag == BASE.tag


def test_a_tag_stays_what_it_is() -> None:
    """Pages outlive processes: the tag of today's format is fixed, and readable."""
    assert BASE.tag == "hiq1-int8-5e2ef690e92e"
