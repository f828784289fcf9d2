"""What every test stands on."""

from __future__ import annotations

import os


def test_tests_run_behind_a_proxy_that_reaches_nothing() -> None:
    assert os.environ["http_proxy"] == os.environ["HTTP_PROXY"] == "http://127.0.0.1:9"
    assert not {"no_proxy", "NO_PROXY"} & set(os.environ)
