"""`chat_template_kwargs` of a chat: of what vLLM takes there, the one switch that models are trained with.

Any other name is refused: a template's variables are the server's, and a client that sets them sets what a prompt is.
"""

from __future__ import annotations

from typing import Any

from router.field_rules import Flag, invalid_value, unsupported_parameter

ENABLE_THINKING = "enable_thinking"  # Qwen 3 and its like: false leaves the thinking out


class TemplateOptions:
    """Gives the switch, or None where it is left to the template."""

    def check(self, value: Any, param: str) -> bool | None:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object")
        if set(value) - {ENABLE_THINKING}:
            raise unsupported_parameter(param, f"only {ENABLE_THINKING} may be set")
        switch = value.get(ENABLE_THINKING)
        return None if switch is None else Flag().check(switch, f"{param}.{ENABLE_THINKING}")

    def schema(self) -> dict[str, Any]:
        # A model without the switch refuses it, so that the document allows none.
        return {"type": "object", "properties": {}, "additionalProperties": False}
