"""The load generator's options: each a flag of Locust's command line and a LOAD_ variable."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loadtest.telemetry import PORT
from loadtest.workloads import (
    WORKLOADS,
    Chat,
    Conversation,
    SharedPrefix,
    Trace,
    Workload,
    poisson,
)
from loadtest.workloads.base import ANY_MODEL

logger = logging.getLogger("hiqcache.load")

ARMS = "bf16=http://127.0.0.1:30000,int8=http://127.0.0.1:30001"


class OptionsError(ValueError):
    """An option whose value cannot be used; the text names it."""


class Option(NamedTuple):
    """One option; ``name`` gives its flag (--name) and its variable (LOAD_NAME)."""

    name: str
    default: str | int | float
    text: str
    choices: tuple[str, ...] | None = None


OPTIONS = (
    Option("arms", ARMS, "name=url of each server, separated by commas; all get the same load"),
    Option("workload", SharedPrefix.name, "what to send", tuple(kind.name for kind in WORKLOADS)),
    Option("model", ANY_MODEL, "the model's name in requests: SGLang takes any, a router does not"),
    Option("seed", 0, "fixes every prompt and their order"),
    Option("requests", 0, "conversations per arm and load process; 0: no end"),
    Option("rate", 0.0, "Poisson arrivals per second and arm; 0: each user sends when it can"),
    Option("think_time", 0.0, "seconds a user waits between two requests"),
    Option("request_timeout", 120.0, "seconds after which a request is given up"),
    Option("output_tokens", 32, "length of an answer (chat: at most)"),
    Option("groups", 32, "shared-prefix: number of prefixes"),
    Option("prefix_tokens", 2048, "shared-prefix: length of a prefix"),
    Option("suffix_tokens", 32, "shared-prefix: length of a request's own part"),
    Option(
        "choice", "uniform", "shared-prefix: how groups are drawn", ("uniform", "zipf", "dealt")
    ),
    Option("zipf_exponent", 1.0, "shared-prefix: how hot the hottest groups are"),
    Option("turns", 4, "chat: turns of a conversation"),
    Option("systems", 4, "chat: number of system prompts"),
    Option("system_words", 400, "chat: length of a system prompt"),
    Option("question_words", 40, "chat: length of a question"),
    Option("trace", "", "trace: a file in Mooncake's JSONL format"),
    Option("speed", 1.0, "trace: how many times faster than recorded"),
    Option("max_input_tokens", 0, "trace: longer prompts are cut; 0: none is"),
    Option("max_output_tokens", 0, "trace: longer answers are cut; 0: none is"),
    Option("result_file", "", "write the run's figures here, as JSON, when it ends"),
    Option("metrics_address", "127.0.0.1", "where /metrics listens"),
    Option("metrics_port", PORT, "port of /metrics"),
)


def add_arguments(parser: Any) -> None:
    """Add the options to Locust's parser."""
    for option in OPTIONS:
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            env_var=f"LOAD_{option.name.upper()}",
            default=option.default,
            type=type(option.default),
            choices=option.choices,
            help=f"{option.text} [{option.default}]",
        )


def arms_of(options: Namespace) -> dict[str, str]:
    """``--arms`` as name → base URL. Raises OptionsError."""
    arms: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in options.arms.split(","))):
        name, equals, url = part.partition("=")
        if not equals or not name or urlsplit(url).scheme not in ("http", "https"):
            raise OptionsError(
                f"--arms {options.arms!r}: {part!r} is not of the form name=http://host:port."
            )
        if name in arms:
            raise OptionsError(f"--arms {options.arms!r}: {name!r} is there twice.")
        arms[name] = url.rstrip("/")
    if not arms:
        raise OptionsError("--arms names no server: give name=http://host:port.")
    return arms


def workload_of(options: Namespace) -> Workload:
    """The workload that the options describe. Raises OptionsError."""
    try:
        if options.workload == SharedPrefix.name:
            return SharedPrefix(
                seed=options.seed,
                groups=options.groups,
                prefix_tokens=options.prefix_tokens,
                suffix_tokens=options.suffix_tokens,
                output_tokens=options.output_tokens,
                choice=options.choice,
                zipf_exponent=options.zipf_exponent,
            )
        if options.workload == Chat.name:
            return Chat(
                seed=options.seed,
                systems=options.systems,
                system_words=options.system_words,
                question_words=options.question_words,
                turns=options.turns,
                output_tokens=options.output_tokens,
            )
        return _trace_of(options)
    except (ValueError, OSError) as error:
        raise OptionsError(f"--workload {options.workload}: {error}") from error


def conversations_of(options: Namespace, stream: int) -> Iterator[Conversation]:
    """The conversations that load process number ``stream`` has with one arm.

    Raises OptionsError.
    """
    workload = workload_of(options)
    conversations = workload.conversations(stream)
    if options.rate < 0 or options.requests < 0 or options.think_time < 0:
        raise OptionsError("--rate, --requests and --think-time must not be below 0.")
    if options.request_timeout <= 0:
        raise OptionsError(f"--request-timeout {options.request_timeout:g}: must be above 0.")
    if options.rate:
        if isinstance(workload, Trace):
            raise OptionsError("--rate contradicts --workload trace, which has its own times.")
        return poisson(conversations, options.rate, workload.rng("arrivals", stream))
    return conversations


def _trace_of(options: Namespace) -> Trace:
    if not options.trace:
        raise OptionsError("--trace is needed: a file in Mooncake's JSONL format.")
    trace = Trace(
        path=Path(options.trace),
        seed=options.seed,
        speed=options.speed,
        max_input_tokens=options.max_input_tokens or None,
        max_output_tokens=options.max_output_tokens or None,
    )
    # Read now: a bad file stops the start, and not the run.
    logger.info("%s: %d requests", trace.path, len(trace.lines))
    return trace
