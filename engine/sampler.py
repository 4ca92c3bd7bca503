"""From logits to tokens: one path for a mixed batch.

    logits ─ bias, min_tokens ─ penalties ─ constraint ─┬─ temperature 0: the largest logit
                                           └─ (l - max) / temperature ─ top-k, top-p, min-p ─ argmax of z + noise

A greedy row never touches the noise and never divides. The noise (`engine.noise`) is keyed by seed, choice, position
and token, so a row's token depends on its own logits and keys alone. The draw is exact but lazy: noise is computed
for tokens that can still win, and its logarithms for the few that may.

Shapes: logits [R, vocab] float32 on any device, changed in place; tokens come back on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import EngineFailure
from cluster.sampling_params import NO_LOGPROBS, SamplingParams
from engine import device_sampler, native_sampler
from engine.draft import DrawnGuess
from engine.grammar import GrammarState
from engine.logit_filters import drop_filtered, has_filter
from engine.logprobs import position_logprobs
from engine.noise import (
    NUM_LANES,
    PURPOSE_VERIFY,
    SMALLEST_GAP,
    NoiseKeys,
    gap,
    gumbel,
    gumbel_of_bits,
    token_bits,
    uniforms,
    vocabulary_bits,
)
from engine.penalties import PenalisedRow, TokenCounts, apply_penalties
from engine.rejection import Float64Array, draw_after_guesses, probabilities_of
from engine.request import PositionLogprobs
from engine.token_limits import NOTHING_LEFT, TokenLimits

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

# Widens the bound under which a token's noise is worked out, by more than float32 can err in exp(d - g).
BOUND_SLACK = np.float32(1.01)
NO_DISTRIBUTION = "the model gave no valid distribution (NaN or infinity)"
SMALLEST_TEMPERATURE = np.finfo(np.float32).tiny  # what is smaller would become 0 in float32


class SamplerState:
    """What sampling needs of one sequence beside its logits. Owned by the executor, one for each live sequence."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, grammar: GrammarState | None = None) -> None:
        self.params = params
        self.grammar = grammar  # of a constrained request
        self.counts = TokenCounts(num_prompt_tokens) if params.has_penalties else None
        self.bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.limits = TokenLimits(params) if params.allowed_token_ids or params.bad_words else None
        self.stop_ids = np.array(params.stop_token_ids, dtype=np.int64)
        self.has_filter = has_filter(params)
        self.temperature = max(np.float32(params.temperature), SMALLEST_TEMPERATURE)
        self.changes_logits = bool(
            params.has_penalties
            or params.logit_bias
            or (params.min_tokens > 0 and params.stop_token_ids)  # with `ignore_eos` often none
            or grammar is not None
            or self.limits is not None
        )
        self.is_plain_greedy = params.is_greedy and not self.changes_logits and params.logprobs == NO_LOGPROBS


class SampleRow(NamedTuple):
    """Row r of the logits: whose it is and where its sequence stands."""

    state: SamplerState
    token_ids: npt.NDArray[np.int32]  # the sequence so far; the sampled token's position is its length
    num_generated: int
    num_drafts: int = 0  # so many of token_ids' tail, and of num_generated, are guesses
    guesses: tuple[DrawnGuess, ...] = ()  # drawn for this very token: taken as often as the law allows


@dataclass(frozen=True, slots=True)
class Samples:
    """`token_ids` [R]; `failed[r]`: why a row has no token, its own error; `logprobs[r]` where asked for."""

    token_ids: Int64Array | npt.NDArray[np.int32]
    failed: dict[int, str]
    logprobs: dict[int, PositionLogprobs]


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], most_likely: npt.NDArray[np.int32] | None = None
) -> Samples:
    """One token for each row. A row with NaN, or without any finite logit, fails alone.

    `most_likely`: `StepOutput`'s, of these very logits.
    """
    if all(row.state.is_plain_greedy for row in rows):
        return sample_greedily(logits, most_likely)
    return _sample(logits, rows, most_likely)


def sample_greedily(logits: torch.Tensor, most_likely: npt.NDArray[np.int32] | None = None) -> Samples:
    """`sample` where every row's state is plain greedy: only its logits count. `most_likely`: `StepOutput`'s."""
    if most_likely is not None:
        failed = {row: NO_DISTRIBUTION for row, token_id in enumerate(most_likely.tolist()) if token_id < 0}
        return Samples(most_likely, failed, {})
    token_ids, is_failed, _ = _peaks(logits)
    return Samples(token_ids, _unusable(is_failed), {})


