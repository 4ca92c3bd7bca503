"""A step on a real model: arrays, forward pass, samples."""

from __future__ import annotations

from collections.abc import Sequence as Chunks
from dataclasses import replace
from typing import Protocol

import torch

from engine.draft import ROOT
from engine.executor import StepResults
from engine.logprobs import position_logprobs
from engine.request import EngineLimits, PositionLogprobs
from engine.sampler import SampleRow, SamplerState, sample, sample_greedily
from engine.sequence import Sequence
from engine.step import LayerCallback, ModelRunner
from engine.step_builder import StepBuilder, num_prompt_targets
from engine.step_plan import ScheduledChunk


class KvCopies(Protocol):
    """What of a KV pool's memory the executor changes by itself, beside the model (`engine.kv_memory.KvMemory`)."""

    def copy_block(self, source: int, destination: int) -> None: ...

    def move_tokens(self, sources: Chunks[int], destinations: Chunks[int]) -> None: ...


class ModelExecutor:
    """Implements `StepExecutor`. Owns what sampling remembers of each live sequence."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        block_tokens: int,
        kv: KvCopies,
        *,
        tap_layers: tuple[int, ...] = (),
    ) -> None:
        """`kv` is the pool that `runner` was built with.

        `tap_layers`: whose hidden states the results bring along.
        """
        self.vocab_size = runner.config.vocab_size
        self.num_layers = runner.config.num_layers
        self._runner = runner
        self._kv = kv
        self._tap_layers = tap_layers
        self._builder = StepBuilder(limits, block_tokens, self._want_only_most_likely)
        self._sampler_states: dict[Sequence, SamplerState] = {}

    def execute(self, chunks: Chunks[ScheduledChunk], layer_done: LayerCallback | None) -> StepResults:
        step = self._builder.build(chunks)
        if self._tap_layers:
            step = replace(step, tap_layers=self._tap_layers)
        output = self._runner.forward(step, layer_done)
        if step.only_most_likely and step.logit_rows.shape[0]:
            samples = sample_greedily(output.logits, output.most_likely)
            return StepResults(samples.token_ids.tolist(), samples.failed)
        logits, taps, most_likely = output.logits, output.taps, output.most_likely
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        if any(chunk.sequence.wants_prompt_logprobs for chunk in chunks):
            sampled_rows, prompt_logprobs = _split_off_prompt(logits, chunks)
            logits, taps = logits[sampled_rows], None if taps is None else taps[sampled_rows]
            most_likely = None if most_likely is None else most_likely[sampled_rows]
        if not logits.shape[0]:
            return StepResults([], prompt_logprobs=prompt_logprobs)
        if self._are_plain_greedy(chunks):
            samples = sample_greedily(logits, most_likely)
        else:
            samples = sample(logits, self._rows(chunks), most_likely)
        return StepResults(
            samples.token_ids.tolist(),
            samples.failed,
            samples.logprobs,
            prompt_logprobs,
            None if taps is None else taps.float().cpu().numpy(),
        )

    def copy_block(self, source: int, destination: int) -> None:
        self._kv.copy_block(source, destination)

    def move_tokens(self, sources: Chunks[int], destinations: Chunks[int]) -> None:
        self._kv.move_tokens(sources, destinations)

    def forget(self, sequence: Sequence) -> None:
        self._builder.forget(sequence)
        self._sampler_states.pop(sequence, None)

    def _want_only_most_likely(self, chunks: Chunks[ScheduledChunk]) -> bool:
        return (
            not self._tap_layers
            and not any(chunk.sequence.wants_prompt_logprobs for chunk in chunks)
            and self._are_plain_greedy(chunks)
        )

    def _are_plain_greedy(self, chunks: Chunks[ScheduledChunk]) -> bool:
        return all(self._state(chunk.sequence).is_plain_greedy for chunk in chunks if chunk.is_sampled)

    def _rows(self, chunks: Chunks[ScheduledChunk]) -> list[SampleRow]:
        return [
            self._sample_row(chunk, node)
            for chunk in chunks
            if chunk.is_sampled
            for node in range(ROOT, chunk.num_drafts)
        ]

    def _state(self, sequence: Sequence) -> SamplerState:
        state = self._sampler_states.get(sequence)
        if state is None:
            grammar = sequence.grammar.result(0).begin(sequence.num_prompt_tokens) if sequence.grammar else None
            state = SamplerState(sequence.request.sampling, sequence.num_prompt_tokens, grammar)
            self._sampler_states[sequence] = state
        return state

    def _sample_row(self, chunk: ScheduledChunk, node: int) -> SampleRow:
        """The row of one of the step's drafts, or ROOT: of the last known token."""
        sequence = chunk.sequence
        state = self._state(sequence)
        token_ids = sequence.token_ids_to(node)
        num_ahead = len(token_ids) - sequence.num_tokens
        guesses = sequence.draft.drawn_children(node, chunk.num_drafts) if chunk.num_drafts else ()
        return SampleRow(state, token_ids, sequence.num_generated + num_ahead, num_ahead, guesses)


def _split_off_prompt(
    logits: torch.Tensor, chunks: Chunks[ScheduledChunk]
) -> tuple[list[int], dict[int, list[PositionLogprobs]]]:
    """The rows that are sampled, and the log-probabilities of prompt tokens by chunk (`StepBuilder` laid the rows)."""
    sampled_rows: list[int] = []
    prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
    row = 0
    for index, chunk in enumerate(chunks):
        sequence = chunk.sequence
        num_targets = num_prompt_targets(chunk) if sequence.wants_prompt_logprobs else 0
        if num_targets:
            first_target = chunk.first_token + 1
            targets = torch.from_numpy(sequence.token_ids[first_target : first_target + num_targets]).long()
            num_top = [sequence.request.sampling.prompt_logprobs] * num_targets
            prompt_logprobs[index] = position_logprobs(
                logits[row : row + num_targets], targets.to(logits.device), num_top
            )
            row += num_targets
        if chunk.is_sampled:
            sampled_rows.extend(range(row, row + 1 + chunk.num_drafts))
            row += 1 + chunk.num_drafts
    return sampled_rows, prompt_logprobs
