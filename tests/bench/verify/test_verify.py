"""What bench.verify counts as another prompt's answer."""

from __future__ import annotations

import numpy as np
import pytest

from bench.verify.answers import Reply, strays
from bench.verify.prompts import RandomPrompts, TextPrompts

TEXT = [token for line in range(40) for token in (1, 2, 1, 3, 10 + line)]


def reply(*values: float) -> Reply:
    return Reply(np.array([values]), device=0, host=1)


def test_an_answer_nearer_to_another_prompts_reference_is_a_mismatch() -> None:
    references = [reply(-1.0, -4.0), reply(-3.0, -1.0), reply(-3.5, -1.5)]
    own = [reply(-1.2, -3.7), reply(-3.1, -1.2), reply(-3.4, -1.6)]
    assert strays([0, 1, 2], own, references) == 0
    assert strays([1, 1, 2], own, references) == 1
    assert strays([2, 0, 1], own, references) == 3


def test_text_prompts_are_windows_of_the_text_in_another_place_for_each_seed() -> None:
    prompts = TextPrompts(TEXT)
    drawn = prompts.draw(8, 20, seed=1)
    assert [len(window) for window in drawn] == [20] * 8
    twice = " ".join(map(str, TEXT + TEXT))
    assert all(" ".join(map(str, window)) in twice for window in drawn)
    assert prompts.draw(8, 20, seed=1) == drawn != prompts.draw(8, 20, seed=2)
    assert prompts.watched[:3] == (1, 2, 3)


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="200 tokens do not hold 11 windows of 20"):
        TextPrompts(TEXT).draw(11, 20, seed=1)


@pytest.mark.parametrize("prompts", [TextPrompts(TEXT), RandomPrompts(256)])
@pytest.mark.parametrize("token", [0, 1, 2, 255])
def test_a_changed_token_is_another_one(prompts: RandomPrompts | TextPrompts, token: int) -> None:
    assert prompts.other(token) != token
