"""What a mock worker must answer, computed apart from any engine: tokens are arithmetic on the sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.mock_engine import POSITION_MULTIPLIER, TOKEN_MULTIPLIER

VOCAB_SIZE = 49_152  # of the default model, whose vocabulary mock workers take


def expected_tokens(prompt: Sequence[int], count: int, stop_token_ids: Collection[int] = ()) -> list[int]:
    """The `count` tokens after `prompt`, wherever and in however many parts they are generated."""
    sequence = list(prompt)
    for _ in range(count):
        token_id = (sequence[-1] * TOKEN_MULTIPLIER + len(sequence) * POSITION_MULTIPLIER) % VOCAB_SIZE
        while token_id in stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
        sequence.append(token_id)
    return sequence[len(prompt) :]
