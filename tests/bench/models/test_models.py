"""The models that are served are what their names say, and a record shows what went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.lab.shards import Shards
from bench.models.__main__ import Results, Running
from bench.models.families import FALCON_H1, GPT_OSS, MLA, QWEN3_NEXT, SUBJECTS, Subject
from bench.models.record import beside, compared, line
from hiqcache.geometry import KVGeometry
from hiqcache.model import Model, read_model

ROWS = {
    MLA.name: ("mla", {"kv": KVGeometry.of_latent(27, 512, 64)}),
    GPT_OSS.name: ("sliding", dict.fromkeys(("full", "swa"), KVGeometry.of_heads(12, 8, 64))),
    QWEN3_NEXT.name: ("linear", {"kv": KVGeometry.of_heads(2, 2, 256)}),
    FALCON_H1.name: ("linear", {"kv": KVGeometry.of_heads(12, 2, 64)}),
}


def read(subject: Subject, folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(dict(subject.config)))
    return read_model(folder)


@pytest.mark.parametrize("name", SUBJECTS)
def test_sglang_reads_the_rows_of_the_named_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    model = read(SUBJECTS[name], tmp_path)
    family, rows = ROWS[name]
    assert model.family.key == family
    assert {pool.label: pool.geometry for pool in model.pools} == rows


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_timed_prompts_leave_l1_before_they_come_again(subject: Subject) -> None:
    held = int(subject.args[subject.args.index("--max-total-tokens") + 1])
    for timed in subject.timed:
        assert timed.prompts * timed.tokens > held
        assert timed.tokens <= held
    assert subject.arms[0] == "bf16"


def figures(tokens: int, row: int, ms: float) -> dict[str, Any]:
    return {
        "capacity": {
            "host_total_tokens": tokens,
            "ranks": {"0": {"kv": {"bytes_per_token": row}}},
        },
        "restores": [{"prompt_tokens": 2048, "ms": ms}],
    }


def test_an_arm_is_set_beside_its_own_familys_stock() -> None:
    records = [
        {"family": "a", "arm": "bf16", **figures(100, 1152, 2.0)},
        {"family": "a", "arm": "int8", **figures(190, 576, 1.0)},
        {"family": "b", "arm": "int8", **figures(190, 576, 1.0)},
    ]
    stock, ours, alone = compared(records)
    assert ours["beside_stock"] == {"factor": 1.9, "bytes_factor": 2.0, "restore": {"2048": 0.5}}
    assert "beside_stock" not in stock
    assert "beside_stock" not in alone
    untimed = figures(100, 1152, 2.0) | {"restores": [{"prompt_tokens": 2048, "ms": None}]}
    assert beside(records[1], untimed)["restore"] == {}


def test_a_record_without_timed_restores_or_with_a_failure_has_problems(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    out = tmp_path / "models.json"
    results = Results(out, Shards(64), cpu=False)
    model = read(MLA, tmp_path)
    results.begin(MLA, model)
    running = cast(Running, SimpleNamespace(subject=MLA, model=model))
    results.add(running, "bf16", "restores", [{"prompt_tokens": 2048, "ms": None}])
    results.add(running, "int8:dma", "restores", [{"prompt_tokens": 2048, "ms": 1.0}])
    results.add(running, "", "failure", "mla ended early\nlast lines of its log")
    records = {record["arm"]: record for record in json.loads(out.read_text())["records"]}
    assert set(records) == set(MLA.arms)
    assert "bf16: no restore was timed" in records["bf16"]["problems"]
    assert "int8:dma: no restore was timed" not in records["int8:dma"]["problems"]
    # Nothing else came from any arm; the failure goes to those that had not come to their end.
    for arm, record in records.items():
        assert any("cut short" in problem for problem in record["problems"])
        assert ("failure" in record) == (arm in ("int8:fused", "int8-rot:dma"))
        assert "not finished" in line(record)
    assert records["int8:fused"]["problems"][0] == "mla ended early"
