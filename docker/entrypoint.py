"""Starts SGLang in a container, from environment variables alone.

    MODEL              model folder in the container (absolute), or a name on the hub. Needed.
    HIQCACHE_CODEC     bf16 (SGLang's own host pool), int8, …
    HICACHE_GB         L2 of each rank in whole decimal GB; or
    HICACHE_RATIO      L2 as a multiple of L1. Neither: SGLang's default ratio, or what fits
    TP                 tensor-parallel ranks (1)
    MAX_TOTAL_TOKENS   tokens of L1; unset: what the GPU holds
    HOST, PORT         where to listen (0.0.0.0, 30000)
    SGLANG_ARGS        more arguments of sglang.launch_server, quoted as for a shell

What can be checked without loading the model is checked first. Then this process becomes SGLang's,
so that signals reach it. With the argument `doctor`, it becomes `hiqcache doctor` for the same
settings instead.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hiqcache.compatibility import UnsupportedError
from hiqcache.direct_http import past_proxies
from hiqcache.geometry import GeometryError
from hiqcache.model import Model, read_model
from hiqcache.plan import layout_for
from hiqcache.settings import Settings, SettingsError

#: What SGLang needs to run without a GPU; bench/lab/servers.py says why.
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
    "--tp-size": "TP",
    "--tensor-parallel-size": "TP",
    "--max-total-tokens": "MAX_TOTAL_TOKENS",
    "--hicache-size": "HICACHE_GB",
    "--hicache-ratio": "HICACHE_RATIO",
}

_V = TypeVar("_V")

#: SGLang's names for the arguments that multiply ranks.
PIPELINE_PARALLEL = ("--pipeline-parallel-size", "--pp-size")
DATA_PARALLEL = ("--data-parallel-size", "--dp-size")

#: Arguments whose values stay out of the log: keys, and JSON that may hold some.
SECRETS = (
    *("--api-key", "--admin-api-key", "--ssl-keyfile-password", "--watermark-config"),
    *("--hicache-storage-backend-extra-config", "--model-loader-extra-config"),
    *("--kv-events-config", "--modelexpress-config", "--unified-cache-external-linker-config"),
)

#: Arguments of SGLang that begin like one of those, and are another.
NO_SECRETS = ("--hicache-storage-backend", "--model", "--ssl-keyfile")


class ConfigurationError(ValueError):
    """A variable that is missing, unknown, malformed or contradicts another."""


@dataclass(frozen=True)
class Configuration:
    """What the environment asks for, beside HiQCache's own settings."""

    model: str
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
        # The slash: only a folder will do.
        if env["MODEL"].startswith("/") and not os.access(f"{env['MODEL']}/", os.R_OK | os.X_OK):
            raise ConfigurationError(
                f"MODEL={env['MODEL']}: this container has no such folder that UID {os.getuid()} "
                "can read. Mount the host's folder of models and let everyone read it (Compose: "
                "MODEL_DIR=/path/on/host, MODEL=/models/NAME; docker run: -v "
                "/path/on/host:/models:ro), or name a model on the hub."
            )
        if env.get("CODEC"):
            # Its name in the images of before 0.2: BF16 would be served unseen.
            raise ConfigurationError(f"CODEC={env['CODEC']} is called HIQCACHE_CODEC: set that.")
        if env.get("HICACHE_GB") and env.get("HICACHE_RATIO"):
            raise ConfigurationError(
                f"HICACHE_GB={env['HICACHE_GB']} and HICACHE_RATIO={env['HICACHE_RATIO']} both "
                "size L2: set one. For a ratio in Compose, which sets HICACHE_GB by itself, leave "
                "that empty (HICACHE_GB=)."
            )
        try:
            extra = tuple(shlex.split(env.get("SGLANG_ARGS", "")))
        except ValueError as error:
            # Not its text, which may hold a key.
            raise ConfigurationError(
                f"SGLANG_ARGS is not quoted as for a shell: {error}."
            ) from error
        for argument in extra:
            flag = argument.split("=", 1)[0]
            if (long := _meant(flag, OWNED)) is not None:
                short = "" if flag == long else f" (short for {long})"
                raise ConfigurationError(
                    f"SGLANG_ARGS holds {flag}{short}, which {OWNED[long]} sets: use {OWNED[long]}."
                )
        port = _whole(env, "PORT", 1) or 30000
        if port > 65535:
            raise ConfigurationError(f"PORT={port}: a port is at most 65535.")
        return cls(
            model=env["MODEL"],
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

    @property
    def ranks(self) -> int:
        """Ranks of this host, each with a GPU and an L2: TP times what SGLANG_ARGS asks for.

        Pipeline stages and replicas multiply them (under --enable-dp-attention, --dp-size does
        not: its groups are among the TP ranks), and --nnodes spreads them over hosts.
        """
        replicas = 1 if "--enable-dp-attention" in self.extra else self._extra(*DATA_PARALLEL) or 1
        ranks = self.tp * (self._extra(*PIPELINE_PARALLEL) or 1) * replicas
        return max(1, ranks // max(1, self._extra("--nnodes") or 1))

    @property
    def page_size(self) -> int:
        """Tokens per page, as SGLANG_ARGS asks for; SGLang's own default is 1."""
        return self._extra("--page-size") or 1

    @property
    def kv_cache_dtype(self) -> str:
        """What the GPU keeps, as SGLANG_ARGS asks for: auto is the model's dtype."""
        return self._given(str, "--kv-cache-dtype") or "auto"

    def _extra(self, *flags: str) -> int | None:
        """A whole number of SGLANG_ARGS."""
        return self._given(int, *flags)

    def _given(self, kind: type[_V], *flags: str) -> _V | None:
        """A value of SGLANG_ARGS; SGLang takes abbreviated flags, and so does this."""
        parser = argparse.ArgumentParser("SGLANG_ARGS", add_help=False)
        parser.add_argument(*flags, type=kind, dest="value")
        value: _V | None = parser.parse_known_args(self.extra)[0].value
        return value

    def host_gigabytes(self, model: Model | None, settings: Settings) -> float | None:
        """Decimal GB of one rank's L2; None where only the load will tell.

        With neither a size nor a ratio SGLang makes L2 as small as the memory needs.
        """
        if self.gigabytes is not None:
            return float(self.gigabytes)
        if None in (model, self.max_total_tokens, self.ratio) or len(model.pools) != 1:
            return None
        tokens, geometry = self.max_total_tokens * self.ratio, model.geometry
        bytes_per_token = geometry.stock_bytes_per_token
        if settings.quantises and settings.sizing == "tokens":
            bytes_per_token = layout_for(
                geometry, settings.codec, self.page_size, settings.transfer
            ).bytes_per_token
        stages = self._extra(*PIPELINE_PARALLEL) or 1  # each holds its share of the layers
        return tokens * bytes_per_token / stages / 1e9

    @property
    def memory_variables(self) -> str:
        """The variables that are set and size L2, as words."""
        if self.gigabytes is not None:
            return "HICACHE_GB"
        return "HICACHE_RATIO or MAX_TOTAL_TOKENS"


def _meant(flag: str, options: Iterable[str]) -> str | None:
    """The option that argparse, which takes any unambiguous beginning, may take ``flag`` for."""
    if flag in options:
        return flag
    if len(flag) < 3 or not flag.startswith("--"):
        return None
    return next((option for option in options if option.startswith(flag)), None)


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


def model_of(configuration: Configuration, settings: Settings) -> Model | None:
    """What SGLang makes of the model's folder; None where it is known only after the load.

    Raises GeometryError or UnsupportedError for a folder that a quantised pool does not serve.
    """
    if not Path(configuration.model).is_dir():
        return None
    try:
        model = read_model(configuration.model, configuration.tp)
        model = model.cached_as(configuration.kv_cache_dtype)
    except GeometryError:
        if settings.quantises:
            raise
        return None  # SGLang's own pool serves models that a plan does not describe
    if settings.quantises:
        if (refusal := model.refusal(settings.codec)) is not None:
            refusal.entry.require(f"{configuration.model} ({refusal.found})")
        try:
            for pool in model.pools:
                layout_for(pool.geometry, settings.codec, configuration.page_size)
        except ValueError as error:
            raise ConfigurationError(f"{configuration.model}: {error}") from error
    for note in model.notes:
        print(f"hiqcache container: note: {note}", file=sys.stderr, flush=True)
    return model


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs that this container was given; 0 where none can be counted."""
    return len(list(devices.glob("nvidia[0-9]*")))


def check_gpus(ranks: int, gpus: int) -> None:
    """Raise ConfigurationError where there are fewer ``gpus`` (0: unknown) than ``ranks``."""
    if 0 < gpus < ranks:
        raise ConfigurationError(
            f"TP (and SGLANG_ARGS) ask for {ranks} GPUs, and this container sees {gpus}: lower "
            f"it, or give it "
            f"more (Compose: GPU_COUNT={ranks} in the profile gpu-int8; each arm of the profile "
            "gpu gets one. docker run: --gpus)."
        )


def check_memory(gigabytes: float, ranks: int, variables: str) -> None:
    """Raise ConfigurationError where SGLang would, once the model is loaded: for want of memory.

    It builds no pool that leaves less than its reserve of the machine's or the cgroup's memory.
    ``variables`` names what to lower.
    """
    # Here, not above: it loads SGLang.
    from hiqcache.sglang.host_memory import memory_left, reserve_bytes

    pool, (left, source), reserve = gigabytes * 1e9 * ranks, memory_left(), reserve_bytes()
    if pool + reserve > left:
        raise ConfigurationError(
            f"L2 takes {pool / 1e9:.2f} GB, SGLang keeps {reserve / 1e9:.2f} GB free, "
            f"and {left / 1e9:.2f} GB are left ({source}): lower {variables}, or raise the "
            "container's limit (Compose: GPU_SERVER_MEMORY, on a CPU CPU_SERVER_MEMORY; "
            "docker run: --memory)."
        )


def masked(arguments: Sequence[str]) -> str:
    """``arguments`` as a shell line, with the values of SECRETS replaced."""
    shown: list[str] = []
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if shown and _secret(shown[-1]):
            shown.append("***")
        elif equals and _secret(flag):
            shown.append(f"{flag}=***")
        else:
            shown.append(argument)
    return shlex.join(shown)


def _secret(flag: str) -> bool:
    return flag not in NO_SECRETS and _meant(flag, SECRETS) is not None


def main(argv: list[str]) -> None:
    """Check the environment and become SGLang. Exits with status 2 where it does not start."""
    try:
        if argv not in ([], ["doctor"]):
            raise ConfigurationError(
                f"arguments {shlex.join(argv)}: the image takes none, or `doctor`. SGLang's "
                "arguments go into SGLANG_ARGS."
            )
        configuration = Configuration.from_env(os.environ)
        settings = Settings.from_env()
        model = model_of(configuration, settings)
        gigabytes = configuration.host_gigabytes(model, settings)
        planned = model is not None and gigabytes is not None
        if not configuration.cpu:
            check_gpus(configuration.ranks, visible_gpus())
        # The doctor looks at the memory of a planned pool itself.
        if gigabytes is not None and not (argv and planned):
            check_memory(gigabytes, configuration.ranks, configuration.memory_variables)
    except (ConfigurationError, SettingsError, GeometryError, UnsupportedError) as error:
        print(f"hiqcache container: {error}", file=sys.stderr)
        sys.exit(2)
    if argv:
        command = ["-m", "hiqcache.cli", "doctor"]
        if planned:
            command += ["--model", configuration.model]
            command += ["--kv-cache-dtype", configuration.kv_cache_dtype]
            command += ["--tp", str(configuration.tp), "--ranks", str(configuration.ranks)]
            command += ["--host-gb", str(gigabytes), "--page-size", str(configuration.page_size)]
    else:
        command = ["-m", "sglang.launch_server", *configuration.arguments()]
        # SGLang asks itself whether it serves, by a client that takes the container's proxies.
        os.environ.update(past_proxies())
        print(f"hiqcache container: {settings}; {masked(command)}", flush=True)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(sys.argv[1:])
