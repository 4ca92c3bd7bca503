"""Which versions are warned about."""

from __future__ import annotations

import pytest

from cluster.redis_version import known_faults


@pytest.mark.parametrize(
    ("server_info", "named"),
    [
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, ""),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, "CVE-2025-49844"),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.4"}, ""),
        ({"redis_version": "7.2.4"}, "CVE-2025-49844"),
        ({"redis_version": "8.6.2"}, "CVE-2026-23479"),
        ({"redis_version": "8.6.3"}, ""),
        ({"redis_version": "6.0.16"}, "CVE-2025-49844"),
        ({"redis_version": "odd"}, "cannot be read"),
        ({}, "cannot be read"),
    ],
)
def test_s_b14_vulnerable_versions_are_named(server_info: dict[str, str], named: str) -> None:
    faults = known_faults(server_info)
    assert (named in faults) if named else (faults == "")
