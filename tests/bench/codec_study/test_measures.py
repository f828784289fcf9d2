"""Measures, the two protocols on a small random model, and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench.codec_study import report
from bench.codec_study.candidates import CANDIDATES, FOUR_BITS, FP8
from bench.codec_study.measures import BLOCK, moved, summary
from bench.codec_study.quantisers import Place
from bench.codec_study.subject import Subject


def logprobs(positions: int, seed: int) -> torch.Tensor:
    logits = torch.randn(positions, 11, generator=torch.Generator().manual_seed(seed))
    return torch.log_softmax(logits, -1)


def test_nothing_moved_where_the_answers_are_equal() -> None:
    exact = logprobs(64, 0)
    found = summary([moved(exact, exact, [1] * 64)])
    assert found["kl"] == 0
    assert found["kl_standard_error"] == 0
    assert found["top1_percent"] == 100
    assert found["perplexity_ratio"] == 1
    assert found["positions"] == 64


def test_kl_loss_and_agreement_against_sums_by_hand() -> None:
    exact, other = logprobs(BLOCK, 0), logprobs(BLOCK, 1)
    tokens = [n % 11 for n in range(BLOCK)]
    kl = [
        sum(math.exp(p) * (p - q) for p, q in zip(row, its, strict=True))
        for row, its in zip(exact.tolist(), other.tolist(), strict=True)
    ]
    lost = [
        exact[n, tokens[n + 1]].item() - other[n, tokens[n + 1]].item() for n in range(BLOCK - 1)
    ]
    found = summary([moved(exact, other, tokens), moved(exact, exact, tokens)])
    assert found["kl"] == pytest.approx(sum(kl) / (2 * BLOCK), rel=1e-4)
    assert found["perplexity_ratio"] == pytest.approx(
        math.exp(sum(lost) / (2 * (BLOCK - 1))), rel=1e-4
    )
    # Two blocks: the mean of one, and zero.
    assert found["kl_standard_error"] == pytest.approx(sum(kl) / BLOCK / 2, rel=1e-4)
    same = sum(bool(a == b) for a, b in zip(exact.argmax(-1), other.argmax(-1), strict=True))
    assert found["top1_percent"] == pytest.approx(100 * (same + BLOCK) / (2 * BLOCK))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two layers of random weights; the tokenizer is of no matter."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return Subject(folder)


def tokens(count: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def test_exact_rows_restored_answer_as_a_run_in_one_piece(subject: Subject) -> None:
    window = tokens(96)
    rows = subject.rows(window[:64])
    assert [k.shape for k, _ in rows] == [(2, 64, 32)] * 2
    after = subject.after(rows, window[64:])
    whole = subject.throughout(window, lambda k, v, _: (k, v))
    assert torch.allclose(after, whole[64:], atol=1e-5)


def test_rows_are_restored_for_each_run_anew(subject: Subject) -> None:
    """The suffix's own rows must not stay behind in the prefix."""
    window = tokens(96)
    rows = subject.rows(window[:64])
    first = subject.after(rows, window[64:])
    assert torch.equal(first, subject.after(rows, window[64:]))
    assert all(k.shape[1] == 64 for k, _ in rows)


def test_every_layer_passes_the_codec_in_both_protocols(subject: Subject) -> None:
    seen: list[tuple[str, Place, int]] = []

    def note(how: str):  # type: ignore[no-untyped-def]
        def codec(k: torch.Tensor, v: torch.Tensor, at: Place) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append((how, at, k.shape[1]))
            return k, v

        return codec

    window = tokens(96)
    subject.through(subject.rows(window[:64]), note("restored"))
    subject.throughout(window, note("whole"))
    theta = seen[0][1].rope_theta
    assert seen == [
        ("restored", Place(0, 2, theta), 64),
        ("restored", Place(1, 2, theta), 64),
        ("whole", Place(0, 2, theta), 96),
        ("whole", Place(1, 2, theta), 96),
    ]


