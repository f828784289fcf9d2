"""HIQCACHE_ variables: values, defaults and errors that say what is allowed."""

from __future__ import annotations

import pytest

from hiqcache.settings import Settings, SettingsError


def test_defaults() -> None:
    assert Settings.from_env({}) == Settings("bf16", "auto", "bytes", "bf16", True)
    assert not Settings.from_env({"PATH": "/bin"}).quantises


def test_every_variable_is_read() -> None:
    env = {
        "HIQCACHE_CODEC": "int8-rot",
        "HIQCACHE_TRANSFER": "torch",
        "HIQCACHE_SIZING": "tokens",
        "HIQCACHE_RETRACTION": "quantised",
        "HIQCACHE_METRICS": "0",
        "HIQCACHE_CHECKSUM": "1",
        "HIQCACHE_ALLOW_UNTRIED": "1",
        "HIQCACHE_ALLOW_SGLANG": "0.5.24.post1",
    }
    assert Settings.from_env(env) == Settings(
        "int8-rot", "torch", "tokens", "quantised", False, True, True, "0.5.24.post1"
    )


def test_an_empty_value_is_the_default() -> None:
    assert Settings.from_env({"HIQCACHE_CODEC": ""}) == Settings()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HIQCACHE_CODEC": "int7"}, "HIQCACHE_CODEC='int7': it must be one of bf16, int8, int8-"),
        ({"HIQCACHE_SIZING": "gb"}, "one of bytes, tokens"),
        ({"HIQCACHE_METRICS": "yes"}, "one of 1, 0"),
        ({"HIQCACHE_CHECKSUM": "2"}, "one of 0, 1"),
        ({"HIQCACHE_CHECKSUM": "1"}, "CHECKSUM=1 does nothing with HIQCACHE_CODEC=bf16"),
        ({"HIQCACHE_ALLOW_SGLANG": ">=0.5"}, "must be one version of SGLang"),
        ({"HIQCACHE_ALLOW_SGLANG": "any"}, "must be one version of SGLang"),
        ({"HIQCACHE_COODEC": "int8"}, "Did you mean HIQCACHE_CODEC"),
        ({"HIQCACHE_X": "1"}, "Known: HIQCACHE_CODEC, HIQCACHE_TRANSFER"),
        ({"HIQCACHE_TRANSFER": "torch"}, "does nothing with HIQCACHE_CODEC=bf16"),
    ],
)
def test_errors_say_what_is_allowed(env: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_env(env)


def test_the_mover_serves_int8_alone() -> None:
    with pytest.raises(SettingsError, match="mover serves HIQCACHE_CODEC=int8, not int8-rot"):
        Settings.from_env({"HIQCACHE_CODEC": "int8-rot", "HIQCACHE_TRANSFER": "mover"})
