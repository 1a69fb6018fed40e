"""deploy/monitoring/alert-rules.yaml, by Prometheus' own promtool: where each rule fires, and where it does not (alert_rules.yaml)."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.packages import ROOT

RULES = ROOT / "deploy" / "monitoring" / "alert-rules.yaml"
CASES = Path(__file__).with_name("alert_rules.yaml")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}


def promtool(*args: str) -> tuple[int, str]:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_rules_are_valid_and_fire_where_they_must() -> None:
    assert promtool("check", "rules", str(RULES))[0] == 0
    status, said = promtool("test", "rules", str(CASES))
    assert status == 0, said


def test_each_rule_has_cases_of_both_kinds() -> None:
    fires: dict[str, set[bool]] = {name: set() for name in ALERTS}
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            fires[case["alertname"]].add(bool(case["exp_alerts"]))
    assert len(ALERTS) == 10 and set(map(frozenset, fires.values())) == {frozenset((True, False))}, fires


def test_rules_that_never_fire_are_noticed(tmp_path: Path) -> None:
    """The cases can fail."""
    rules = [{**rule, "expr": "vector(0) > 1"} for rule in ALERTS.values()]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tandem", "rules": rules}]}))
    (tmp_path / "cases.yaml").write_text(CASES.read_text().replace(f"../../{RULES.relative_to(ROOT)}", "rules.yaml"))
    status, said = promtool("test", "rules", str(tmp_path / "cases.yaml"))
    assert status != 0 and all(f"alertname: {name}" in said for name in ALERTS), said
