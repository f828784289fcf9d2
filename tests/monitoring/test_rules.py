"""Prometheus's configuration and rules, and the tests of the rules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
RULES = [
    rule
    for file in sorted((MONITORING / "rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
RECORDS = sorted({rule["record"] for rule in RULES if "record" in rule})
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def rule_tests() -> list[dict[str, Any]]:
    """Every expression test of monitoring/rule-tests."""
    return [
        test
        for file in sorted((MONITORING / "rule-tests").glob("*.yml"))
        for case in yaml.safe_load(file.read_text())["tests"]
        for test in case["promql_expr_test"]
    ]


@pytest.mark.monitoring
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"],
        ["test", "rules", "rule-tests/recording.yml", "rule-tests/alerts.yml"],
    ],
    ids=["configuration", "rules"],
)
def test_promtool(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_expressions_parse(rule: dict[str, Any]) -> None:
    promql_parser.parse(rule["expr"])


@pytest.mark.parametrize("record", RECORDS)
def test_every_recorded_series_has_a_rule_test_with_values(record: str) -> None:
    named = [test for test in rule_tests() if re.search(rf"\b{re.escape(record)}\b", test["expr"])]
    assert any(test["exp_samples"] for test in named)


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_is_tested_firing_and_not_firing(alert: str) -> None:
    cases = [
        case
        for case in yaml.safe_load((MONITORING / "rule-tests" / "alerts.yml").read_text())["tests"]
        if f'"{alert}"' in str(case["promql_expr_test"])
    ]
    assert cases
    for case in cases:
        samples = [str(test["exp_samples"]) for test in case["promql_expr_test"]]
        assert any(f'"{alert}"' in text for text in samples)
        assert any(f'"{alert}"' not in text for text in samples)


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_says_what_it_means_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 100
