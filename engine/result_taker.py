"""What a step's results mean for its sequences: which tokens count, which KV counts, and whether that was the end.

    results ─ verify ─> accepted run ─ stop rules ─> kept tokens ─> appended, their KV in order and published

Nobody hears of anything here: the engine tells the clients, and ends who has come to an end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Chunks
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.drafting import Accepted, Speculator, verify_match
from engine.executor import StepExecutor, StepResults
from engine.request import PositionLogprobs
from engine.sequence import Sequence
from engine.step_plan import ScheduledChunk
from engine.stop_rules import StopDecision, apply_stop_rules

_ONE_ROW: tuple[int, ...] = (0,)


class Taken(NamedTuple):
    """What one sequence got out of a step: new tokens with the decision about them, or why it failed."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    decision: StopDecision | None = None
    error: str = ""


class ResultTaker:
    """Used by the engine thread."""

    def __init__(self, executor: StepExecutor, pool: BlockPool, speculator: Speculator | None) -> None:
        self._executor = executor
        self._pool = pool
        self._speculator = speculator

    def take(self, chunks: Chunks[ScheduledChunk], results: StepResults, deaf: Collection[Sequence]) -> Iterator[Taken]:
        """Books what the step computed, one sequence after the other, each told before the next is looked at.

        `deaf`: those whose KV listener failed. Chunks in the middle of a prompt give nothing.
        """
        sample = 0
        failed, prompt_logprobs = results.failed, results.prompt_logprobs
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            is_sampled, first_row = chunk.is_sampled, sample
            if is_sampled:
                sample += 1 + chunk.num_drafts
            if is_sampled and first_row in failed:
                yield Taken(sequence, error=failed[first_row])
                continue
            if deaf and sequence in deaf:
                yield Taken(sequence, error="the listener of its KV failed")
                continue
            if index in prompt_logprobs:
                sequence.prompt_logprobs.extend(prompt_logprobs[index])
            if is_sampled:
                yield self._take_tokens(chunk, results, first_row)
            else:
                self._book_computed(sequence, sequence.num_computed + chunk.num_tokens)

    def _take_tokens(self, chunk: ScheduledChunk, results: StepResults, first_row: int) -> Taken:
        """Appends what the chunk's rows say as far as its drafts hold and no rule ends it."""
        sequence = chunk.sequence
        accepted = Accepted((results.token_ids[first_row],), _ONE_ROW)
        if chunk.num_drafts:
            accepted = self._verify(sequence, results, first_row)
        token_ids, rows = accepted
        decision = decide_stop(sequence, token_ids, sequence.num_generated)
        is_run = True
        if chunk.num_drafts:
            token_ids, rows = token_ids[: decision.num_kept], rows[: decision.num_kept]
            is_run = rows == tuple(range(len(rows)))
            if not is_run:
                self._move_kv(sequence, rows)
        if self._speculator is not None and results.taps is not None and decision.finish_reason is None:
            # A run's rows are a view, no copy.
            places = slice(first_row, first_row + len(rows)) if is_run else [first_row + row for row in rows]
            self._speculator.sampled(sequence.request, sequence.num_tokens, token_ids, results.taps[places])
        for token_id in token_ids:
            sequence.append(token_id)
        self._book_computed(sequence, sequence.num_tokens - 1)  # KV behind that is of rejected drafts
        logprobs: tuple[PositionLogprobs, ...] = ()
        if first_row in results.logprobs:
            logprobs = tuple(results.logprobs[first_row + row] for row in rows)
        return Taken(sequence, token_ids, logprobs, decision)

    def _verify(self, sequence: Sequence, results: StepResults, first_row: int) -> Accepted:
        draft = sequence.draft
        failed_rows = {row - first_row for row in results.failed}
        accepted = verify_match(draft, results.token_ids[first_row : first_row + 1 + len(draft)], failed_rows)
        if self._speculator is not None:
            self._speculator.verified(sequence.request.request_id, draft, [row - 1 for row in accepted.rows[1:]])
        return accepted

    def _move_kv(self, sequence: Sequence, rows: Chunks[int]) -> None:
        """The accepted branch of a tree stands between others: its KV moves to where that of a chain is."""
        first = sequence.num_tokens - 1  # where row 0 is
        block_tokens = self._pool.block_tokens

        def slot(index: int) -> int:
            return sequence.blocks[index // block_tokens].block * block_tokens + index % block_tokens

        moves = [(slot(first + row), slot(first + place)) for place, row in enumerate(rows) if row != place]
        self._executor.move_tokens([source for source, _ in moves], [destination for _, destination in moves])

    def _book_computed(self, sequence: Sequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        if num_computed // self._pool.block_tokens > sequence.chain.num_blocks:
            self._pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, num_computed)


def decide_stop(sequence: Sequence, new_tokens: Chunks[int], num_generated: int) -> StopDecision:
    max_generated = sequence.max_length - sequence.num_prompt_tokens
    return apply_stop_rules(new_tokens, sequence.request.sampling, num_generated, max_generated)
