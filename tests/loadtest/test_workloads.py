"""Workloads: the same for the same seed, and of the shape that was asked for."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from loadtest.workloads import Chat, Request, SharedPrefix, Trace, TraceError, Workload, poisson


def first_requests(workload: Workload, count: int, stream: int = 0) -> list[Request]:
    """The first request of each of ``count`` conversations."""
    conversations = itertools.islice(workload.conversations(stream), count)
    return [next(conversation.turns) for conversation in conversations]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: SharedPrefix(seed=seed, groups=3, prefix_tokens=40, suffix_tokens=4),
        lambda seed: Chat(seed=seed, system_words=20, question_words=5),
    ],
)
def test_a_seed_fixes_the_load_and_streams_differ(make: type[Workload]) -> None:
    assert first_requests(make(1), 8) == first_requests(make(1), 8)
    assert first_requests(make(1), 8) != first_requests(make(2), 8)
    assert first_requests(make(1), 8) != first_requests(make(1), 8, stream=1)


def test_shared_prefixes_are_shared_by_streams_and_suffixes_are_not() -> None:
    workload = SharedPrefix(groups=2, prefix_tokens=50, suffix_tokens=6, output_tokens=3)
    requests = first_requests(workload, 40) + first_requests(workload, 40, stream=1)
    tokens = [tuple(request.tokens or ()) for request in requests]
    assert {len(row) for row in tokens} == {56}
    assert {row[:50] for row in tokens} == set(workload.prefixes)
    assert len({row[50:] for row in tokens}) == 80
    assert workload.working_set_tokens == 100
    body = requests[0].body()
    assert body["max_tokens"] == 3
    assert body["ignore_eos"]


def test_dealt_groups_return_equally_often_in_another_order() -> None:
    workload = SharedPrefix(seed=3, groups=8, prefix_tokens=4, choice="dealt")
    drawn = [next(each.turns).tokens[:4] for each in itertools.islice(workload.conversations(), 64)]
    for deal in (drawn[:32], drawn[32:]):
        assert sorted(deal) == sorted(workload.prefixes * 4)
        assert deal != sorted(deal)
    assert drawn[:32] != drawn[32:]


def test_zipf_makes_the_first_groups_hot() -> None:
    workload = SharedPrefix(groups=8, prefix_tokens=4, choice="zipf", zipf_exponent=1.0)
    rank = {prefix: index for index, prefix in enumerate(workload.prefixes)}
    requests = first_requests(workload, 2000)
    counts = Counter(rank[tuple(request.tokens or ())[:4]] for request in requests)
    share = 1 / sum(1 / k for k in range(1, 9))
    assert counts[0] / 2000 == pytest.approx(share, abs=0.05)
    assert counts[0] > counts[3] > counts[7]


def test_chat_grows_by_the_models_own_answers() -> None:
    conversation = next(Chat(turns=3, system_words=10, question_words=4).conversations())
    turns = conversation.turns
    request = next(turns)
    for number, answer in enumerate(("one", "two"), 1):
        grown = turns.send(answer)
        before, after = request.messages or (), grown.messages or ()
        assert tuple(after[: len(before)]) == tuple(before)
        assert after[len(before)] == {"role": "assistant", "content": answer}
        assert len(after) == 2 * number + 2
        request = grown
    with pytest.raises(StopIteration):
        turns.send("three")


def test_poisson_arrivals_come_at_the_rate() -> None:
    workload = SharedPrefix(groups=1, prefix_tokens=1, suffix_tokens=1)
    arrivals = poisson(workload.conversations(), 5.0, workload.rng("arrivals"))
    times = [conversation.at or 0.0 for conversation in itertools.islice(arrivals, 4000)]
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.05)
    with pytest.raises(ValueError, match="above 0"):
        next(poisson(workload.conversations(), 0.0, workload.rng("arrivals")))


def write_trace(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_replayed_with_its_times_lengths_and_prefixes(tmp_path: Path) -> None:
    row = {"input_length": 700, "output_length": 90, "hash_ids": [7, 8]}
    path = write_trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, **row},
        {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]},
    )
    trace = Trace(path=path, speed=2.0, max_output_tokens=10)
    conversations = list(trace.conversations())
    assert [conversation.at for conversation in conversations] == [0.0, 1.0]
    early, late = (next(conversation.turns) for conversation in conversations)
    assert (len(early.tokens or ()), early.max_tokens) == (1024, 5)
    assert (len(late.tokens or ()), late.max_tokens) == (700, 10)
    assert list(early.tokens or ())[:512] == list(late.tokens or ())[:512]
    assert list(early.tokens or ())[512:700] != list(late.tokens or ())[512:]
    cut = Trace(path=path, max_input_tokens=600)
    assert {len(request.tokens or ()) for request in first_requests(cut, 2)} == {600}
    assert list(trace.conversations(stream=1)) == []


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]},
        {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1]},
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, row: dict[str, object]) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    trace = Trace(path=write_trace(tmp_path / "t.jsonl", good, row))
    with pytest.raises(TraceError, match="line 2"):
        list(trace.conversations())
