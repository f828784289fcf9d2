"""Starts SGLang in a container, from environment variables alone.

    MODEL              model folder in the container, or a name on the hub. Needed.
    CODEC              bf16 (SGLang's own host pool), int8, … ; the same as HIQCACHE_CODEC
    HICACHE_GB         L2 of each rank in whole decimal GB; or
    HICACHE_RATIO      L2 as a multiple of L1. Neither: SGLang's default ratio
    TP                 tensor-parallel ranks (1)
    MAX_TOTAL_TOKENS   tokens of L1; unset: what the GPU holds
    HOST, PORT         where to listen (0.0.0.0, 30000)
    SGLANG_ARGS        more arguments of sglang.launch_server, quoted as for a shell

Everything is checked before a model is loaded. Then this process becomes SGLang's, so that signals
reach it. With the argument `doctor`, it becomes `hiqcache doctor` for the same settings instead.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hiqcache.doctor import HOST_RESERVE_BYTES, memory_left
from hiqcache.geometry import GeometryError, KVGeometry
from hiqcache.settings import Settings, SettingsError

#: SGLang's own default (--hicache-ratio), for the memory check.
DEFAULT_RATIO = 2.0

#: What SGLang needs to run without a GPU; loadtest/servers.py says why.
CPU_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)

#: Arguments that a variable sets, and which that is.
OWNED = {
    "--model-path": "MODEL",
    "--model": "MODEL",
    "--host": "HOST",
    "--port": "PORT",
    "--tp": "TP",
    "--tp-size": "TP",
    "--tensor-parallel-size": "TP",
    "--max-total-tokens": "MAX_TOTAL_TOKENS",
    "--hicache-size": "HICACHE_GB",
    "--hicache-ratio": "HICACHE_RATIO",
}


class ConfigurationError(ValueError):
    """A variable that is missing, unknown, malformed or contradicts another."""


@dataclass(frozen=True)
class Configuration:
    """What the environment asks for; ``codec`` is None where nothing names one."""

    model: str
    codec: str | None
    gigabytes: int | None
    ratio: float | None
    tp: int
    max_total_tokens: int | None
    host: str
    port: int
    cpu: bool
    extra: tuple[str, ...]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Configuration:
        """Read and check ``env``. Raises ConfigurationError."""
        for name in env:
            if name.startswith("HICACHE_") and name not in ("HICACHE_GB", "HICACHE_RATIO"):
                raise ConfigurationError(
                    f"{name} is no setting of this image. Known: HICACHE_GB, HICACHE_RATIO; "
                    "SGLang's other --hicache- options go into SGLANG_ARGS."
                )
        if not env.get("MODEL"):
            raise ConfigurationError("MODEL is not set: name a model folder or a model on the hub.")
        codec, own = env.get("CODEC") or None, env.get("HIQCACHE_CODEC") or None
        if codec and own and codec.strip().lower() != own.strip().lower():
            raise ConfigurationError(
                f"CODEC={codec} and HIQCACHE_CODEC={own} contradict each other: set one."
            )
        if env.get("HICACHE_GB") and env.get("HICACHE_RATIO"):
            raise ConfigurationError(
                f"HICACHE_GB={env['HICACHE_GB']} and HICACHE_RATIO={env['HICACHE_RATIO']} both "
                "size L2: set one."
            )
        try:
            extra = tuple(shlex.split(env.get("SGLANG_ARGS", "")))
        except ValueError as error:
            raise ConfigurationError(f"SGLANG_ARGS={env['SGLANG_ARGS']!r}: {error}.") from error
        for argument in extra:
            flag = argument.split("=", 1)[0]
            if flag in OWNED:
                raise ConfigurationError(
                    f"SGLANG_ARGS holds {flag}, which {OWNED[flag]} sets: use {OWNED[flag]}."
                )
        port = _whole(env, "PORT", 1) or 30000
        if port > 65535:
            raise ConfigurationError(f"PORT={port}: a port is at most 65535.")
        return cls(
            model=env["MODEL"],
            codec=codec or own,
            gigabytes=_whole(env, "HICACHE_GB", 1),
            ratio=_ratio(env),
            tp=_whole(env, "TP", 1) or 1,
            max_total_tokens=_whole(env, "MAX_TOTAL_TOKENS", 1),
            host=env.get("HOST") or "0.0.0.0",
            port=port,
            cpu=env.get("SGLANG_PLATFORM") == "hiqcache_cpu",
            extra=extra,
        )

    def arguments(self) -> list[str]:
        """The arguments of sglang.launch_server."""
        given: list[str] = ["--model-path", self.model, "--host", self.host]
        given += ["--port", str(self.port), "--tp-size", str(self.tp)]
        given += ["--enable-hierarchical-cache", "--enable-metrics", "--enable-cache-report"]
        if self.gigabytes is not None:
            given += ["--hicache-size", str(self.gigabytes)]
        if self.ratio is not None:
            given += ["--hicache-ratio", f"{self.ratio:g}"]
        if self.max_total_tokens is not None:
            given += ["--max-total-tokens", str(self.max_total_tokens)]
        return [*given, *(CPU_ARGS if self.cpu else ()), *self.extra]

    def host_gigabytes(self, geometry: KVGeometry) -> float | None:
        """Decimal GB of one rank's L2; None where only the GPU's free memory will tell.

        HIQCACHE_SIZING=tokens takes less; what it takes at most is what must fit.
        """
        if self.gigabytes is not None:
            return float(self.gigabytes)
        if self.max_total_tokens is None:
            return None
        tokens = self.max_total_tokens * (self.ratio or DEFAULT_RATIO)
        return tokens * geometry.stock_bytes_per_token / 1e9


def _whole(env: Mapping[str, str], name: str, least: int) -> int | None:
    text = env.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name}={text!r}: it must be a whole number from {least} up.")
    return int(text)


def _ratio(env: Mapping[str, str]) -> float | None:
    text = env.get("HICACHE_RATIO")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"HICACHE_RATIO={text!r}: it must be a number above 0.")
    return value


def planned(configuration: Configuration, quantises: bool) -> tuple[KVGeometry, float] | None:
    """The model's geometry and its L2 in GB a rank; None where they are known only after the load.

    Raises GeometryError for a model folder that no quantised pool can be planned for.
    """
    if not Path(configuration.model).is_dir():
        return None
    try:
        geometry = KVGeometry.from_path(configuration.model, configuration.tp)
    except GeometryError:
        if quantises:
            raise
        return None  # SGLang's own pool serves models that a plan does not describe
    gigabytes = configuration.host_gigabytes(geometry)
    return None if gigabytes is None else (geometry, gigabytes)


def check_memory(gigabytes: float, ranks: int) -> None:
    """Raise ConfigurationError where SGLang would, once the model is loaded: for want of memory.

    It builds no pool that leaves less than its reserve of the machine's or the cgroup's memory.
    """
    pool, (left, source) = gigabytes * 1e9 * ranks, memory_left()
    if pool + HOST_RESERVE_BYTES > left:
        raise ConfigurationError(
            f"L2 takes {pool / 1e9:.2f} GB, SGLang keeps {HOST_RESERVE_BYTES / 1e9:.2f} GB free, "
            f"and {left / 1e9:.2f} GB are left ({source}): lower HICACHE_GB (or HICACHE_RATIO, "
            "MAX_TOTAL_TOKENS), or raise the container's limit."
        )


def main(argv: list[str]) -> None:
    """Check the environment and become SGLang. Exits with status 2 where it does not start."""
    try:
        if argv not in ([], ["doctor"]):
            raise ConfigurationError(
                f"arguments {shlex.join(argv)}: the image takes none, or `doctor`. SGLang's "
                "arguments go into SGLANG_ARGS."
            )
        configuration = Configuration.from_env(os.environ)
        if configuration.codec:
            os.environ["HIQCACHE_CODEC"] = configuration.codec
        settings = Settings.from_env()
        plan = planned(configuration, settings.quantises)
        if plan and not argv:
            check_memory(plan[1], configuration.tp)
    except (ConfigurationError, SettingsError, GeometryError) as error:
        print(f"hiqcache container: {error}", file=sys.stderr)
        sys.exit(2)
    if argv:
        command = ["-m", "hiqcache.cli", "doctor"]
        if plan:
            command += ["--model", configuration.model, "--tp", str(configuration.tp)]
            command += ["--host-gb", str(plan[1])]
    else:
        command = ["-m", "sglang.launch_server", *configuration.arguments()]
        print(f"hiqcache container: {settings}; {shlex.join(command)}", flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(sys.argv[1:])
