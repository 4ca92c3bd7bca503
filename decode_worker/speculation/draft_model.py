"""The draft-model drafter: a small model of the same vocabulary guesses, in a KV pool of its own.

Per request it keeps the tokens whose KV is written, its own guesses among them. What the target said differently is
written anew from the first difference on: rollback is a length. It samples as the request does. For verification by
`match` it takes the noise of each token's own position: where the two models agree well, they draw the same token, at
any temperature. For `rejection` it takes noise of its own and tells what it drew from.

It knows nothing of the target but its vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.errors import StartupError
from cluster.identity import RequestId
from cluster.model_files import resolve_model
from cluster.sampling_params import NO_LOGPROBS, SamplingParams
from cluster.tokenizer import load_tokenizer
from cluster.worker_settings import WorkerSettings
from engine.draft import NO_DRAFT, Draft, DraftLaw
from engine.model_config import ModelConfig
from engine.noise import PURPOSE_DRAFT, uniforms
from engine.runner_factory import BuiltRunner, build_runner
from engine.sampler import SampleRow, SamplerState, noise_keys, row_probabilities, sample
from engine.step import ModelRunner, StepInput

# Prompt tokens read in one step of the draft model: bounds its buffers, not what it reads before it guesses.
MAX_CHUNK_TOKENS = 256


@dataclass(slots=True)
class _Context:
    """One request: what is known of it, and the tokens whose KV is written, in the order of its blocks."""

    sampler: SamplerState
    num_prompt_tokens: int
    known: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    num_right: int = 0  # of `written`: so many are known to be what the target said
    blocks: list[int] = field(default_factory=list)

    def roll_back(self) -> None:
        """Keeps the KV up to the first token that the target said differently; the last known one is always read."""
        end = min(len(self.written), len(self.known) - 1)
        while self.num_right < end and self.written[self.num_right] == self.known[self.num_right]:
            self.num_right += 1
        self.num_right = min(self.num_right, end)
        del self.written[self.num_right :]


class DraftModelDrafter:
    """Implements `draft.Drafter` and `draft.FollowsSampling`. Used by the engine thread."""

    name = "draft"

    def __init__(
        self,
        runner: ModelRunner,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int,
        *,
        draws_for_rejection: bool = False,
    ) -> None:
        """Owns the pool that `runner` writes into, of `num_blocks` blocks."""
        self._draws_for_rejection = draws_for_rejection
        self._runner = runner
        self._block_tokens = block_tokens
        self._max_tokens = min(max_model_len, num_blocks * block_tokens)
        self._free = list(range(num_blocks))
        self._contexts: OrderedDict[RequestId, _Context] = OrderedDict()  # the one that guessed longest ago first
        self.num_forward_tokens = 0

    def starts(self, request_id: RequestId, params: SamplingParams, num_prompt_tokens: int) -> None:
        state = SamplerState(replace(params, logprobs=NO_LOGPROBS), num_prompt_tokens)
        self._contexts[request_id] = _Context(state, num_prompt_tokens)

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._contexts[request_id].known.extend(token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._contexts[request_id].known.extend(token_ids)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        context = self._contexts[request_id]
        self._contexts.move_to_end(request_id)
        context.roll_back()
        num_drafts = min(num_drafts, self._max_tokens - len(context.known))
        if num_drafts < 1 or not self._cover(context, len(context.known) + num_drafts - 1):
            return NO_DRAFT
        guesses: list[int] = []
        laws: list[DraftLaw] = []
        while len(guesses) < num_drafts:
            guess = self._next(context, guesses, laws)
            if guess is None:
                break
            guesses.append(guess)
            if guess in context.sampler.params.stop_token_ids:  # ends the guessing, and nothing else
                break
        return Draft.chain(guesses, laws)

    def forget(self, request_id: RequestId) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free.extend(context.blocks)

    def num_cached(self, request_id: RequestId) -> int:
        """Tokens of a request whose KV is written, guesses included."""
        return len(self._contexts[request_id].written)

    def _next(self, context: _Context, guesses: list[int], laws: list[DraftLaw]) -> int | None:
        """Reads what is not written of the known tokens and the guesses; the token that follows them.

        Where it is drawn for rejection, its law is added to `laws`.
        """
        token_ids = [*context.known, *guesses]
        while True:
            count = min(MAX_CHUNK_TOKENS, len(token_ids) - len(context.written))
            fresh = token_ids[len(context.written) : len(context.written) + count]
            is_last = len(context.written) + count == len(token_ids)
            logits = self._runner.forward(self._step(context, fresh, is_last=is_last), None).logits
            context.written += fresh
            self.num_forward_tokens += count
            if is_last:
                break
        num_generated = len(token_ids) - context.num_prompt_tokens
        row = SampleRow(context.sampler, np.array(token_ids, np.int32), num_generated, len(guesses))
        if self._draws_for_rejection and not row.state.params.is_greedy:
            probabilities = row_probabilities(logits, row)
            if probabilities is None:
                return None
            laws.append(DraftLaw.of(probabilities))
            return laws[-1].draw(float(uniforms(1, noise_keys([row]), PURPOSE_DRAFT)[0]))
        samples = sample(logits, [row])
        return None if samples.failed else int(samples.token_ids[0])

    def _step(self, context: _Context, fresh: list[int], *, is_last: bool) -> StepInput:
        first, end = len(context.written), len(context.written) + len(fresh)
        positions = np.arange(first, end, dtype=np.int32)
        table = np.array(context.blocks, np.int32)
        return StepInput(
            token_ids=np.array(fresh, np.int32),
            positions=positions,
            slots=table[positions // self._block_tokens].astype(np.int64) * self._block_tokens
            + positions % self._block_tokens,
            query_starts=np.array([0, len(fresh)], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=table[None, : -(-end // self._block_tokens)].copy(),
            logit_rows=np.array([len(fresh) - 1] if is_last else [], np.int32),
        )

    def _cover(self, context: _Context, num_tokens: int) -> bool:
        """Blocks up to so many tokens, if need be from those who guessed longest ago."""
        missing = -(-num_tokens // self._block_tokens) - len(context.blocks)
        for other in self._contexts.values():
            if len(self._free) >= missing:
                break
            if other is not context and other.blocks:
                self._free.extend(other.blocks)
                other.blocks, other.written, other.num_right = [], [], 0
        if len(self._free) < missing:
            return False
        context.blocks += [self._free.pop() for _ in range(missing)]
        return True


def open_draft_model(settings: WorkerSettings, target: ModelConfig) -> tuple[DraftModelDrafter, BuiltRunner]:
    """The drafter and the model that it runs. Raises `StartupError` when the two vocabularies are not the same."""
    if not settings.draft_model:
        raise StartupError("speculation draft needs a model: name one with --draft-model", param="draft_model")
    own = settings.model_copy(
        update={"model": settings.draft_model, "num_kv_blocks": 0, "kv_cache_bytes": 0, "max_model_len": 0}
    )
    built = build_runner(own)
    try:
        _check_vocabulary(settings, target.vocab_size, built.config.vocab_size)
    except StartupError:
        built.memory.close()
        raise
    drafter = DraftModelDrafter(
        built.runner,
        built.memory.num_blocks,
        settings.block_tokens,
        built.max_model_len,
        draws_for_rejection=settings.verification == "rejection",
    )
    return drafter, built


def _check_vocabulary(settings: WorkerSettings, num_target: int, num_draft: int) -> None:
    if num_target != num_draft:
        raise StartupError(
            f"the draft model {settings.draft_model} has {num_draft} tokens and the model {num_target}: "
            "take one of the same vocabulary",
            param="draft_model",
        )
    target, draft = (load_tokenizer(resolve_model(path)).token_bytes for path in (settings.model, settings.draft_model))
    for token_id, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise StartupError(
                f"token {token_id} is {ours!r} in the model and {theirs!r} in the draft model {settings.draft_model}: "
                "take one of the same vocabulary",
                param="draft_model",
            )
