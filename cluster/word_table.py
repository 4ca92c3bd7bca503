"""Words that are one token each, so that most of a short text is looked up instead of tokenised.

    text ── findall ──> words ── in the table ──> ids
                              └─ not in it ─────> the tokenizer, word by word

Made once from the vocabulary, never from what anybody said: how long a text takes tells nothing of others' texts. What
it gives is compared with the tokenizer's own ids when it is made; where they differ there is no table.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import cast

from cluster.tokenizer import Tokenizer

# A word alone costs the tokenizer several times its share of a whole text.
MAX_UNKNOWN_SHARE = 0.2
MAX_UNKNOWN = 160  # some 0.8 ms, however long the text is
# Tokens looked at in a row, some 0.6 ms: an event loop in the same process waits for that long at most, then it runs.
_LOT, _PAUSE_S = 256, 0.0005
_TRIAL_ALPHABETS = ("ab  '", "aB1 .", "x\n\r \t", "'sSdDvVeElLmMtT ", "0123456789 a", "!?/_-\x1c\x0b ", "Ab c\x00\x7f")
_TRIALS_OF_EACH, _TRIAL_CHARS = 20, 24
_TRIAL_SENTENCE = "It's 10:45, they'll say; I'd SAY'VE  been\n\n  there\t\t(x_y = 3.14)...  "

_log = logging.getLogger(__name__)


class WordTable:
    """Owned by the prompt encoder."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str], ids: dict[str, int]) -> None:
        """`ids` by word. See `build_word_table`."""
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._ids = ids
        added = [re.escape(text) for text in tokenizer.added_tokens()]
        self._added = re.compile("|".join(added)) if added else None

    def __len__(self) -> int:
        return len(self._ids)

    def encode(
        self, text: str, max_unknown_share: float = MAX_UNKNOWN_SHARE, max_unknown: int = MAX_UNKNOWN
    ) -> list[int] | None:
        """The ids of a text without special tokens of its own; None: better asked of the tokenizer as a whole."""
        if not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        words: list[str] = self._pattern.findall(text)
        if len("".join(words)) != len(text):
            return None
        found = list(map(self._ids.get, words))
        num_unknown = found.count(None)
        if not num_unknown:
            return cast("list[int]", found)
        if num_unknown > min(max_unknown, max_unknown_share * len(words)):
            return None
        unknown = [word for word, token_id in zip(words, found, strict=True) if token_id is None]
        encoded = iter(self._tokenizer.encode_each(unknown))
        ids: list[int] = []
        for token_id in found:
            if token_id is None:
                ids.extend(next(encoded))
            else:
                ids.append(token_id)
        return ids


def build_word_table(tokenizer: Tokenizer) -> WordTable | None:
    """From the vocabulary, in about half a second and pauses; None for a tokenizer whose words `re` cannot find."""
    pattern = tokenizer.ascii_word_pattern()
    if pattern is None:
        return None
    added = tokenizer.added_tokens()
    ids: dict[str, int] = {}
    for lot in _lots(tokenizer.token_bytes):
        candidates = [
            (text, token_id)
            for token_id, spelling in lot
            if spelling.isascii() and (text := spelling.decode("ascii")) not in added and pattern.fullmatch(text)
        ]
        encoded = tokenizer.encode_each([text for text, _ in candidates])
        ids.update(item for item, own in zip(candidates, encoded, strict=True) if own == [item[1]])
        time.sleep(_PAUSE_S)
    table = WordTable(tokenizer, pattern, ids)
    if not _agrees(table, tokenizer):
        _log.warning("this tokenizer cuts words in another way than its pattern says: texts are tokenised whole")
        return None
    return table


def _agrees(table: WordTable, tokenizer: Tokenizer) -> bool:
    texts = [_TRIAL_SENTENCE, *_trials()]
    return all(
        table.encode(text, max_unknown_share=1.0) in (None, own)
        for text, own in zip(texts, tokenizer.encode_each(texts), strict=True)
    )


def _trials() -> Sequence[str]:
    chance = random.Random(1)  # noqa: S311  the same every time
    return [
        "".join(chance.choices(alphabet, k=_TRIAL_CHARS))
        for alphabet in _TRIAL_ALPHABETS
        for _ in range(_TRIALS_OF_EACH)
    ]


def _lots(spellings: Sequence[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    items = iter(enumerate(spellings))
    while lot := list(itertools.islice(items, _LOT)):
        yield lot
