"""What one worker can do before the routers have measured it: from `pd_plan.json`, which `tandem plan` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cluster.errors import StartupError
from deploy.autoscaler.capacity import CapacityModel

PLAN_FILE = "pd_plan.json"
SCHEMA = "tandem.pd_plan"

_MODEL = TypeAdapter(CapacityModel)


def planned_model(policy_file: Path) -> CapacityModel | None:
    """The plan's model when one lies beside the policy, as `tandem plan --out` leaves them; None without a plan.

    Raises `StartupError` for a file of that name that is no plan: the user meant it to count.
    """
    path = policy_file.parent / PLAN_FILE
    if not path.is_file():
        return None
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {plan.get('schema')!r}, not {SCHEMA!r}")
        return _MODEL.validate_python(plan["model"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        reason = str(error).splitlines()[0] or type(error).__name__
        raise StartupError(f"{path} is no plan of `tandem plan` ({reason}): make it again, or move it away") from None
