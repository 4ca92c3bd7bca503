"""One sequence in the engine: its tokens, how far its KV is, its blocks, where it stands in its life.

             admit                 last token, stop, error, cancel
    WAITING ───────> RUNNING ────────────────────────────────────> FINISHED
       ^                │                      └─(hold_blocks)──> HELD ─ release ─> FINISHED
       └────preempt─────┘

There is no prefill phase and no decode phase: a step moves `num_computed` towards `num_tokens`, and a step that gets
there samples the next token. Draft tokens to verify lie behind `num_tokens` for one step: only that step's chunk says
how many count, so whoever is preempted or skipped has none.
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cluster.identity import BlockRef
from cluster.sampling_params import NO_LOGPROBS
from engine.draft import NO_DRAFT, ROOT, Draft
from engine.prefix_cache import PrefixChain
from engine.request import EngineRequest, PositionLogprobs

if TYPE_CHECKING:  # the mock engine runs without it
    from engine.grammar import CompiledGrammar

NEVER_REFUSED = -1
OrderKey = tuple[float, int]  # lower runs first; the arrival number tells equals apart


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"  # finished, its blocks kept until the worker releases them
    FINISHED = "finished"


class Sequence:
    """Owned by the engine thread."""

    def __init__(
        self,
        request: EngineRequest,
        chain: PrefixChain,
        max_model_len: int,
        arrival_index: int,
        arrival_s: float,
        grammar: Future[CompiledGrammar] | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar  # of a constrained request: scheduled once it is compiled
        self.chain = chain
        self.arrival_index = arrival_index
        self.arrival_s = arrival_s
        self.order_key: OrderKey = (arrival_index, arrival_index)  # the scheduler's policy sets it, once
        self.state = SequenceState.WAITING
        self.blocks: list[BlockRef] = []
        self.num_computed = 0  # tokens whose KV is written
        self.num_tokens = len(request.token_ids)
        self.num_prompt_tokens = self.num_tokens - request.num_generated
        # `max_tokens` counts what was generated elsewhere, too; a prefill worker's sequence ends after one token.
        self.max_length = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        if request.hold_blocks:
            self.max_length = self.num_tokens + 1
        self._tokens = np.zeros(max(self.max_length, self.num_tokens), dtype=np.int32)
        self._tokens[: self.num_tokens] = request.token_ids
        self.last_token_id = int(request.token_ids[-1])
        self.cached_tokens = 0  # prefix tokens that were found, at the first admission
        self.has_output = False
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.draft = NO_DRAFT  # of the step that was last verified: a chunk says how much of it counts now
        self.num_preemptions = 0
        self.num_overtaken = 0  # admissions that passed it by while it did not fit
        self.refused_at_available = NEVER_REFUSED  # no use in trying again before more blocks are available
        self.has_asked_tiers = False  # whether the lower tiers were asked for its prefix since it started (over)
        self.first_scheduled_s: float | None = None
        if request.landed is not None:
            self._land()

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far."""
        return self._tokens[: self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def max_kv_tokens(self) -> int:
        """KV tokens at the end of the longest life: the last token's KV is never needed."""
        return self.max_length - 1

    @property
    def may_have_drafts(self) -> bool:
        """Once it has a token of its own, from here or landed; a prefill worker's sequence ends before that."""
        return self.num_generated > self.request.num_generated and not self.request.hold_blocks

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until they are given, with the first token; a migrated or landed request got them from elsewhere."""
        request = self.request
        is_wanted = request.sampling.prompt_logprobs != NO_LOGPROBS
        return is_wanted and not self.has_output and request.num_generated == 0 and request.landed is None

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.last_token_id = token_id

    def put_draft(self, draft: Draft) -> None:
        """Lays guesses behind the last token, for the step that verifies them."""
        self.draft = draft
        self._tokens[self.num_tokens : self.num_tokens + len(draft)] = draft.token_ids

    def token_ids_ahead(self, num_drafts: int) -> npt.NDArray[np.int32]:
        """Prompt, output and the first `num_drafts` of this step's drafts, in their order."""
        return self._tokens[: self.num_tokens + num_drafts]

    def token_ids_to(self, node: int) -> npt.NDArray[np.int32]:
        """Prompt, output and what leads to one of this step's drafts, itself included; ROOT leads nowhere."""
        if node == ROOT or self.draft.is_chain:
            return self.token_ids_ahead(node + 1)
        return np.append(self.token_ids, np.array(self.draft.path(node), np.int32))

    def restart(self) -> list[BlockRef]:
        """Back to the state before any KV, tokens kept. Gives the blocks, which are the caller's to release."""
        blocks, self.blocks = self.blocks, []
        self.num_computed = 0
        self.chain.restart()
        self.has_asked_tiers = False
        self.prompt_logprobs.clear()
        return blocks

    def _land(self) -> None:
        landed = self.request.landed
        if landed is None:
            raise ValueError("no prompt landed for this request")
        self.blocks = list(landed.blocks)
        self.num_computed = self.num_tokens
        self.cached_tokens = landed.cached_tokens
        self.append(landed.first_token_id)
