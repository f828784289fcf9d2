"""Locust's entry point: users that hold a workload's conversations with one arm each.

    locust -f loadtest/locustfile.py --arms bf16=http://…,int8=http://… --headless -u 8 -t 2m

Every arm gets the same conversations in the same order; users are spread over arms evenly. With
Locust's workers, each process has a stream of its own, and the master exports the metrics of all.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import gevent  # type: ignore[import-untyped]
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import STATE_RUNNING, MasterRunner, WorkerRunner

# Locust puts a file's folder, not the repository, on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loadtest import options as load_options
from loadtest import web_page
from loadtest.streaming import Sample, direct_session, send
from loadtest.summary import Summary
from loadtest.telemetry import Telemetry
from loadtest.workloads import Conversation

logger = logging.getLogger("hiqcache.load")

#: A user whose request failed waits this long, so that a dead arm is not hammered.
FAILURE_PAUSE_S = 1.0

PROGRESS_EVERY_S = 10.0


class Feed:
    """One arm's conversations, handed to whichever user is free."""

    def __init__(self, conversations: Iterator[Conversation], limit: int) -> None:
        self._conversations = itertools.islice(conversations, limit or None)
        self._start = time.monotonic()
        self.late = 0

    def next(self) -> Conversation:
        """The next conversation, once it is due. Raises StopUser after the last."""
        conversation = next(self._conversations, None)
        if conversation is None:
            raise StopUser
        if conversation.at is not None:
            wait = self._start + conversation.at - time.monotonic()
            # Late by more than a scheduling hiccup: too few users for the arrival rate.
            self.late += wait < -0.1
            gevent.sleep(max(0.0, wait))
        return conversation


class Load:
    """This process's part of a load: feeds for its users, and what became of their requests."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.arms = load_options.arms_of(self.options)
        load_options.conversations_of(self.options, 0)
        self.is_worker = isinstance(environment.runner, WorkerRunner)
        self.telemetry = Telemetry()
        self.summary = Summary()
        self.unsent: list[Sample] = []
        self.feeds: dict[str, Feed] = {}
        self.users: Counter[str] = Counter()

    @property
    def options(self) -> Namespace:
        """Locust's options, as the command line and then the web page left them."""
        options: Namespace | None = self.environment.parsed_options
        assert options is not None, "Locust parses options before it makes an environment"
        return options

    def start(self) -> None:
        """Begin a run: every arm's conversations from their first."""
        self.summary = Summary()
        self.feeds = {}
        # Options may have changed on the web page.
        self.arms = load_options.arms_of(self.options)
        stream = max(0, getattr(self.environment.runner, "worker_index", 0))
        for arm in self.arms:
            conversations = load_options.conversations_of(self.options, stream)
            self.feeds[arm] = Feed(conversations, self.options.requests)
            self.telemetry.expect(self.options.workload, arm)
        self.telemetry.running.labels(self.options.workload).set(1)

    def stop(self) -> None:
        """End a run; writes the result file where one was asked for."""
        self.telemetry.running.labels(self.options.workload).set(0)
        if self.options.result_file and not self.is_worker:
            late = {arm: feed.late for arm, feed in self.feeds.items()}
            result = {
                "options": {
                    option.name: getattr(self.options, option.name)
                    for option in load_options.OPTIONS
                    if option.name not in ("result_file", "metrics_address", "metrics_port")
                },
                "users": self.options.num_users,
                "started_late": late,
                "arms": self.summary.to_dict(),
            }
            path = Path(self.options.result_file)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def join(self) -> str:
        """The arm for a new user: the one with the fewest."""
        arm = min(self.arms, key=lambda name: self.users[name])
        self.users[arm] += 1
        return arm

    def record(self, sample: Sample) -> None:
        """Take in a sample; a worker passes it on to the master with its next report."""
        # A response time of None keeps a failure out of Locust's own averages.
        self.environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type=sample.arm,
            name=sample.workload,
            response_time=sample.e2e * 1000 if sample.outcome == "ok" else None,
            response_length=0,
            exception=None if sample.outcome == "ok" else f"{sample.outcome}: {sample.detail}",
            context={},
        )
        if self.is_worker:
            self.unsent.append(sample)
        else:
            self.observe(sample)

    def observe(self, sample: Sample) -> None:
        """Count a sample of this process or of a worker."""
        self.telemetry.observe(sample)
        self.summary.add(sample)

    def watch(self) -> None:
        """Keep the gauges, log progress, and end a run whose users have all finished."""
        runner = self.environment.runner
        assert runner is not None
        reported = time.monotonic()
        while True:
            gevent.sleep(0.5)
            self.telemetry.users.set(runner.user_count)
            if runner.state != STATE_RUNNING:
                continue
            if time.monotonic() - reported > PROGRESS_EVERY_S:
                reported = time.monotonic()
                logger.info(self.summary.progress())
            if runner.user_count == 0:
                logger.info("every conversation has been held. %s", self.summary.progress())
                if self.options.headless:
                    runner.quit()
                else:
                    runner.stop()


