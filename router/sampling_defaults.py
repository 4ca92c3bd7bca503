"""What a checkpoint says of sampling in its `generation_config.json`, for requests that say nothing of it themselves.

Off unless asked for: a request then means the same whatever model answers it, as OpenAI's document has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest, StartupError
from cluster.sampling_params import TOP_K_OFF
from router.limits import ServingLimits, chat_fields

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FILE = "generation_config.json"


def defaults_of_model(generation_config: Mapping[str, Any], limits: ServingLimits) -> dict[str, Any]:
    """By the names that requests have, as far as the file says them. Raises `StartupError` for a wrong value."""
    rules = chat_fields(limits)
    defaults: dict[str, Any] = {}
    for name in FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        if name == "top_k" and value == 0:  # as transformers says it
            value = TOP_K_OFF
        try:
            defaults[name] = rules[name].check(value, name)
        except InvalidRequest as error:
            raise StartupError(f"{FILE}: {error.message}; or start with --sampling-defaults openai") from None
    return defaults