@torch.inference_mode()  # the logits may be an inference tensor, which nothing else may change in place
def _sample(logits: torch.Tensor, rows: Sequence[SampleRow], most_likely: npt.NDArray[np.int32] | None) -> Samples:
    raw_rows = [index for index, row in enumerate(rows) if row.state.params.logprobs != NO_LOGPROBS]
    raw_logits = logits[raw_rows] if raw_rows else logits[:0]  # a copy: what follows changes the logits
    _adjust(logits, rows)
    strayed = _constrain(logits, rows)
    if any(row.state.changes_logits for row in rows):
        most_likely = None
    token_ids, failed, peak_logits = _peaks(logits, most_likely)
    drawn = [index for index, row in enumerate(rows) if not row.state.params.is_greedy and not failed[index]]
    if drawn:
        # Nothing looks at the logits of all rows any more: only some rows of them are worth a copy of megabytes.
        theirs = logits if len(drawn) == len(rows) else logits[drawn]
        token_ids[drawn] = _draw(theirs, token_ids[drawn], peak_logits[drawn], [rows[index] for index in drawn])
    logprobs: dict[int, PositionLogprobs] = {}
    if raw_rows:
        chosen = torch.from_numpy(token_ids[raw_rows]).to(logits.device)
        num_top = [rows[index].state.params.logprobs for index in raw_rows]
        logprobs = dict(zip(raw_rows, position_logprobs(raw_logits, chosen, num_top), strict=True))
    return Samples(token_ids, _unusable(failed) | strayed, logprobs)


def _peaks(
    logits: torch.Tensor, most_likely: npt.NDArray[np.int32] | None = None
) -> tuple[Int64Array, npt.NDArray[np.bool_], Float32Array]:
    """For each row: the most likely token (of equal ones the first), whether the row is unusable, the largest logit.

    A NaN counts as the largest. On the host NumPy's search: with indices torch's compares one logit at a time (16 rows
    of 49,152: 0.70 ms, this 0.05).
    """
    if most_likely is not None:
        places = most_likely.astype(np.int64)
        return places, most_likely < 0, logits.numpy()[np.arange(len(places)), places]
    if logits.is_cuda:
        values, indices = logits.max(dim=-1)
        token_ids, peak_logits = indices.cpu().numpy().copy(), values.cpu().numpy()
    else:
        on_host: Float32Array = logits.numpy()
        token_ids = on_host.argmax(axis=-1)
        peak_logits = on_host[np.arange(len(on_host)), token_ids]
    return token_ids, ~np.isfinite(peak_logits), peak_logits


def _adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Bias, min_tokens and penalties, in place, for the rows that have any."""
    penalised = []
    for index, row in enumerate(rows):
        state = row.state
        if state.bias_ids.size:
            logits[index, torch.from_numpy(state.bias_ids)] += torch.from_numpy(state.bias_values).to(logits.device)
        if row.num_generated < state.params.min_tokens and state.stop_ids.size:
            logits[index, torch.from_numpy(state.stop_ids)] = -torch.inf
        if state.counts is not None:
            counts = state.counts.ahead() if row.num_drafts else state.counts
            counts.read(row.token_ids)
            penalised.append(PenalisedRow(index, counts, state.params))
    if penalised:
        apply_penalties(logits, penalised)


def _constrain(logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, str]:
    """Forbids, in place, what a row's constraint does not allow next. Gives the rows that failed, and why."""
    strayed: dict[int, str] = {}
    for index, row in enumerate(rows):
        grammar, limits, forbidden = row.state.grammar, row.state.limits, None
        if grammar is None and limits is None:
            continue
        if grammar is not None:
            try:
                forbidden = grammar.forbidden(row.token_ids, row.num_drafts)
            except EngineFailure as error:
                strayed[index] = error.message
                continue
        if not torch.isfinite(logits[index].max()):  # a mask must not hide that the model is broken
            strayed[index] = NO_DISTRIBUTION
        elif forbidden is not None:
            logits[index].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
        elif limits is not None:
            limits.forbid(logits[index], row.token_ids, row.num_generated)
            if not torch.isfinite(logits[index].max()):
                strayed[index] = NOTHING_LEFT
    return strayed


def _unusable(failed: npt.NDArray[np.bool_]) -> dict[int, str]:
    return dict.fromkeys(failed.nonzero()[0].tolist(), NO_DISTRIBUTION)


def _draw(
    logits: torch.Tensor, peak_ids: Int64Array, peak_logits: Float32Array, rows: Sequence[SampleRow]
) -> Int64Array:
    """Samples rows with a temperature above 0. The largest logit is subtracted first, so that none can overflow."""
    keys = noise_keys(rows)
    if logits.is_cuda:
        return draw_on_device(logits, peak_logits, rows)
    scaled = _scaled(logits, peak_logits, rows)
    token_ids = (native_sampler.gumbel_argmax if native_sampler.is_usable() else gumbel_argmax)(scaled, peak_ids, keys)
    for index, numbers in _verifying_numbers(rows, keys).items():
        token_ids[index] = draw_after_guesses(probabilities_of(scaled[index]), rows[index].guesses, numbers)
    return token_ids


