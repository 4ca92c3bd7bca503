"""What the accuracy gate reads by default: English that is on every machine with Python, and prompts of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

CHAT_PROMPTS = (
    "Explain what a semaphore is to somebody who cooks for a living.",
    "List five things to check before a long bicycle tour.",
    "Why do leaves change their colour in autumn?",
    "Write a short letter to a neighbour whose dog barks at night.",
    "What is the difference between weather and climate?",
    "Give me a plan for learning to touch-type in four weeks.",
    "Summarise how a bill becomes a law in a parliament of two chambers.",
    "How much is 17 times 24? Show the steps.",
)
JSON_PROMPTS = (
    'Answer with one JSON object and nothing else, such as {"city": "Rome", "country": "Italy"}: where is the Louvre?',
    'Answer with one JSON object and nothing else, such as {"name": "Ada", "age": 36}: Ben is 41 years old.',
    'Answer with one JSON object and nothing else, such as {"colour": "green"}: which colour is a ripe lemon?',
    'Answer with one JSON object and nothing else, such as {"sum": 7}: what is 19 plus 4?',
)


class NotEnoughText(ValueError):
    """The text is too short for the lengths that were asked for."""


def read_texts(path: Path | None, encode: Callable[[str], Sequence[int]], count: int, length: int) -> list[list[int]]:
    """`count` pieces of `length` tokens that do not overlap, from a file, or from Python's own manual.

    Raises `NotEnoughText`.
    """
    tokens = encode(_python_manual() if path is None else path.read_text(encoding="utf-8"))
    if len(tokens) < count * length:
        raise NotEnoughText(
            f"{path or 'the built-in text'} has {len(tokens)} tokens, {count} pieces of {length} need {count * length}"
        )
    stride = len(tokens) // count
    return [list(tokens[piece * stride : piece * stride + length]) for piece in range(count)]


def _python_manual() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))
