"""What a seal costs: the measurement runs, and its figures are of the pages that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import seals


def test_every_page_size_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "ARENA_BYTES", 8 * 2**20)
    out = tmp_path / "seals.json"
    assert seals.main(["--repeats", "3", "--out", str(out)]) == 0
    pages = json.loads(out.read_text())["pages"]
    assert [page["page_size"] for page in pages] == [1, 16, 64]
    for page in pages:
        # 36 layers of K and V, 8 heads of 128 codes and a scale, and up to 128 B for the seal.
        rows = 36 * 2 * 8 * (128 + 2) * page["page_size"]
        assert rows < page["page_bytes"] <= rows + 128
        assert page["prove_gb_s"] == pytest.approx(
            page["page_bytes"] / page["us"]["prove"] / 1e3, abs=0.01
        )
        assert all(us > 0 for us in page["us"].values())