def draw_on_device(logits: torch.Tensor, peak_logits: Float32Array, rows: Sequence[SampleRow]) -> Int64Array:
    """The same tokens drawn where the logits are: only ids come to the host."""
    keys = noise_keys(rows)
    temperatures = np.array([row.state.temperature for row in rows], np.float32)
    scaled = device_sampler.scale_and_filter(logits, peak_logits, temperatures, [row.state.params for row in rows])
    token_ids = device_sampler.draw(scaled, keys)
    numbers = _verifying_numbers(rows, keys)
    if numbers:
        guessed = list(numbers)
        guesses = [rows[index].guesses for index in guessed]
        token_ids[guessed] = device_sampler.draw_guessed(scaled[guessed], guesses, list(numbers.values()))
    return token_ids


def _verifying_numbers(rows: Sequence[SampleRow], keys: NoiseKeys) -> dict[int, Float64Array]:
    """For each row below which guesses were drawn: the numbers that decide about them, and one to draw with."""
    return {
        index: uniforms(len(row.guesses) + 1, keys.rows(np.array([index])), PURPOSE_VERIFY)
        for index, row in enumerate(rows)
        if row.guesses
    }


def noise_keys(rows: Sequence[SampleRow]) -> NoiseKeys:
    """Whose noise the rows' next tokens take."""
    return NoiseKeys(
        np.array([row.state.params.seed for row in rows], dtype=np.uint64),
        np.array([row.state.params.choice_index for row in rows], dtype=np.uint64),
        np.array([len(row.token_ids) for row in rows], dtype=np.uint64),
    )


@torch.inference_mode()
def row_probabilities(logits: torch.Tensor, row: SampleRow) -> Float64Array | None:
    """The law [vocab] that `sample` draws this one row from, None where there is none; for who guesses by it."""
    _adjust(logits, (row,))
    _, failed, peak_logits = _peaks(logits)
    return None if failed[0] else probabilities_of(_scaled(logits, peak_logits, (row,))[0])


def _scaled(logits: torch.Tensor, peak_logits: Float32Array, rows: Sequence[SampleRow]) -> Float32Array:
    """Temperature and filters, on the host."""
    scaled: Float32Array = logits.cpu().numpy()  # changed in place
    (_scale_natively if native_sampler.is_usable() else _scale)(scaled, peak_logits, [row.state for row in rows])
    return scaled


def _scale(scaled: Float32Array, peak_logits: Float32Array, states: Sequence[SamplerState]) -> None:
    """Temperature and filters, in place: a row at a time stays in the core's cache."""
    for index, state in enumerate(states):
        scaled[index] -= peak_logits[index]
        if state.temperature != 1.0:
            with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, which is right
                scaled[index] /= state.temperature
        if state.has_filter:
            drop_filtered(scaled[index], state.params)


def _scale_natively(scaled: Float32Array, peak_logits: Float32Array, states: Sequence[SamplerState]) -> None:
    native_sampler.scale_and_filter(
        scaled,
        peak_logits,
        np.array([state.temperature for state in states], np.float32),
        np.array([state.params.top_k for state in states], np.int32),
        np.array([state.params.top_p for state in states], np.float64),
        np.array([state.params.min_p for state in states], np.float64),
    )


def gumbel_argmax(scaled: Float32Array, peak_ids: Int64Array, keys: NoiseKeys) -> Int64Array:
    """argmax over tokens of scaled + noise, for each row of `scaled` [S, vocab] whose largest value is 0 at `peak_ids`.

    A tie goes to the lower token id.
    """
    peak_noise = gumbel(peak_ids, keys).astype(np.float32)
    winners = [_winner(scaled[row], peak_noise[row], keys.rows(np.array([row]))) for row in range(len(scaled))]
    return np.array(winners, dtype=np.int64)


def _winner(scaled: Float32Array, peak_noise: np.float32, key: NoiseKeys) -> int:
    """One row's argmax, with noise only where it can matter.

    Exact: token i can beat the peak m only if noise_i >= noise_m - scaled_i, and noise_i <= -ln(1 - u_i), so it needs
    1 - u_i <= exp(scaled_i - noise_m). On average 1 / p(m) tokens pass, and only these need logarithms.
    """
    bounds = np.exp(scaled - peak_noise)
    bounds *= BOUND_SLACK
    can_win = bounds >= np.float32(SMALLEST_GAP)
    if np.count_nonzero(can_win) * NUM_LANES > len(scaled):
        bits = vocabulary_bits(len(scaled), key)
        token_ids = np.flatnonzero(gap(bits) <= bounds)
        bits = bits[token_ids]
    else:
        token_ids = np.flatnonzero(can_win)
        bits = token_bits(token_ids, key)
        passes = gap(bits) <= bounds[token_ids]
        token_ids, bits = token_ids[passes], bits[passes]
    scores = scaled[token_ids].astype(np.float64) + gumbel_of_bits(bits)
    return int(token_ids[scores.argmax()])
