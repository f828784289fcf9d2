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


TESTS = {
    file.stem: yaml.safe_load(file.read_text())["tests"]
    for file in sorted((MONITORING / "rule-tests").glob("*.yml"))
}


def rule_tests() -> list[dict[str, Any]]:
    """Every expression test of monitoring/rule-tests."""
    return [test for cases in TESTS.values() for case in cases for test in case["promql_expr_test"]]


def metrics_of(expression: str) -> set[str]:
    """The metrics that servers export and ``expression`` reads, through any recorded series."""
    found: set[str] = set()
    for name in re.findall(r"(?<![\w:.$])([a-zA-Z_][\w]*(?::\w+)*)(?=[{\[]|\s|\)|$)", expression):
        recorded = [rule["expr"] for rule in RULES if rule.get("record") == name]
        if recorded:
            found |= set().union(*(metrics_of(inner) for inner in recorded))
        elif name == "up" or name.startswith(("sglang:", "hiqcache_", "smg_")):
            found.add(name)
    return found


@pytest.mark.monitoring
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"],
        ["test", "rules", *(f"rule-tests/{name}.yml" for name in sorted(TESTS))],
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
    cases = [case for case in TESTS["alerts"] if f'"{alert}"' in str(case["promql_expr_test"])]
    assert cases
    for case in cases:
        samples = [str(test["exp_samples"]) for test in case["promql_expr_test"]]
        assert any(f'"{alert}"' in text for text in samples)
        assert any(f'"{alert}"' not in text for text in samples)


def test_the_metrics_behind_an_expression_are_found() -> None:
    assert metrics_of(ALERTS["HiQCacheArmDown"]["expr"]) == {"up"}
    assert metrics_of(ALERTS["HiQCacheRestoreSlowerThanRecompute"]["expr"]) == {
        "hiqcache_restore_seconds_sum",
        "hiqcache_restore_tokens_total",
        "sglang:per_stage_req_latency_seconds_sum",
        "sglang:realtime_tokens_total",
    }
    for alert in ALERTS.values():
        assert metrics_of(alert["expr"])


@pytest.mark.parametrize("case", TESTS["ordinary"], ids=lambda case: case["name"])
@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_has_its_data_in_the_ordinary_cases_and_stays_silent(
    alert: str, case: dict[str, Any]
) -> None:
    fed = {re.split(r"[{ ]", row["series"])[0] for row in case["input_series"]}
    assert metrics_of(ALERTS[alert]["expr"]) <= fed
    (test,) = case["promql_expr_test"]
    assert test["exp_samples"] == []
    # Any alert that fired at any time of the case counts.
    asked = 'count by (alertname, arm) (count_over_time(ALERTS{alertstate="firing"}[100m]))'
    assert test["expr"] == asked


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_says_what_it_means_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 100
