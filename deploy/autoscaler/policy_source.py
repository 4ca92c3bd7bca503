"""The policy file while a cluster runs: read again when it changes; a wrong one is told once and the old one stays."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy_file import load_policy
from deploy.yaml_settings import YamlSettingsError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """What reading the file again brought. `problems` is empty when the new policy is in force."""

    policy: Policy
    problems: tuple[str, ...] = ()  # each: file:line: key: reason


class PolicySource:
    """Owned by the autoscaler, which asks once a tick."""

    def __init__(self, path: Path) -> None:
        """Raises `YamlSettingsError` when the first policy is wrong: a cluster must not start on a guess."""
        self._path = path
        self._stamp = _stamp(path)
        self.policy = load_policy(path)

    def refresh(self) -> PolicyChange | None:
        """None while the file is as it was."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            changed = load_policy(self._path)
        except YamlSettingsError as error:
            problems = tuple(map(str, error.problems))
            _log.error("the new policy is wrong, the old one stays: %s", "; ".join(problems))
            return PolicyChange(self.policy, problems)
        if changed == self.policy:
            return None
        self.policy = changed
        _log.info("policy %s is in force", changed.name)
        return PolicyChange(changed)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Differs after an edit in place, a rename over it, and a removal."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
