"""A tab of Locust's web page with what Locust itself does not measure: times at the token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flask import Response, request

_KEY = "tokens"
_COLUMNS = (
    ("name", "Workload / arm"),
    *(
        (f"{name}_p{percent}", f"{name.upper()} p{percent} (ms)")
        for name in ("ttft", "tpot", "itl", "e2e")
        for percent in (50, 95)
    ),
    ("output_tokens", "Output tokens"),
    ("l1_share", "Prompt from L1 (%)"),
    ("l2_share", "Prompt from L2 (%)"),
    ("failed", "Failed"),
)


def extend(web_ui: Any, rows: Callable[[], list[dict[str, Any]]]) -> None:
    """Add the tab to Locust's ``web_ui``; ``rows`` is asked whenever the page asks for figures."""
    web_ui.template_args["extended_tabs"] = [{"title": "Tokens", "key": _KEY}]
    web_ui.template_args["extended_tables"] = [
        {"key": _KEY, "structure": [{"key": key, "title": title} for key, title in _COLUMNS]}
    ]

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def add_rows(response: Response) -> Response:
        if request.path.rstrip("/").endswith("/stats/requests") and response.is_json:
            figures = {**response.get_json(), "extended_stats": [{"key": _KEY, "data": rows()}]}
            response.set_data(json.dumps(figures))
        return response
