"""Policy files: a `Policy` from YAML, and the JSON Schema that editors check one with."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.autoscaler.policy import Policy
from deploy.yaml_settings import load_yaml_settings


def load_policy(path: Path) -> Policy:
    """The policy in `path`. Raises `YamlSettingsError` with every problem: file, line, key and reason."""
    return load_yaml_settings(Policy, path)


def policy_schema() -> str:
    """The schema as it is published in `deploy/policies/schema.json`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"
