"""One choice's visible text: tokens in, and out what a client may see by now, with its ids and logprobs.

What may still become a stop string or a whole character is held back. Where ids or logprobs are shown, a token comes
out only with all of its text, so in every chunk text, ids and logprobs speak of the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.v1 import common_pb2

from router.detokenizer import Detokenizer
from router.stop_strings import StopMatcher


@dataclass(slots=True)
class ShownToken:
    """A token and where its text begins and ends in the choice's text."""

    token_id: int
    logprobs: common_pb2.PositionLogprobs | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What became visible. `tokens` is empty unless tokens are kept."""

    text: str
    tokens: Sequence[ShownToken] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


NOTHING = TextDelta("")


class ChoiceText:
    """Owned by one choice of one answer. `push` tokens, `take` what is visible, `finish` at the end."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        keeps_tokens: bool = False,
        shows_stop: bool = False,
    ) -> None:
        """`shows_stop`: the stop string that ends the text is its end."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._keeps_tokens = keeps_tokens
        self._shows_stop = shows_stop
        self._tokens: deque[ShownToken] = deque()
        self._pending = ""  # text that was not taken yet
        self._num_taken = 0  # characters
        self.num_tokens = 0  # that were read: up to the one that completed a stop string
        self._is_finished = False
        self.matched_stop: str | None = None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs] = ()) -> None:
        """More tokens; those after a stop string are dropped."""
        if self._matcher is None and not self._keeps_tokens:
            self.num_tokens += len(token_ids)
            self._pending += self._detokenizer.push(token_ids)
            return
        for index, token_id in enumerate(token_ids):
            if self.matched_stop is not None:
                return
            start = self._num_taken + len(self._pending)
            piece = self._detokenizer.push((token_id,))
            self.num_tokens += 1
            self._pending += piece
            if self._keeps_tokens:
                position = logprobs[index] if index < len(logprobs) else None
                self._tokens.append(ShownToken(token_id, position, start, start + len(piece)))
            self._look_for_stop(piece)

    def finish(self) -> None:
        """No more tokens. What was held back becomes visible, unless a stop string was found."""
        if self._is_finished:
            return
        if self.matched_stop is None:
            tail = self._detokenizer.finish()
            self._pending += tail
            if self._tokens and tail:
                self._tokens[-1].end += len(tail)
            self._look_for_stop(tail)
        self._is_finished = True

    def take(self) -> TextDelta:
        """What became visible since the last call."""
        is_final = self._is_finished or self.matched_stop is not None
        # A stop string that is shown anyhow need not be told from other text before it is whole.
        num_held = 0 if is_final or self._shows_stop or self._matcher is None else self._matcher.num_held
        num_visible = len(self._pending) - num_held
        tokens: list[ShownToken] = []
        if self._keeps_tokens:
            tokens, num_visible = self._whole_tokens(num_visible, is_final)
        if num_visible == 0 and not tokens:
            return NOTHING
        text, self._pending = self._pending[:num_visible], self._pending[num_visible:]
        self._num_taken += num_visible
        return TextDelta(text, tokens)

    def _whole_tokens(self, num_visible: int, is_final: bool) -> tuple[list[ShownToken], int]:
        """The tokens whose text is visible as a whole, and how many characters that is."""
        limit = self._num_taken + num_visible
        tokens = [token for token in self._tokens if token.end <= limit]
        end = limit if is_final else max((token.end for token in tokens), default=self._num_taken)
        if end == self._num_taken and not is_final:
            return [], 0  # parts of one character: they come together with it
        for _ in tokens:
            self._tokens.popleft()
        return tokens, end - self._num_taken

    def _look_for_stop(self, piece: str) -> None:
        if self._matcher is None:
            return
        if self.num_tokens <= self._min_tokens:
            self._matcher.skip(len(piece))
            return
        match = self._matcher.push(piece)
        if match is None:
            return
        self.matched_stop = match.stop
        end = match.start + len(match.stop) if self._shows_stop else match.start
        self._pending = self._pending[: end - self._num_taken]
        # A token that lies in the stop string whole is not shown; one that begins before it ends where the text does.
        while self._tokens and self._tokens[-1].start >= end:
            self._tokens.pop()
        if self._tokens:
            self._tokens[-1].end = min(self._tokens[-1].end, end)
