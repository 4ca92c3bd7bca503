"""When guessing pays: measured step costs, a moving acceptance, and the k that gives the most tokens a second.

Expected tokens of a step with k drafts at acceptance a: (1 - a^(k+1)) / (1 - a). Time of that step: the verification of
batch x (k + 1) rows plus k guesses. Speculation runs at the k whose ratio of the two is best, if that beats k = 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

SMOOTHING = 0.1
# What a drafter is believed to hit before anything was seen: worth a try, not a promise.
INITIAL_ACCEPTANCE = 0.6
# As often as the guesses of a model, smaller than the target, hold at best; those of a look-up may all be right.
MOST_OF_A_MODEL = 0.85
# A gain below this is noise of the cost table.
MIN_GAIN = 1.03
# What it is tried again with is this much more than what just pays: where guesses are dear, one miss ends the trial.
TRIAL_MARGIN = 0.02
COOL_DOWN_STEPS = 16
MAX_COOL_DOWN_STEPS = 256


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """Measured at start-up: the time of a step by its number of rows, and of one guess.

    Told apart by identity: it is a key of what was decided already, looked up several times a step.
    """

    rows: tuple[int, ...]  # ascending
    step_ms: tuple[float, ...]
    draft_ms: float

    def verification_ms(self, num_rows: float) -> float:
        """Between measured sizes: linear; beyond the last one: proportional to the rows."""
        if num_rows >= self.rows[-1]:
            return self.step_ms[-1] * num_rows / self.rows[-1]
        right = max(1, bisect.bisect_left(self.rows, num_rows))
        low, high = self.rows[right - 1], self.rows[right]
        share = max(0.0, (num_rows - low) / (high - low))
        return self.step_ms[right - 1] * (1 - share) + self.step_ms[right] * share


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of one step: the accepted run and the target's own token after it."""
    if acceptance >= 1:
        return num_drafts + 1.0
    return float((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))


@lru_cache(maxsize=4096)
def best_num_drafts(acceptance: float, batch_size: int, costs: StepCosts, max_drafts: int) -> int:
    """The k in [0, max_drafts] with the most tokens a second; 0 unless the gain is more than noise."""
    direct = 1 / costs.verification_ms(batch_size)

    def rate(num_drafts: int) -> float:
        step_ms = costs.verification_ms(batch_size * (num_drafts + 1)) + num_drafts * costs.draft_ms * batch_size
        return expected_tokens(acceptance, num_drafts) / step_ms

    best = max(range(1, max_drafts + 1), key=rate, default=0)
    return best if best and rate(best) > MIN_GAIN * direct else 0


@lru_cache(maxsize=256)
def least_that_pays(batch_size: int, costs: StepCosts, max_drafts: int) -> float:
    """The lowest acceptance, in hundredths, at which guessing pays in such a batch; 1 where none does."""
    hundredths = (percent / 100 for percent in range(1, 100))
    return next((each for each in hundredths if best_num_drafts(each, batch_size, costs, max_drafts)), 1.0)


def may_pay(batch_size: int, costs: StepCosts, max_drafts: int, most_acceptance: float = 1.0) -> bool:
    """Whether in such a batch anything pays at all, did guesses hold as often as they ever do. If not, nobody need be
    asked."""
    return best_num_drafts(most_acceptance, batch_size, costs, max_drafts) > 0


def best_cut(confidences: Sequence[float], batch_size: int, costs: StepCosts) -> int:
    """How many of a draft's tokens to verify, the surest first, when each knows how likely it holds.

    The guesses are made by now: what counts is the tokens of a step over its time, where everyone in the batch brings
    as many rows. A row that the weights' reading hides is worth little confidence, one that computes is worth much.
    """
    best, tokens = 0, 1.0
    best_rate = 1 / costs.verification_ms(batch_size)
    for count, confidence in enumerate(confidences, 1):
        tokens += confidence
        rate = tokens / costs.verification_ms(batch_size * (count + 1))
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def is_worth_asking(
    confidences: Sequence[float], acceptance: float, batch_size: int, costs: StepCosts, max_drafts: int
) -> bool:
    """Whether one more drafter, that is expected to hit `acceptance`, pays beside guesses as sure as `confidences`, the
    surest first. `costs` are with that drafter's guesses.

    It helps where the first guess in hand is wrong: so much of its tokens counts, and of the rows to verify.
    """
    kept = best_cut(confidences, batch_size, costs)
    tokens = 1 + sum(confidences[:kept])
    wrong = 1 - confidences[0] if kept else 1.0
    num_drafts = best_num_drafts(acceptance, batch_size, costs, max_drafts)
    more = tokens + wrong * (expected_tokens(acceptance, num_drafts) - 1)
    more_ms = costs.verification_ms(batch_size * (1 + kept + wrong * num_drafts))
    more_ms += num_drafts * costs.draft_ms * batch_size
    return more / more_ms > tokens / costs.verification_ms(batch_size * (1 + kept))


@dataclass(frozen=True, slots=True)
class GateState:
    """One request's record with one drafter."""

    acceptance: float = INITIAL_ACCEPTANCE
    cool_down: int = 0  # steps still without drafts
    next_cool_down: int = COOL_DOWN_STEPS


def num_drafts_now(state: GateState, batch_size: int, costs: StepCosts, max_drafts: int) -> tuple[int, GateState]:
    """How many drafts the next step takes, and the record after asking.

    Where guessing does not pay it is left alone for a while, each time longer, then tried again: what did not match in
    the introduction may match in the quotation. Where guesses are dear the first miss ends such a trial.
    """
    if state.cool_down > 0:
        return 0, replace(state, cool_down=state.cool_down - 1)
    best = best_num_drafts(round(state.acceptance, 2), batch_size, costs, max_drafts)
    if best > 0:
        return best, state
    if best_num_drafts(INITIAL_ACCEPTANCE, batch_size, costs, max_drafts) == 0:
        return 0, state  # the batch is too large for anyone's guesses: no fault of the drafter's
    trial = min(INITIAL_ACCEPTANCE, least_that_pays(batch_size, costs, max_drafts) + TRIAL_MARGIN)
    return 0, GateState(trial, state.next_cool_down, min(2 * state.next_cool_down, MAX_COOL_DOWN_STEPS))


def after_step(state: GateState, num_proposed: int, num_accepted: int) -> GateState:
    """The record after a verified step."""
    acceptance = after_trials(state.acceptance, num_proposed, num_accepted, SMOOTHING)
    # Now and then anybody hits: who rests for shorter again hits as often as a new one is believed to.
    next_cool_down = COOL_DOWN_STEPS if acceptance >= INITIAL_ACCEPTANCE else state.next_cool_down
    return replace(state, acceptance=acceptance, next_cool_down=next_cool_down)


def after_trials(acceptance: float, num_proposed: int, num_accepted: int, smoothing: float) -> float:
    """Each draft up to the first rejection is one trial."""
    for index in range(min(num_accepted + 1, num_proposed)):
        acceptance += smoothing * ((1.0 if index < num_accepted else 0.0) - acceptance)
    return acceptance
