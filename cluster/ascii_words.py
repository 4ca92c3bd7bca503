"""How a tokenizer cuts plain ASCII text into words, as a pattern of Python's own, where that can be said.

A byte-level BPE cuts a text into words first and looks at each by itself. Its pattern speaks of Unicode's letters and
digits; of ASCII text `re` can say the same, which finds a word in a tenth of the time. None for every other kind.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+"
# Each digit is cut out before the rest is looked at, so what stands before one stands at an end.
_GPT2_SINGLE_DIGITS = rf"[0-9]|{_CONTRACTIONS}| ?[a-zA-Z]+| ?[^\sa-zA-Z0-9]+|\s+(?![^\s0-9])|\s+"
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")


def ascii_word_pattern(backend: TokenizerBackend) -> re.Pattern[str] | None:
    """What `findall` cuts ASCII text without added tokens as the backend does."""
    if not _leaves_ascii_alone(backend.normalizer):
        return None
    source = _source(_steps(backend.pre_tokenizer))
    if source is None:
        return None
    try:
        return re.compile(source, re.ASCII)
    except re.error:  # a pattern that only the backend's engine knows
        return None


def _leaves_ascii_alone(normalizer: Any) -> bool:
    return normalizer is None or json.loads(normalizer.__getstate__())["type"] == "NFC"


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    described: dict[str, Any] = json.loads(pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = described.get("pretokenizers", [described])
    return steps


def _source(steps: list[dict[str, Any]]) -> str | None:
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    is_cut_by_gpt2 = steps[-1]["use_regex"]
    match steps[:-1]:
        case [] if is_cut_by_gpt2:
            return _GPT2
        case [{"type": "Digits", "individual_digits": True}] if is_cut_by_gpt2:
            return _GPT2_SINGLE_DIGITS
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}]:
            return None if is_cut_by_gpt2 else _of_ascii(pattern)
    return None


def _of_ascii(pattern: str) -> str | None:
    r"""`\p{L}` and `\p{N}` as ASCII's own, within a class and outside; None where others are spoken of."""
    within = _CLASS.sub(lambda found: _replaced(found.group(), "a-zA-Z", "0-9"), pattern)
    everywhere = _replaced(within, "[a-zA-Z]", "[0-9]")
    return None if r"\p" in everywhere or r"\P" in everywhere else everywhere


def _replaced(part: str, letters: str, digits: str) -> str:
    return part.replace(r"\p{L}", letters).replace(r"\p{N}", digits)
