"""Tests of what is measured and shown. `make monitoring-test` runs those marked monitoring."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "monitoring: needs Debian's prometheus package and `npm ci` in monitoring/; some start "
        "servers",
    )
