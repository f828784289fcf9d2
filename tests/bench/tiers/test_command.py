"""What the bench refuses before it starts a server, and where it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import REPOSITORY
from bench.tiers import __main__ as bench

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    for name in ("MODEL", "HICACHE_GB", "REPEATS", "ARMS", "EXPERIMENTS", "SERVER_ARGS", "OUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", *map(str, arguments)])
    # A test that comes this far would start servers.
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("it went on"))
    return bench.main()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--arms", "int8,int8-rot"), "lacks bf16"),
        (("--server-args=--tp-size 2",), "servers of one rank"),
        (("--server-args=--tp=2",), "servers of one rank"),
        (("--arms", "bf16,int3"), "there is no arm 'int3'"),
        (("--experiments", "c"), "no experiment 'c'"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    arguments: tuple[str, ...],
    text: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--model", model, *arguments) == 2
    assert text in capsys.readouterr().err


def test_a_model_must_be_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--model", "Qwen/Qwen3-8B") == 2
    assert "must be downloaded first" in capsys.readouterr().err


def test_without_the_plug_in_nothing_is_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_plugins", set)
    assert run(monkeypatch, "--model", model) == 2
    assert "every arm would be BF16: pip install ." in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["l2_gigabytes", "model_config"])
def test_runs_of_another_setup_share_no_folder(
    changed: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model)])
    built, _ = bench._plans(bench._options())
    setup = bench._setup(built)
    log = bench.RunLog(out / "runs.jsonl", {**setup, changed: "other"})
    log.add({"experiment": "same-tokens", "point": "p", "repeat": 0, "arm": "bf16", "invalid": []})
    before = (out / "runs.jsonl").read_bytes()
    assert run(monkeypatch, "--model", model, "--out", out) == 2
    assert "holds 1 runs with another model, L2" in capsys.readouterr().err
    assert (out / "runs.jsonl").read_bytes() == before


def test_results_go_beside_those_of_this_repository(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model), "--hicache-gb", "4"])
    options = bench._options()
    bench._plans(options)
    assert options.out == REPOSITORY / "results" / "cpu-tiny-4gb"
    assert not options.out.exists()


def test_a_bench_without_a_valid_run_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv",
        [
            "bench",
            "--cpu",
            "--model",
            str(model),
            "--out",
            str(tmp_path),
            "--experiments",
            "same-tokens",
        ],
    )
    invalid = {"experiment": "same-tokens", "point": "oversubscribed", "repeat": 0, "arm": "bf16"}

    def measure(*given: object) -> None:
        log = next(each for each in given if isinstance(each, bench.RunLog))
        log.add({**invalid, "invalid": ["nothing was stored to L2"]})

    monkeypatch.setattr(bench, "_measure", measure)
    assert bench.main() == 1
    errors = capsys.readouterr().err
    assert "no report" in errors
    assert "INVALID RUN: same-tokens oversubscribed bf16: nothing was stored to L2" in errors
