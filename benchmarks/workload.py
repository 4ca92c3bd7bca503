"""What arrives: prompts, answer lengths and classes, all drawn from a seed before the run.

A prompt is token ids (`/v1/completions`) or chat messages (`/v1/chat/completions`). Token prompts are laid out in
blocks: a block's tokens depend on (seed, block id) alone, so prompts that name the same leading blocks share exactly
that prefix, and another seed shares nothing with it. This file knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.arrivals import FloatArray
from benchmarks.traces import TraceRequest, shareable_tokens

# Ids that stand for ordinary text in every vocabulary from 32k entries on: above bytes and control tokens.
DEFAULT_TOKEN_RANGE = (1_000, 30_000)
# Block ids of prompts that share nothing start here, above every id that a trace uses.
PRIVATE_BLOCK_BASE = 1 << 40
DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request as it is meant to be sent. Exactly one of `token_ids` and `messages` is set."""

    index: int
    intended_s: float  # since the start of the run; a closed loop ignores it
    output_tokens: int
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    traffic_class: str = DEFAULT_CLASS
    # Leading prompt tokens that an earlier request of this run has too: what an ideal prefix cache would hold.
    # None: not known (a chat template may begin every prompt alike).
    shareable_tokens: int | None = 0
    session: int = -1  # -1: stands alone
    turn: int = 0


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Token counts: uniform integers in [low, high]; low == high is a constant."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths run from {self.low} to {self.high}, must be 1 <= low <= high")

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape. A share `hit_rate` of each prompt is one of `num_prefixes` common prefixes."""

    input_tokens: LengthLaw
    output_tokens: LengthLaw
    hit_rate: float = 0.0
    num_prefixes: int = 4
    traffic_class: str = DEFAULT_CLASS
    token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE

    def __post_init__(self) -> None:
        if not 0.0 <= self.hit_rate < 1.0:
            raise ValueError(f"hit_rate is {self.hit_rate}, must be in [0, 1): a prompt has at least one new token")


def plan_synthetic(
    workload: Workload, times_s: FloatArray, seed: int, content_seed: int | None = None
) -> list[PlannedRequest]:
    """One request for each arrival time. `seed` draws lengths and which prefix is shared, `content_seed` the tokens.

    Two runs of one seed with different contents ask for the same work of a server that may have cached the first run.
    """
    content = seed if content_seed is None else content_seed
    rng = np.random.default_rng((seed, 1))
    count = len(times_s)
    inputs = workload.input_tokens.draw(rng, count)
    outputs = workload.output_tokens.draw(rng, count)
    prefixes = rng.integers(0, workload.num_prefixes, count)
    longest_seen: dict[int, int] = {}
    plan = []
    for index in range(count):
        num_tokens, prefix = int(inputs[index]), int(prefixes[index])
        num_shared = int(num_tokens * workload.hit_rate)
        # A common prefix is one long block, cut to length: a longer prompt's prefix begins with a shorter one's.
        shared = block_token_ids(content, prefix, num_shared, workload.token_range)
        private = block_token_ids(content, PRIVATE_BLOCK_BASE + index, num_tokens - num_shared, workload.token_range)
        plan.append(
            PlannedRequest(
                index=index,
                intended_s=float(times_s[index]),
                output_tokens=int(outputs[index]),
                token_ids=shared + private,
                traffic_class=workload.traffic_class,
                shareable_tokens=min(num_shared, longest_seen.get(prefix, 0)),
            )
        )
        longest_seen[prefix] = max(num_shared, longest_seen.get(prefix, 0))
    return plan


def plan_trace(
    trace: Sequence[TraceRequest], time_factor: float, seed: int, token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE
) -> list[PlannedRequest]:
    """A trace's requests at `time_factor` times its gaps, with prompts that share what the trace's block ids share."""
    if not time_factor > 0:
        raise ValueError(f"time_factor is {time_factor}, must be above 0")
    return [
        PlannedRequest(
            index=index,
            intended_s=request.time_s * time_factor,
            output_tokens=request.output_tokens,
            token_ids=trace_token_ids(request, index, seed, token_range),
            shareable_tokens=num_shareable,
        )
        for index, (request, num_shareable) in enumerate(zip(trace, shareable_tokens(trace), strict=True))
    ]


def trace_token_ids(
    request: TraceRequest, index: int, seed: int, token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE
) -> tuple[int, ...]:
    """The prompt of one trace request; the last block is cut to the prompt's length."""
    if not request.block_ids:
        return block_token_ids(seed, PRIVATE_BLOCK_BASE + index, request.input_tokens, token_range)
    token_ids: list[int] = []
    for block_id in request.block_ids:
        missing = request.input_tokens - len(token_ids)
        token_ids.extend(block_token_ids(seed, block_id, min(missing, request.block_tokens), token_range))
    # Rounding of scaled lengths may leave a few tokens that no block covers.
    rest = request.input_tokens - len(token_ids)
    return (*token_ids, *block_token_ids(seed, PRIVATE_BLOCK_BASE + index, rest, token_range))


def block_token_ids(seed: int, block_id: int, num_tokens: int, token_range: tuple[int, int]) -> tuple[int, ...]:
    """The first `num_tokens` tokens of a block; a longer cut of the same block begins with a shorter one."""
    if num_tokens <= 0:
        return ()
    generator = np.random.Generator(np.random.Philox(key=[seed, block_id]))
    # Drawn as doubles: one draw a token, so that a longer cut extends a shorter one.
    low, high = token_range
    drawn = low + (generator.random(num_tokens) * (high - low)).astype(np.int64)
    return tuple(drawn.tolist())


def merged(plans: Iterable[Sequence[PlannedRequest]]) -> list[PlannedRequest]:
    """Several classes of traffic as one plan, in order of time and numbered anew."""
    requests = sorted((request for plan in plans for request in plan), key=lambda request: request.intended_s)
    return [replace(request, index=index) for index, request in enumerate(requests)]


def shareable_fraction(plan: Iterable[PlannedRequest]) -> float:
    """Share of the plan's prompt tokens that an ideal, initially empty prefix cache would serve."""
    requests = list(plan)
    total = sum(len(request.token_ids) for request in requests)
    return sum(request.shareable_tokens or 0 for request in requests) / total if total else 0.0
