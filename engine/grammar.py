"""Constrained output in the sampler: which tokens may come next in one sequence.

    CompiledGrammar   shared by all requests with the same constraint
    GrammarState      one sequence's place in it; follows the tokens that count, and looks ahead along guesses

The place is a function of the generated tokens alone: a sequence that was preempted, moved to another worker or landed
from a prefill worker reads its tokens again and stands where it stood.
"""

from __future__ import annotations

import llguidance
import numpy as np
import numpy.typing as npt

from cluster.errors import EngineFailure


class CompiledGrammar:
    """A grammar at its start. Safe to use from several threads: each sequence gets a copy (about 5 µs)."""

    def __init__(self, start: llguidance.LLMatcher, end_ids: frozenset[int], vocab_size: int) -> None:
        self._start = start
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def begin(self, num_prompt_tokens: int) -> GrammarState:
        return GrammarState(self._start.deep_copy(), self._end_ids, self._vocab_size, num_prompt_tokens)


class GrammarState:
    """Owned by the executor, one for each live sequence with a constraint."""

    def __init__(
        self, matcher: llguidance.LLMatcher, end_ids: frozenset[int], vocab_size: int, num_prompt_tokens: int
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._num_read = num_prompt_tokens  # what the grammar is about begins after the prompt

    def forbidden(self, token_ids: npt.NDArray[np.int32], num_drafts: int) -> npt.NDArray[np.bool_] | None:
        """For each token, whether it must not follow `token_ids`, the last `num_drafts` of them guesses.

        None where the guesses themselves leave the grammar: their row is never reached, for the row before refuses
        them. A grammar that is fulfilled allows the end tokens; one that allows nothing else ends there.
        Raises `EngineFailure` when the tokens are not of this grammar, or it became too large to follow.
        """
        num_known = len(token_ids) - num_drafts
        self._read(token_ids[self._num_read : num_known])
        guesses = token_ids[num_known:].tolist()
        if any(token_id in self._end_ids for token_id in guesses):
            return None
        num_followed = self._matcher.try_consume_tokens(guesses) if guesses else 0
        try:
            return self._forbidden_here() if num_followed == num_drafts else None
        finally:
            if num_followed:
                self._matcher.rollback(num_followed)

    def _read(self, fresh: npt.NDArray[np.int32]) -> None:
        for token_id in fresh.tolist():
            if token_id not in self._end_ids and not self._matcher.consume_token(token_id):
                raise EngineFailure(f"token {token_id} does not follow the constraint: {self._reason()}")
        self._num_read += len(fresh)

    def _forbidden_here(self) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise EngineFailure(f"the constraint cannot be followed any further: {self._reason()}")
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return ~allowed

    def _reason(self) -> str:
        """The library's message is followed by a dump of its state."""
        return self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
