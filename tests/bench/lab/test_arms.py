"""Arms: one name for each, whatever results called it."""

from __future__ import annotations

import json

import pytest

from bench import REPOSITORY
from bench.lab.arms import arm_named, arms_named, title
from bench.lab.plots import colour_of
from hiqcache.codecs import CODEC_NAMES


def test_an_arm_is_a_codec_and_perhaps_a_transfer() -> None:
    assert arm_named("int8:mover").env == {"HIQCACHE_CODEC": "int8", "HIQCACHE_TRANSFER": "mover"}
    assert arm_named("int8").env == {"HIQCACHE_CODEC": "int8"}
    assert [arm.codec for arm in arms_named(",".join(("bf16", *CODEC_NAMES)))] == [
        "bf16",
        *CODEC_NAMES,
    ]
    assert arm_named("fp8").env == arm_named("bf16").env
    assert arm_named("fp8+int4").env == arm_named("int4").env
    assert arm_named("fp8+int4").args == arm_named("fp8").args
    assert arm_named("int8:torch").file_name == "int8-torch"


def test_what_was_called_mover_is_int8_on_the_mover() -> None:
    assert arm_named("mover") == arm_named("int8:mover")
    assert colour_of("mover") == colour_of("int8:mover")


@pytest.mark.parametrize("name", ["", ",", "int3", "bf16:mover", "int8:", "int8:fast", "mover2"])
def test_no_other_name_is_one(name: str) -> None:
    with pytest.raises(ValueError, match="arm"):
        arms_named(name)


def test_every_committed_result_names_arms_that_exist() -> None:
    names = {
        row["arm"]
        for file in (REPOSITORY / "results").glob("*/*.json")
        for row in json.loads(file.read_text()).get("rows", ())
        if "arm" in row
    }
    assert {"bf16", "int8"} <= names
    assert all(title(name) for name in names)
