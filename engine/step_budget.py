"""How many prompt tokens a step may take beside decodes, so that a stream's next token comes within its objective.

    tokens = (headroom x objective - decode step) / time of one prompt token at its place in the prompt

Both times are learned from the steps themselves, so the bound follows the machine, the batch and the contexts. A token
deep in a prompt attends to more: its time is taken as a line over its position, whose slope is learned slowly and whose
height fast. The bound is never below one block: prompts go on however slow the decodes are. A step without decodes is
bounded only where a stream may begin in its middle: on a decode worker, whose streams' prompts come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.step_plan import ScheduledChunk

# What one step's time may deviate from the averages.
HEADROOM = 0.85
WEIGHT = 0.1  # of the newest step in the moving averages
SLOPE_WEIGHT = 0.02  # of the newest step in the slope: about the parts of one long prompt
# Positions that hardly vary say nothing of the slope: a spread below this many tokens is taken for noise.
NOISE_TOKENS = 128.0
# Shorter prompt parts say little about the time of a token: the step's own cost hides it.
MIN_OBSERVED_TOKENS = 16
LEAST_SHARE = 0.05  # of a step's time for prompts, as others are told, while the time of a token is not known


class StepBudget:
    """Used by the engine's thread; `prefill_share` by any."""

    def __init__(self, itl_slo_ms: float, block_tokens: int, *, binds_alone: bool = False) -> None:
        """`itl_slo_ms`: the inter-token latency that streams shall have at most, above 0. `binds_alone`: also a step
        without decodes is bounded."""
        self.binds_alone = binds_alone
        self._target_ms = HEADROOM * itl_slo_ms
        self._least = block_tokens
        self._decode_ms = 0.0
        self._num_decodes = 0.0  # in the steps of that average
        self._token = _TokenTime()

    def prefill_tokens(self, num_decodes: int, position: int) -> int:
        """Prompt tokens from this position on for a bounded step with these decodes; a block while nothing is known."""
        token_ms, slope = self._token.at(position), self._token.slope
        if not token_ms:
            return self._least
        left_ms = self._target_ms - self._decodes_ms(num_decodes)
        own_tokens = max(0.0, left_ms / token_ms)  # that its last ones attend to as well
        return max(self._least, int(left_ms / (token_ms + slope * own_tokens / 2)))

    @property
    def prefill_share(self) -> float:
        """What prompts get of the time of steps with decodes, above 0: a prompt takes its time alone over this."""
        share = 1 - self._decode_ms / self._target_ms
        least_ms = self._least * self._token.mean_ms
        return max(share, least_ms / (least_ms + self._decode_ms) if least_ms else LEAST_SHARE)

    def saw_step(self, chunks: Iterable[ScheduledChunk], step_ms: float) -> None:
        """One step's rows and time; drafts are part of their decodes."""
        num_decodes = num_tokens = 0
        positions = 0.0
        for chunk in chunks:
            if chunk.num_tokens == 1:
                num_decodes += 1
            else:
                num_tokens += chunk.num_tokens
                positions += chunk.num_tokens * (chunk.first_token + chunk.num_tokens / 2)
        if not num_tokens:
            self._decode_ms = _averaged(self._decode_ms, step_ms)
            self._num_decodes = _averaged(self._num_decodes, num_decodes)
        elif num_tokens >= MIN_OBSERVED_TOKENS:
            prefill_ms = step_ms - (self._decodes_ms(num_decodes) if num_decodes else 0.0)
            if prefill_ms > 0:
                self._token.saw(positions / num_tokens, prefill_ms / num_tokens)

    def _decodes_ms(self, num_decodes: int) -> float:
        """While one prompt follows another no step is of decodes alone, and more of them may have come since: each is
        then taken to cost as much as those. Fewer are taken to cost the same: most of a step is the weights'."""
        return self._decode_ms * max(1.0, num_decodes / self._num_decodes if self._num_decodes else 1.0)


class _TokenTime:
    """The time of a prompt token by its position: a line through a moving average."""

    def __init__(self) -> None:
        self.mean_ms = 0.0  # 0: not known yet
        self.slope = 0.0  # ms for each token before it
        self._mean_position = 0.0
        # Over a longer time, for the slope.
        self._long_ms = self._long_position = self._covariance = self._variance = 0.0

    def at(self, position: float) -> float:
        """Never below a quarter of the average: a line goes anywhere."""
        return max(self.mean_ms + self.slope * (position - self._mean_position), self.mean_ms / 4)

    def saw(self, position: float, token_ms: float) -> None:
        if not self.mean_ms:
            self._mean_position, self._long_position, self._long_ms = position, position, token_ms
        self.mean_ms = _averaged(self.mean_ms, token_ms)
        self._mean_position += WEIGHT * (position - self._mean_position)
        off_position, off_ms = position - self._long_position, token_ms - self._long_ms
        self._long_position += SLOPE_WEIGHT * off_position
        self._long_ms += SLOPE_WEIGHT * off_ms
        kept = 1 - SLOPE_WEIGHT
        self._covariance = kept * (self._covariance + SLOPE_WEIGHT * off_position * off_ms)
        self._variance = kept * (self._variance + SLOPE_WEIGHT * off_position * off_position)
        self.slope = max(0.0, self._covariance / (self._variance + NOISE_TOKENS * NOISE_TOKENS))


def _averaged(average: float, newest: float) -> float:
    return average + WEIGHT * (newest - average) if average else newest
