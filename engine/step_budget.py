"""How many prompt tokens a step may take beside decodes, so that a stream's next token comes within its objective.

    tokens = (headroom x objective - decode step) / time of one prompt token

Both times are learned from the steps themselves, so the bound follows the machine, the batch and the contexts. It is
never below one block: prompts go on however slow the decodes are. A step without decodes is bounded only where a
stream may begin in its middle: on a decode worker, whose streams' prompts come from elsewhere.
"""

from __future__ import annotations

# What one step's time may deviate from the averages.
HEADROOM = 0.85
WEIGHT = 0.1  # of the newest step in the moving averages
# Shorter prompt parts say little about the time of a token: the step's own cost hides it.
MIN_OBSERVED_TOKENS = 16


class StepBudget:
    """Used by the engine's thread."""

    def __init__(self, itl_slo_ms: float, block_tokens: int, *, binds_alone: bool = False) -> None:
        """`itl_slo_ms`: the inter-token latency that streams shall have at most, above 0. `binds_alone`: also a step
        without decodes is bounded."""
        self.binds_alone = binds_alone
        self._target_ms = HEADROOM * itl_slo_ms
        self._least = block_tokens
        self._decode_ms = 0.0
        self._token_ms = 0.0  # 0: not known yet

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens for one bounded step; a block while nothing is known."""
        if not self._token_ms:
            return self._least
        return max(self._least, int((self._target_ms - self._decode_ms) / self._token_ms))

    def saw_step(self, num_decodes: int, num_prefill_tokens: int, step_ms: float) -> None:
        """One step's rows and time; drafts are part of their decodes."""
        if not num_prefill_tokens:
            self._decode_ms = _averaged(self._decode_ms, step_ms)
        elif num_prefill_tokens >= MIN_OBSERVED_TOKENS:
            prefill_ms = step_ms - (self._decode_ms if num_decodes else 0.0)
            if prefill_ms > 0:
                self._token_ms = _averaged(self._token_ms, prefill_ms / num_prefill_tokens)


def _averaged(average: float, newest: float) -> float:
    return average + WEIGHT * (newest - average) if average else newest
