"""Items, answers, pairs and the report of the tasks with right answers."""

from __future__ import annotations

import gzip
import json
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from bench.quality.scoring import Scored
from bench.quality.tasks import items, report
from bench.quality.tasks.answers import is_right, letter, number
from bench.quality.tasks.asking import (
    SOLUTION,
    Asked,
    Outcome,
    answer_kl,
    l1_tokens,
    l2_tokens,
    letter_tokens,
    prepared,
)
from bench.quality.tasks.items import GSM8K_PREFIXES, GSM8K_SHOTS, MMLU_CHARACTERS, TASKS
from bench.quality.tasks.paired import mcnemar


class Characters:
    """A tokenizer of characters; a blank and a letter are one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        begin = [0] if add_special_tokens else []
        return begin + [ord(c) for c in (text[1:] if len(text) == 2 else text)]


def split(folder: Path, questions: list[str]) -> None:
    import pyarrow

    rows = [
        {"question": q, "subject": "s", "choices": ["w", "x", "y", "z"], "answer": n % 4}
        for n, q in enumerate(questions)
    ]
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    file = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files in the package's form: three subjects, and word problems."""
    for subject in ("algebra", "law", "us_history"):
        folder = tmp_path / items._MMLU / subject
        long = 2000 if subject == "us_history" else 10
        split(folder / "dev", [f"{subject} dev {n} " + "." * long for n in range(5)])
        split(folder / "validation", [f"{subject} validation {n}" for n in range(4)])
        split(folder / "test", [f"{subject} test {n}" for n in range(10)])
    file = tmp_path / items._GSM8K
    file.parent.mkdir(parents=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for n in range(GSM8K_PREFIXES * (GSM8K_SHOTS + 2)):
            doc = {"question": f"problem {n}", "choices": [f"It is {n}."], "short_answer": f"{n}"}
            lines.write(json.dumps({"doc": doc}) + "\n")
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_items_are_the_same_each_time_and_prefixes_take_turns(task: str, data: Path) -> None:
    first, second = (TASKS[task](data, 12) for _ in range(2))
    assert first == second
    prefixes = [item.prefix for item in first]
    turn = len(set(prefixes))
    assert turn == (3 if task == "mmlu" else 12)
    assert all(prefixes[n] == prefixes[n % turn] for n in range(12))
    assert len({item.question for item in first}) == 12


@pytest.mark.parametrize("task", TASKS)
def test_no_item_is_an_example_of_any_prefix(task: str, data: Path) -> None:
    asked = TASKS[task](data, 30)
    for item in asked:
        question = item.question.removesuffix("Answer:")
        assert all(question not in other.prefix for other in asked)


def test_examples_of_mmlu_show_their_letter_and_end_before_they_are_too_long(data: Path) -> None:
    by_group = {item.group: item for item in items.mmlu(data, 3)}
    algebra = by_group["algebra"].prefix
    assert algebra.startswith("The following are multiple choice questions (with answers) about a")
    assert algebra.count("Answer:") == 9
    assert "algebra dev 1 ..........\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n" in algebra
    assert by_group["us_history"].question.endswith("D. z\nAnswer:")
    long = by_group["us_history"].prefix
    assert long.count("dev") == 3
    assert len(long) <= MMLU_CHARACTERS


def test_more_items_than_there_are_is_an_error(data: Path) -> None:
    with pytest.raises(ValueError, match="there are 30 items, fewer than 31"):
        items.mmlu(data, 31)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2 + 3 = 5. So the answer is 5.", "5"),
        ("The answer is $1,234.50, not 7.", "1234.50"),
        ("So the answer is 3. Wait: the answer is -4.", "-4"),
        ("She has 12 and 13", "13"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_number_that_a_text_says(text: str, found: str | None) -> None:
    assert number(text) == (None if found is None else Decimal(found))


def test_a_solution_is_right_by_its_value() -> None:
    assert is_right("so the answer is 1,000.", "1000")
    assert is_right("the answer is 5.00", "5")
    assert not is_right("the answer is 5", "6")
    assert not is_right("no number", "6")


def listed(tokens: list[int], logits: list[float]) -> Scored:
    values = np.array([logits], np.float32)
    return Scored(np.empty(0, np.float32), values, np.array([tokens], np.int32), (), 0, 9)


def test_the_letter_is_the_one_listed_first() -> None:
    tokens = {"A": 5, "B": 6, "C": 7, "D": 8}
    assert letter(listed([3, 7, 5, 6], [-0.1, -3, -4, -5]), tokens) == "C"
    with pytest.raises(ValueError, match="none of A, B, C, D"):
        letter(listed([1, 2], [-0.5, -1]), tokens)


def test_kl_at_the_answer_by_hand() -> None:
    p, q = [0.7, 0.3], [0.6, 0.4]
    reference = Outcome(True, "A", 9, [1, 2], [math.log(x) for x in p])
    other = Outcome(True, "A", 9, [2, 1], [math.log(x) for x in reversed(q)])
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert answer_kl(reference, other, 10) == pytest.approx(expected, rel=1e-4)
    assert answer_kl(reference, reference, 10) == 0
    assert answer_kl(Outcome(True, "5", 9), Outcome(True, "5", 9), 10) is None


def test_mcnemar_against_the_binomial_by_hand() -> None:
    reference = [True] * 10 + [False] * 3 + [True] * 5
    other = [False] * 10 + [True] * 3 + [True] * 5
    paired = mcnemar(reference, other)
    assert (paired.lost, paired.gained) == (10, 3)
    tail = sum(math.comb(13, n) for n in range(4)) / 2**13
    assert paired.p == pytest.approx(2 * tail)
    assert mcnemar(reference, reference).p == 1
    with pytest.raises(ValueError, match="zip"):
        mcnemar(reference, other[:-1])


def test_tokens_of_a_prefix_are_shared_and_begin_once(data: Path) -> None:
    asked = prepared(items.mmlu(data, 6), Characters())
    assert asked[0].prefix == asked[3].prefix
    assert asked[0].prefix[0] == 0
    assert 0 not in asked[0].question
    assert asked[0].longest == len(asked[0].prefix) + len(asked[0].question) + 1
    solved = prepared(items.gsm8k(data, 1), Characters())[0]
    assert solved.longest == len(solved.prefix) + len(solved.question) + SOLUTION


def test_letters_must_be_one_token() -> None:
    class Bytes:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
            return list(text.encode())

    assert letter_tokens(Characters()) == {c: ord(c) for c in "ABCD"}
    with pytest.raises(ValueError, match="'A' after a blank is 2 tokens"):
        letter_tokens(Bytes())


def test_l1_holds_what_is_asked_and_no_turn_of_prefixes(data: Path) -> None:
    asked = prepared(items.gsm8k(data, GSM8K_PREFIXES), Characters())
    longest = max(one.longest for one in asked)
    turn = sum(len(one.prefix) for one in asked)
    for concurrency, page in ((1, 1), (2, 64)):
        l1 = l1_tokens(asked, concurrency, page)
        assert l1 >= (concurrency + 1) * longest
        assert l1 % page == 0
        assert turn >= 2 * l1
    with pytest.raises(ValueError, match=r"prefixes of gsm8k are \d+ tokens in all"):
        l1_tokens(asked, GSM8K_PREFIXES, 1)
    with pytest.raises(ValueError, match="Ask for more items"):
        l1_tokens(asked[:2], 1, 1)


def test_the_report_shows_the_control_first() -> None:
    arm = {"accuracy": 0.5, "same": 2, "lost": 0, "gained": 0, "p": 1.0, "kl": 0.0, "right": "10"}
    lossy = {**arm, "accuracy": 0.0, "lost": 1, "same": 1, "kl": None}
    found = report.table({"arms": {"int8": arm, "bf16-again": arm, "bf16": arm, "fp8": lossy}})
    assert [row[0] for row in found.rows] == ["bf16", "bf16-again", "fp8", "int8"]
    assert found.rows[2][1:] == ["0.0%", "1", "0", "1.000", "50.0%", "-"]


def test_l2_is_asked_to_hold_each_prefix_once() -> None:
    first, second = (
        Asked(items.Item("mmlu", "law", "p", question, "A"), (1,) * 100, (2,) * tokens)
        for question, tokens in (("a", 10), ("b", 20))
    )
    solved = Asked(items.Item("gsm8k", "0", "q", "c", "7"), (3,) * 50, (4,) * 5)
    assert l2_tokens([first, second]) == 100 + (10 + 1) + (20 + 1)
    assert l2_tokens([first, second, solved]) == 132 + 50 + 5 + SOLUTION
