"""The family that is read of a model is that of the pools that SGLang builds for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hiqcache.compatibility import FAMILIES
from hiqcache.model import read_model
from tests.model_folders import OF_FAMILY, QWEN3_8B, write
from tests.sglang.assembled import apart
from tests.sglang.device_pools import built


@pytest.mark.parametrize("key", OF_FAMILY)
def test_the_family_that_is_read_is_that_of_sglangs_pool(key: str, tmp_path: Path) -> None:
    agree(key, *OF_FAMILY[key], tmp_path)


def test_windows_of_other_widths_that_no_layer_has_are_no_matter(tmp_path: Path) -> None:
    agree("plain", {**QWEN3_8B, "swa_head_dim": 192, "swa_v_head_dim": 128}, 1, tmp_path)


def agree(key: str, config: Mapping[str, Any], page_size: int, folder: Path) -> None:
    """What is read of ``config`` and what SGLang builds of it are of family ``key``, row by row."""
    read = read_model(write(folder, config))
    found = apart(built, folder, page_size)
    assert (read.family.key, found.family) == (key, key), found.kind
    if read.pools:
        rows = [pool.geometry.stock_bytes_per_token for pool in read.pools]
        assert found.row_bytes == tuple(rows)


def test_every_family_of_the_table_is_built() -> None:
    assert OF_FAMILY.keys() == FAMILIES.keys()
