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
    for name in (
        "MODEL",
        "HICACHE_GB",
        "PAGE_SIZE",
        "TP_SIZE",
        "DISK",
        "REPEATS",
        "ARMS",
        "EXPERIMENTS",
        "SERVER_ARGS",
        "OUT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", *map(str, arguments)])
    # A test that comes this far would start servers.
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("it went on"))
    return bench.main()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--arms", "int8,int8-rot"), "lacks bf16"),
        (("--server-args=--tp-size 2",), "give --tp-size to the measurement"),
        (("--server-args=--tp=2",), "give --tp-size to the measurement"),
        (("--server-args=--dp 2",), "single servers"),
        (("--server-args=--page-size 64",), "give --page-size to the measurement"),
        (("--server-args=--page-size=64",), "give --page-size to the measurement"),
        (("--tp-size", 3), "KV heads cannot be split over --tp 3"),
        (("--arms", "bf16,int3"), "there is no arm 'int3'"),
        (("--experiments", "l3"), "pages of 1 are too small"),
        (
            ("--experiments", "l3", "--page-size", 64, "--arms", "bf16,int8:mover"),
            "padded pages are no single spans",
        ),
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


@pytest.mark.parametrize("changed", ["l2_gigabytes", "model_config", "page_size", "tp_size"])
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


def test_servers_have_the_pages_and_ranks_that_were_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = ("--page-size", "16", "--tp-size", "2")
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model), *cut])
    built, plans = bench._plans(bench._options())
    setup = bench._setup(built)
    assert (setup["page_size"], setup["tp_size"]) == (16, 2)
    assert [(part.heads, part.width) for part in built.geometry.parts] == [(1, 64)] * 2
    for plan in plans:
        for arm in plan.arms:
            command = built.server(plan, arm).command()
            for name, value in zip(cut[::2], cut[1::2], strict=True):
                assert command[command.index(name) + 1] == value
            assert plan.capacity(arm, built.geometry) % 16 == 0


def test_pages_and_ranks_come_from_the_environment_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PAGE_SIZE", "64"), ("TP_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model)])
    built, _ = bench._plans(bench._options())
    assert built.scale.shards == (64, 2)
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model), "--page-size", "1"])
    built, _ = bench._plans(bench._options())
    assert built.scale.shards == (1, 2)


@pytest.mark.parametrize("wrong", ["0", "-1", "many"])
def test_pages_hold_a_token_at_least(
    wrong: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--model", model, "--page-size", wrong)
    assert "--page-size" in capsys.readouterr().err


def test_runs_of_before_there_were_page_sizes_were_of_pages_of_one_token(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--cpu", "--model", str(model)])
    setup = bench._setup(bench._plans(bench._options())[0])
    assert (setup.pop("page_size"), setup.pop("tp_size")) == (1, 1)
    log = bench.RunLog(tmp_path / "runs.jsonl", setup)
    log.add({"experiment": "same-tokens", "point": "p", "repeat": 0, "arm": "bf16", "invalid": []})
    assert bench.RunLog(tmp_path / "runs.jsonl", {**setup, "page_size": 1}).foreign == 0
    assert bench.RunLog(tmp_path / "runs.jsonl", {**setup, "tp_size": 2}).foreign == 1
    assert bench.RunLog(tmp_path / "runs.jsonl", {**setup, "page_size": 64}).foreign == 1


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
