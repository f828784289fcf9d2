"""The table of what is served: its evidence exists, its document follows it, its texts help."""

from __future__ import annotations

import ast
import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from docs import compatibility as document
from hiqcache.architectures import FAMILY_OF
from hiqcache.compatibility import FAMILIES, Entry, UnsupportedError
from hiqcache.features import FEATURES
from hiqcache.plan import factor_of

REPOSITORY = Path(__file__).parents[1]
ENTRIES = [*FAMILIES.values(), *FEATURES.values()]
PROOFS = [proof.where for entry in ENTRIES for proof in entry.tested]


@pytest.mark.parametrize("where", sorted(set(PROOFS)))
def test_evidence_exists(where: str) -> None:
    name, _, function = where.partition("::")
    file = REPOSITORY / name
    assert file.is_file()
    if file.suffix == ".py":
        tree = ast.parse(file.read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_what_is_served_was_seen_on_a_server() -> None:
    for family in FAMILIES.values():
        if family.served:
            assert any(proof.how != "unit" for proof in family.tested), family.key


def test_sglang_has_the_pools_that_the_table_names() -> None:
    modules = [
        importlib.import_module(f"sglang.srt.mem_cache.{name}")
        for name in ("memory_pool_host", "pool_host.mha", "pool_host.mla", "pool_host.mamba")
    ]
    modules.append(importlib.import_module("sglang.srt.mem_cache.pool_host.dsa"))
    for name in {name for family in FAMILIES.values() for name in family.pools}:
        assert any(hasattr(module, name) for module in modules), name


def test_pools_that_stay_sglangs_own_beside_l2_are_the_tables() -> None:
    from hiqcache.sglang.support import NATIVE_POOLS

    quantised = {"MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"}
    named = {
        pool
        for family in FAMILIES.values()
        if family.quantised != "nothing"
        for pool in family.pools
    }
    assert named - quantised == NATIVE_POOLS


def test_every_refusal_says_what_was_found_why_and_what_to_do() -> None:
    for entry in ENTRIES:
        if entry.served:
            entry.require("found")
            continue
        with pytest.raises(UnsupportedError, match=r"^what was found: ") as caught:
            entry.require("what was found")
        assert entry.refused in str(caught.value)
        assert "HIQCACHE_CODEC" in str(caught.value)


def test_an_entry_is_flipped_by_its_reason_alone() -> None:
    served = replace(FAMILIES["mla"], refused="")
    assert served.served
    served.require("a latent pool")


def test_factors_are_those_of_the_rows() -> None:
    assert factor_of(FAMILIES["plain"]) == pytest.approx(2 * 128 / 130)
    # Heads of 64 with a scale each; 512 of latent with four, rope with one; 132 B that stay.
    assert factor_of(FAMILIES["sliding"]) == pytest.approx(2 * 64 / 66)
    assert factor_of(FAMILIES["mla"]) == pytest.approx(1152 / 586, abs=1e-3)
    assert factor_of(FAMILIES["dsa"]) == pytest.approx((1152 + 132) / (586 + 132), abs=1e-3)
    assert factor_of(FAMILIES["state"]) is None


def test_special_architectures_belong_to_families_of_the_table() -> None:
    assert set(FAMILY_OF.values()) <= set(FAMILIES)


def test_the_document_is_what_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document.main(["--check"]) == 0
    monkeypatch.setattr(document, "DOCUMENT", tmp_path / "compatibility.md")
    assert document.main(["--check"]) == 1
    assert document.main([]) == 0
    assert document.main(["--check"]) == 0
    served = replace(FEATURES["other_storage"], refused="")
    flipped: dict[str, Entry] = {**FEATURES, "other_storage": served}
    monkeypatch.setattr(document, "FEATURES", flipped)
    assert document.main(["--check"]) == 1