def test_a_spoilt_layer_shows_in_both_protocols(subject: Subject) -> None:
    def spoil_last(
        k: torch.Tensor, v: torch.Tensor, at: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (k, torch.zeros_like(v)) if at.layer == at.layers - 1 else (k, v)

    window = tokens(96)
    rows = subject.rows(window[:64])
    exact = subject.after(rows, window[64:])
    spoilt = subject.after(subject.through(rows, spoil_last), window[64:])
    assert moved(exact, spoilt, window[64:]).kl.mean() > 1e-4
    exact, spoilt = (
        subject.throughout(window, codec) for codec in (lambda k, v, _: (k, v), spoil_last)
    )
    assert moved(exact, spoilt, window).kl.mean() > 1e-4


def study(kls: dict[str, float], model: str = "SmolLM2-135M-Instruct") -> dict[str, object]:
    made = {
        "command": "python -m bench.codec_study",
        "environment": {
            "commit": "abc", "gpus": [], "cores": 2, "cpu": "a CPU", "versions": {"torch": "2"},
        },
    }  # fmt: skip
    by_name = {candidate.name: candidate for candidate in CANDIDATES}
    one = {"kl": 1.0, "kl_standard_error": 0.1, "top1_percent": 99.0, "perplexity_ratio": 1.0}
    return {
        "setting": {
            "model": model,
            "head_dim": 64,
            "layers": 2,
            "texts": {"t": "T"},
            "restored": {"prefix": 64, "suffix": 32, "windows_per_text": 1},
            "whole": {"tokens": 64, "windows_per_text": 1},
        },
        "candidates": {
            name: {
                "times_bf16_at_128": by_name[name].times_bf16(128, 2),
                "times_bf16_here": by_name[name].times_bf16(64, 2),
                "block": by_name[name].block,
                "restored": {**one, "kl": kl},
                **made,
            }
            for name, kl in kls.items()
        },
        "drift": {
            FOUR_BITS.name: {"cycles": {"1": one, "20": {**one, "kl": 2.0}}, **made},
        },
    }


def test_the_report_sorts_by_ratio_and_compares_with_fp8(tmp_path: Path) -> None:
    found = study({FOUR_BITS.name: 0.5, FP8.name: 2.0})
    (tmp_path / "M.json").write_text(json.dumps(found))
    report.write(tmp_path)
    lines = (tmp_path / "study.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| fp8", "| K 3/5"))]
    assert [row.split(" | ")[0] for row in rows] == [f"| {FP8.name}", f"| {FOUR_BITS.name}"]
    assert rows[1].split(" | ")[1:6] == ["64", "3.55", "3.45", "5.0e-01 ± 1e-01", "0.25"]
    assert any(
        line.startswith(f"| SmolLM2-135M-Instruct | {FOUR_BITS.name} | 1.0e+00 | 2.0e+00")
        for line in lines
    )


def test_a_target_is_met_or_missed_and_the_most_tokens_that_meet_all_are_named() -> None:
    finer = "K 3/6 bits per channel, 4 kept; V4"
    small = study({FP8.name: 2.0, FOUR_BITS.name: 1.9, finer: 1.0})
    large = study({FP8.name: 2.0, FOUR_BITS.name: 0.8, finer: 0.5}, "Qwen2.5-Coder-0.5B-Instruct")
    text = report.markdown([small, large])
    assert f"SmolLM2-135M-Instruct: `{FOUR_BITS.name}` restores with 0.95 of FP8's KL" in text
    assert "at most 1.00 was asked: met." in text
    assert "0.40 of FP8's KL; at most 0.33 was asked: **missed**." in text
    assert f"every target met by a standard error: `{finer}`, 3.36x" in text
    assert f"met by a standard error: `{FOUR_BITS.name}`, 3.55x" in report.markdown([small])
    # Within a standard error of the target is not met by one.
    near = study({FP8.name: 2.0, FOUR_BITS.name: 1.95, finer: 1.0})
    assert f"met by a standard error: `{finer}`, 3.36x" in report.markdown([near])
