"""What a quantisation costs in answers: a candidate against a reference on the same text, by context length.

    perplexity ratio     how much less likely the text is to the candidate (1: nothing lost)
    top-1 agreement      share of positions at which both would choose the same token
    mean divergence      KL(reference || candidate), nats a token
    greedy agreement     tokens until the answers part, as a share of the answer
    JSON validity        share of answers that parse, where JSON was asked for

Both models read the same tokens (teacher forcing) in the same chunks; only one chunk's logits are held at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.step import ModelRunner, StepInput

CHUNK_TOKENS = 256
Progress = Callable[[int], None]  # tokens done


class Model(Protocol):
    """A model that reads one sequence. `benchmarks.accuracy.SequenceReader` is one."""

    def restart(self) -> None: ...

    def read(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocab] float32 after each of the tokens, which follow those read before."""
        ...


class SequenceReader:
    """Reads one sequence at a time into the first blocks of a runner's pool."""

    def __init__(self, runner: ModelRunner, block_tokens: int, num_blocks: int) -> None:
        self._runner = runner
        self._block_tokens = block_tokens
        self._table = np.arange(num_blocks, dtype=np.int32)[None, :]
        self._num_read = 0

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds."""
        return int(self._table.shape[1]) * self._block_tokens

    def restart(self) -> None:
        self._num_read = 0

    def read(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Raises `ValueError` past the pool's end."""
        count = len(token_ids)
        first, end = self._num_read, self._num_read + count
        if end > self.capacity:
            raise ValueError(f"the pool holds {self.capacity} tokens, {end} are to be read")
        positions = np.arange(first, end, dtype=np.int32)
        step = StepInput(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            slots=positions.astype(np.int64),  # blocks 0, 1, 2 ... in order: a slot is a position
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=self._table[:, : -(-end // self._block_tokens)],
            logit_rows=np.arange(count, dtype=np.int32),
        )
        self._num_read = end
        return self._runner.forward(step, None).logits.float().cpu()


@dataclass(frozen=True, slots=True)
class TextLoss:
    """One length of context: means over all positions of its texts."""

    context_tokens: int
    num_positions: int
    reference_perplexity: float
    candidate_perplexity: float
    top1_agreement: float
    mean_divergence: float

    @property
    def perplexity_ratio(self) -> float:
        return self.candidate_perplexity / self.reference_perplexity


@dataclass(frozen=True, slots=True)
class AnswerLoss:
    """Greedy answers of both models to the same prompts."""

    num_prompts: int
    greedy_agreement: float  # mean share of the answer before the first different token
    reference_json_validity: float
    candidate_json_validity: float


def compare_texts(
    reference: Model, candidate: Model, texts: Sequence[Sequence[int]], context_tokens: int, progress: Progress
) -> TextLoss:
    """Reads the first `context_tokens` of each text with both. Raises `ValueError` for a text that is shorter."""
    sums = np.zeros(4)  # reference nats, candidate nats, agreements, divergence
    num_positions = 0
    for text in texts:
        if len(text) < context_tokens:
            raise ValueError(f"a text has {len(text)} tokens, {context_tokens} are asked for")
        reference.restart()
        candidate.restart()
        for first in range(0, context_tokens, CHUNK_TOKENS):
            chunk = list(text[first : min(first + CHUNK_TOKENS, context_tokens)])
            expected, found = reference.read(chunk), candidate.read(chunk)
            targets = torch.tensor(list(text[first + 1 : min(first + len(chunk) + 1, context_tokens)]))
            sums += _loss_sums(expected[: len(targets)], found[: len(targets)], targets)
            num_positions += len(targets)
            progress(2 * len(chunk))
    means = sums / max(num_positions, 1)
    return TextLoss(
        context_tokens=context_tokens,
        num_positions=num_positions,
        reference_perplexity=float(np.exp(means[0])),
        candidate_perplexity=float(np.exp(means[1])),
        top1_agreement=float(means[2]),
        mean_divergence=float(means[3]),
    )


def compare_answers(
    reference: Model,
    candidate: Model,
    chat_prompts: Sequence[Sequence[int]],
    json_prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    end_ids: frozenset[int],
    max_tokens: int,
    progress: Progress,
) -> AnswerLoss:
    """Answers each prompt greedily with both models."""
    shares, valid = [], [0, 0]
    for prompt in [*chat_prompts, *json_prompts]:
        answers = [greedy(model, prompt, end_ids, max_tokens) for model in (reference, candidate)]
        progress(2 * max_tokens)
        shares.append(_agreed_share(*answers))
        if prompt in json_prompts:
            valid = [count + is_json(decode(answer)) for count, answer in zip(valid, answers, strict=True)]
    num_json = max(len(json_prompts), 1)
    return AnswerLoss(len(shares), float(np.mean(shares)), valid[0] / num_json, valid[1] / num_json)


def greedy(model: Model, prompt: Sequence[int], end_ids: frozenset[int], max_tokens: int) -> list[int]:
    """The most likely tokens after the prompt, up to an end token (which is not in the answer)."""
    model.restart()
    answer: list[int] = []
    to_read = list(prompt)
    while len(answer) < max_tokens:
        token = int(model.read(to_read)[-1].argmax())
        if token in end_ids:
            break
        answer.append(token)
        to_read = [token]
    return answer


def is_json(text: str) -> bool:
    """Whether the text is one JSON object, alone or in a fenced block."""
    body = text.strip()
    if body.startswith("```"):
        body = body.strip("`").removeprefix("json").strip()
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _loss_sums(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> list[float]:
    rows = torch.arange(len(targets))
    log_p, log_q = reference.log_softmax(-1), candidate.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    agreements = reference.argmax(-1) == candidate.argmax(-1)
    sums = -log_p[rows, targets].sum(), -log_q[rows, targets].sum(), agreements.sum(), divergence.sum()
    return [float(one) for one in sums]


def _agreed_share(one: Sequence[int], other: Sequence[int]) -> float:
    longer = max(len(one), len(other))
    if longer == 0:
        return 1.0
    agreed = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return agreed / longer