class ArmUser(User):
    """Holds conversations with one arm, one after the other."""

    def wait_time(self) -> float:
        return float(load(self.environment).options.think_time)

    def on_start(self) -> None:
        self.arm = load(self.environment).join()
        self.session = direct_session()

    def on_stop(self) -> None:
        load(self.environment).users[self.arm] -= 1
        self.session.close()

    @task
    def converse(self) -> None:
        """Hold one conversation, to its end or its first failure."""
        current = load(self.environment)
        if self.arm not in current.feeds:
            raise StopUser
        turns = current.feeds[self.arm].next().turns
        request = next(turns)
        while True:
            sample = send(
                self.session,
                current.arms[self.arm],
                self.arm,
                current.options.workload,
                request,
                current.options.request_timeout,
                current.options.model,
            )
            current.record(sample)
            if sample.outcome != "ok":
                gevent.sleep(FAILURE_PAUSE_S)
                return
            try:
                request = turns.send(sample.text)
            except StopIteration:
                return
            gevent.sleep(current.options.think_time)


_LOADS: WeakKeyDictionary[Environment, Load] = WeakKeyDictionary()


def load(environment: Environment) -> Load:
    """The load that runs in ``environment``."""
    return _LOADS[environment]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _arguments(parser: Any) -> None:
    load_options.add_arguments(parser)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _init(environment: Environment, runner: Any, web_ui: Any, **_: Any) -> None:
    try:
        current = Load(environment)
    except load_options.OptionsError as error:
        raise SystemExit(f"load: {error}") from error
    _LOADS[environment] = current
    if isinstance(runner, WorkerRunner):
        _listen(environment.events.report_to_master, functools.partial(_report, current))
        return
    if isinstance(runner, MasterRunner):
        _listen(environment.events.worker_report, functools.partial(_reported, current))
    current.telemetry.serve(current.options.metrics_address, current.options.metrics_port)
    gevent.spawn(current.watch)
    if web_ui:
        web_page.extend(web_ui, lambda: current.summary.table())


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _start(environment: Environment, **_: Any) -> None:
    try:
        load(environment).start()
    except load_options.OptionsError as error:
        # Given on the web page. Without feeds every user ends at once, and with them the run.
        logger.error("the load cannot start: %s", error)


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _stop(environment: Environment, **_: Any) -> None:
    load(environment).stop()


def _listen(hook: Any, listener: Any) -> None:
    hook.add_listener(listener)


def _report(current: Load, data: dict[str, Any], **_: Any) -> None:
    data["samples"] = [sample.to_dict() for sample in current.unsent]
    current.unsent.clear()


def _reported(current: Load, data: dict[str, Any], **_: Any) -> None:
    for sample in data.get("samples", ()):
        current.observe(Sample.from_dict(sample))
