"""Progress and time left, from the plan's estimate and this run's own pace."""

from __future__ import annotations

import time


class Progress:
    """Counts estimated seconds as they are worked off.

    deadline: a time.monotonic() after which nothing more should be started; None: never.
    """

    def __init__(self, estimated_s: float, deadline: float | None = None) -> None:
        self._left = estimated_s
        self._done = 0.0
        self._started = time.monotonic()
        self._deadline = deadline

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def seconds_left(self) -> float:
        """The remaining estimate, at the pace so far."""
        pace = (time.monotonic() - self._started) / self._done if self._done else 1.0
        return max(0.0, self._left) * pace

    def done(self, estimated_s: float) -> None:
        """A step that was estimated at ``estimated_s`` is over."""
        self._done += estimated_s
        self._left -= estimated_s

    def say(self, step: str) -> None:
        """Print what comes next."""
        elapsed = time.monotonic() - self._started
        print(f"[{elapsed:5.0f} s, about {self.seconds_left:5.0f} s left] {step}", flush=True)
