"""Shipped policies load, and a wrong file is told by file, line, key and reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy_file import load_policy, policy_schema
from deploy.yaml_settings import YamlSettingsError, parse_yaml_settings

POLICIES = Path(__file__).parents[3] / "deploy" / "policies"


@pytest.mark.parametrize("path", sorted(POLICIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_policies_load_under_their_own_name(path: Path) -> None:
    assert load_policy(path).name == path.stem


def test_the_reference_lists_every_key_with_its_default() -> None:
    assert load_policy(POLICIES / "reference.yaml") == Policy(name="reference")
    text = (POLICIES / "reference.yaml").read_text()
    keys = set(re.findall(r'"([a-z_]+)": \{', policy_schema())) & set(re.findall(r"(?m)^ *([a-z_]+):", text))
    assert keys >= {"tick_s", "slo", "ttft_ms", "min", "max", "of_ticks", "window_s", "residence_s", "dry_run"}


def test_the_published_schema_is_fresh() -> None:
    assert (POLICIES / "schema.json").read_text() == policy_schema()


@pytest.mark.parametrize(
    ("text", "line", "key", "reason"),
    [
        ("version: 1\nslo:\n  ttft_mss: 5.0\n", 3, "slo.ttft_mss", "did you mean 'ttft_ms'"),
        ("name: a\ntick_s: fast\n", 2, "tick_s", "number"),
        ("prefill:\n  min: 4\n  max: 2\n", 1, "prefill", "above max 2"),
        ("slo:\n  ttft_ms: -1.0\n", 2, "slo.ttft_ms", "greater than 0"),
        ("slo: [\n", 2, "", "is not YAML"),
        ("- a\n", 1, "", "must be a mapping"),
        ("budget:\n  replicas: 1\n", 1, "", "below prefill.min"),
    ],
)
def test_a_wrong_file_is_told_by_line_key_and_reason(text: str, line: int, key: str, reason: str) -> None:
    with pytest.raises(YamlSettingsError) as caught:
        parse_yaml_settings(Policy, text, "mine.yaml")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line, problem.key) == ("mine.yaml", line, key)
    assert reason in problem.reason
    assert str(problem).startswith(f"mine.yaml:{line}: ")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(YamlSettingsError) as caught:
        parse_yaml_settings(Policy, "tick_s: 0\nscale_up:\n  ticks: 0\n", "mine.yaml")
    assert [problem.line for problem in caught.value.problems] == [1, 3]
