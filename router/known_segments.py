"""Token ids of what was tokenised before: earlier turns and a system prompt come again with each request.

    <|im_start|> │ system … │ <|im_end|> │ user … │ <|im_end|> …      special tokens cut a text into segments

A tokenizer cuts there first and looks at each segment by itself, so equal segments have equal ids wherever they stand.
That is tried when this is made; a tokenizer for which it does not hold (one that strips spaces beside special tokens,
say) is asked for whole texts. Bounded: the segment that was not used for longest goes first. What one owner said never
makes another one's request faster. Used on the event loop only.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.tokenizer import Tokenizer

# Of text, each segment with what it takes beside it; with the ids about three times as many bytes.
MAX_CHARS = 8_000_000
CHARS_OF_A_SEGMENT = 100
_TRIAL_SEGMENTS = ("", "a", " a", "  a", "\na", "user\nHow are you?", "don't", "1 234", " \n\n ", "ä\u0301 日本")

_log = logging.getLogger(__name__)

Segment = tuple[bytes, str]  # whose, and its text


@dataclass(frozen=True, slots=True)
class Segments:
    """A text between its special tokens. An item is the ids, or the text of a segment that has to be tokenised."""

    owner: bytes
    items: Sequence[Sequence[int] | str]

    @property
    def missing(self) -> list[str]:
        return [item for item in self.items if isinstance(item, str)]

    @property
    def num_missing_chars(self) -> int:
        return sum(map(len, self.missing))


class KnownSegments:
    """Owned by the prompt encoder."""

    def __init__(self, tokenizer: Tokenizer, max_chars: int = MAX_CHARS) -> None:
        self._special = tokenizer.special_tokens_that_cut()
        self._max_chars = max_chars
        self._known: OrderedDict[Segment, array[int]] = OrderedDict()
        self._num_chars = 0
        names = sorted(self._special, key=len, reverse=True)
        self._cuts = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        if self._cuts is not None and not self._holds_for(tokenizer):
            _log.warning("this tokenizer does not cut at its special tokens: conversations are tokenised whole")
            self._cuts = None

    def split(self, text: str, owner: bytes) -> Segments:
        """The text's segments, known ones as their ids."""
        if self._cuts is None:
            return Segments(owner, (text,))
        items: list[Sequence[int] | str] = []
        for index, piece in enumerate(self._cuts.split(text)):
            if index % 2:  # what the pattern itself matched
                items.append((self._special[piece],))
            elif piece:
                items.append(self._look_up((owner, piece)))
        return Segments(owner, items)

    def join(self, segments: Segments, encoded: Sequence[Sequence[int]]) -> list[int]:
        """All ids; `encoded` are those of the missing segments in order, which are known from now on."""
        token_ids: list[int] = []
        rest = iter(encoded)
        for item in segments.items:
            if isinstance(item, str):
                ids = next(rest)
                self._remember((segments.owner, item), ids)
                token_ids.extend(ids)
            else:
                token_ids.extend(item)
        return token_ids

    def _look_up(self, segment: Segment) -> Sequence[int] | str:
        known = self._known.get(segment)
        if known is None:
            return segment[1]
        self._known.move_to_end(segment)
        return known

    def _remember(self, segment: Segment, token_ids: Sequence[int]) -> None:
        num_chars = len(segment[1]) + CHARS_OF_A_SEGMENT
        if self._cuts is None or segment in self._known or num_chars > self._max_chars:
            return
        self._known[segment] = array("i", token_ids)
        self._num_chars += num_chars
        while self._num_chars > self._max_chars:
            (_, dropped), _ids = self._known.popitem(last=False)
            self._num_chars -= len(dropped) + CHARS_OF_A_SEGMENT

    def _holds_for(self, tokenizer: Tokenizer) -> bool:
        """Whether segments have the same ids alone and between special tokens."""
        return all(
            _parts(tokenizer, self._special, [before, name, after])
            == tokenizer.encode(before + name + after, add_special_tokens=False)
            for name in self._special
            for before, after in zip(_TRIAL_SEGMENTS, reversed(_TRIAL_SEGMENTS), strict=True)
        )


def _parts(tokenizer: Tokenizer, special: Mapping[str, int], pieces: Sequence[str]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        ids += [special[piece]] if piece in special else tokenizer.encode(piece, add_special_tokens=False)
    return ids
