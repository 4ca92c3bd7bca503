"""What an engine does not take, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ContextLengthExceeded, InvalidRequest, TandemError
from engine.request import EngineLimits
from engine.request_check import check_request
from tests.engine.engine_bench import make_request

LIMITS = EngineLimits(max_model_len=32)


def check(prompt: list[int], *, has_grammars: bool = False, **fields: Any) -> int:
    return check_request(make_request("r0", prompt, **fields), 50, LIMITS, has_grammars=has_grammars, speculator=None)


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "param"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([1, 50], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([1, 2], {"num_generated": 2}, InvalidRequest, "num_generated"),
        ([1, 2, 3], {"num_generated": 2, "max_tokens": 2}, InvalidRequest, "num_generated"),
        ([1], {"json_schema": "{}"}, InvalidRequest, "response_format"),
        ([1], {"speculation": "medusa"}, InvalidRequest, "speculation"),
        ([1], {"temperature": 3.0}, InvalidRequest, "temperature"),
        ([1] * 32, {}, ContextLengthExceeded, "prompt"),
    ],
)
def test_what_is_wrong_is_named(
    prompt: list[int], fields: dict[str, Any], error: type[TandemError], param: str
) -> None:
    with pytest.raises(error) as caught:
        check(prompt, **fields)
    assert caught.value.param == param


def test_the_longest_life_is_bounded_by_request_and_context() -> None:
    """The last token's KV is never needed; a prefill worker's request ends after one token."""
    assert check([1, 2, 3], max_tokens=5) == 7
    assert check([1, 2, 3], max_tokens=500) == 31
    assert check([1, 2, 3], max_tokens=5, hold_blocks=True, speculation="eagle") == 3
    assert check([1, 2, 3, 4], max_tokens=5, num_generated=2) == 6
    assert check([1], json_schema="{}", has_grammars=True, max_tokens=1) == 1
