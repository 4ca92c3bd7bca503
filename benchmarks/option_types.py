"""What the benchmarks' options take: lists of numbers and of names, refused by argparse with what is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from engine.native_library import usable_isas


def counts(text: str) -> list[int]:
    """Whole numbers above 0 with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers above 0 with commas between them")
    return [int(part) for part in parts]


def counts_or_none(text: str) -> list[int]:
    """The same, or an empty text for none of them."""
    return counts(text) if text else []


def names_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of `choices`, with commas between them."""

    def names(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        unknown = [part for part in parts if part not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r} here: choose from {', '.join(choices)}")
        return parts

    return names


def instruction_set(text: str) -> str:
    """One that this processor runs; empty: the engine's own choice."""
    usable = usable_isas()
    if text and text not in usable:
        raise argparse.ArgumentTypeError(f"{text!r} does not run here: choose from {', '.join(usable)}")
    return text
