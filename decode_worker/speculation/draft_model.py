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
from typing import NamedTuple

import numpy as np
import torch

from cluster.errors import StartupError
from cluster.identity import RequestId
from cluster.model_files import resolve_model
from cluster.sampling_params import NO_LOGPROBS, SamplingParams
from cluster.tokenizer import load_tokenizer
from cluster.worker_settings import WorkerSettings
from engine.draft import Draft, DraftLaw
from engine.model_config import ModelConfig
from engine.noise import PURPOSE_DRAFT, uniforms
from engine.runner_factory import BuiltRunner, build_runner
from engine.sampler import SampleRow, SamplerState, noise_keys, row_probabilities, sample
from engine.step import ModelRunner, StepInput

# Tokens read in one step of the draft model: bounds its buffers, not what it reads before it guesses.
MAX_CHUNK_TOKENS = 256


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
class _Chain:
    """The guesses of one request in the step at hand."""

    context: _Context
    num_drafts: int
    guesses: list[int] = field(default_factory=list)
    laws: list[DraftLaw] = field(default_factory=list)
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_ended or len(self.guesses) >= self.num_drafts

    @property
    def token_ids(self) -> list[int]:
        return [*self.context.known, *self.guesses]

    def sample_row(self) -> SampleRow:
        token_ids = np.array(self.token_ids, np.int32)
        num_generated = len(token_ids) - self.context.num_prompt_tokens
        return SampleRow(self.context.sampler, token_ids, num_generated, len(self.guesses))

    def add(self, token_id: int | None, law: DraftLaw | None = None) -> None:
        """A token that would end the request ends the guessing, and nothing else."""
        if token_id is not None:
            self.guesses.append(token_id)
        if law is not None:
            self.laws.append(law)
        self.has_ended = token_id is None or token_id in self.context.sampler.params.stop_token_ids


class _Part(NamedTuple):
    """What one chain brings to a step of the draft model; the last part of it gives a guess."""

    chain: _Chain
    fresh: list[int]
    is_last: bool


class DraftModelDrafter:
    """Implements `draft.Drafter`, `draft.FollowsSampling` and `draft.GuessesTogether`. Used by the engine thread."""

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
        return self.propose_all([(request_id, num_drafts)])[0]

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        chains: list[_Chain] = []
        group: list[_Chain] = []  # whose blocks are there at once
        for request_id, num_drafts in wanted:
            context = self._contexts[request_id]
            self._contexts.move_to_end(request_id)
            context.roll_back()
            chain = _Chain(context, min(num_drafts, self._max_tokens - len(context.known)))
            chains.append(chain)
            if chain.is_done:
                continue
            if not self._cover(chain, group) and group:
                self._guess(group)
                group = []
            if self._cover(chain, group):
                group.append(chain)
        self._guess(group)
        return [Draft.chain(chain.guesses, chain.laws) for chain in chains]

    def forget(self, request_id: RequestId) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free.extend(context.blocks)

    def num_cached(self, request_id: RequestId) -> int:
        """Tokens of a request whose KV is written, guesses included."""
        return len(self._contexts[request_id].written)

    def _guess(self, group: Sequence[_Chain]) -> None:
        """Reads what is not written of the known tokens and the guesses, and guesses on, all of them in each step."""
        while going_on := [chain for chain in group if not chain.is_done]:
            parts: list[_Part] = []
            budget = MAX_CHUNK_TOKENS
            for chain in going_on:
                num_written = len(chain.context.written)
                fresh = chain.token_ids[num_written : num_written + budget]
                if fresh:
                    parts.append(_Part(chain, fresh, num_written + len(fresh) == len(chain.token_ids)))
                    budget -= len(fresh)
            logits = self._runner.forward(self._step(parts), None).logits
            for part in parts:
                part.chain.context.written += part.fresh
                self.num_forward_tokens += len(part.fresh)
            if read := [part.chain for part in parts if part.is_last]:
                self._draw(logits, read)

    def _draw(self, logits: torch.Tensor, chains: Sequence[_Chain]) -> None:
        """The next guess of each chain from its row of the logits; where it is for rejection, its law, too."""
        rows = [chain.sample_row() for chain in chains]
        is_drawn = [self._draws_for_rejection and not row.state.params.is_greedy for row in rows]
        coupled = [index for index, drawn in enumerate(is_drawn) if not drawn]
        if coupled:
            samples = sample(logits if len(coupled) == len(rows) else logits[coupled], [rows[i] for i in coupled])
            for place, (index, token_id) in enumerate(zip(coupled, samples.token_ids.tolist(), strict=True)):
                chains[index].add(None if place in samples.failed else token_id)
        for index in (index for index, drawn in enumerate(is_drawn) if drawn):
            probabilities = row_probabilities(logits[index : index + 1], rows[index])
            if probabilities is None:
                chains[index].add(None)
                continue
            law = DraftLaw.of(probabilities)
            uniform = uniforms(1, noise_keys([rows[index]]), PURPOSE_DRAFT)[0]
            chains[index].add(law.draw(float(uniform)), law)

    def _step(self, parts: Sequence[_Part]) -> StepInput:
        token_ids = [token_id for part in parts for token_id in part.fresh]
        starts = np.cumsum([0, *(len(part.fresh) for part in parts)], dtype=np.int32)
        firsts = [len(part.chain.context.written) for part in parts]
        ends = [first + len(part.fresh) for first, part in zip(firsts, parts, strict=True)]
        positions = np.concatenate([np.arange(*span, dtype=np.int32) for span in zip(firsts, ends, strict=True)])
        tables = np.zeros((len(parts), -(-max(ends) // self._block_tokens)), np.int32)
        for row, part in enumerate(parts):
            blocks = part.chain.context.blocks[: tables.shape[1]]
            tables[row, : len(blocks)] = blocks
        owners = np.repeat(np.arange(len(parts)), np.diff(starts))
        return StepInput(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            slots=tables[owners, positions // self._block_tokens].astype(np.int64) * self._block_tokens
            + positions % self._block_tokens,
            query_starts=starts,
            context_lens=np.array(ends, np.int32),
            block_tables=tables,
            logit_rows=np.array(
                [end - 1 for end, part in zip(starts[1:], parts, strict=True) if part.is_last], np.int32
            ),
        )

    def _cover(self, chain: _Chain, group: Sequence[_Chain]) -> bool:
        """Blocks for all that the chain may write, if need be from those outside `group` who guessed longest ago."""
        context = chain.context
        num_tokens = len(context.known) + chain.num_drafts - 1
        missing = -(-num_tokens // self._block_tokens) - len(context.blocks)
        spared = [other.context for other in group]
        for other in self._contexts.values():
            if len(self._free) >= missing:
                break
            if other is not context and other.blocks and other not in spared:
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
        update={
            "model": settings.draft_model,
            "num_kv_blocks": 0,
            "kv_cache_bytes": 0,
            "max_model_len": 0,
            "tensor_parallel": 1,  # small: it would wait for its ranks more than compute
        }
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
