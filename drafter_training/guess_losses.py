"""What a drafter is trained for: the target's distribution behind each guess; and how far its guesses would hold.

Teacher logits are computed from the stored last hidden states, with the target's own head, when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from drafter_training.batches import Batch
from drafter_training.target_parts import TargetParts

GUESS_DECAY = 0.8  # weight of each further guess
FREQUENT_SHARE = 0.75  # of the candidates of one batch: the most frequent tokens; the others are drawn


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that a batch's softmax is over, and their rows of the head."""

    token_ids: torch.Tensor
    head: torch.Tensor


def draw_candidates(
    target: TargetParts, vocabulary: torch.Tensor, count: int, generator: torch.Generator
) -> Candidates:
    """The most frequent tokens and some of the others: a softmax over all would be most of training's cost."""
    num_frequent = int(FREQUENT_SHARE * min(count, len(vocabulary)))
    others = torch.randperm(len(vocabulary) - num_frequent, generator=generator)[: count - num_frequent]
    token_ids = torch.cat((vocabulary[:num_frequent], vocabulary[num_frequent + others]))
    return Candidates(token_ids, target.head[token_ids])


def distillation_loss(
    states: list[torch.Tensor], batch: Batch, target: TargetParts, candidates: Candidates
) -> torch.Tensor:
    """Mean Kullback-Leibler divergence of the guesses' laws from the target's, over rows and guesses.

    Guess g at row p is compared with the target at row p + 1; rows before g - 1 are of no chain.
    """
    with torch.no_grad():
        last_hidden = target.normed(batch.taps[:, 1:, -1])
        teacher = functional.linear(last_hidden.to(candidates.head.dtype), candidates.head).float().log_softmax(-1)
    total = torch.zeros(())
    weight_sum = 0.0
    for index, state in enumerate(states):
        is_counted = batch.is_row[:, 1:].clone()
        is_counted[:, :index] = False
        student = functional.linear(state[:, :-1][is_counted], candidates.head).float().log_softmax(-1)
        divergence = functional.kl_div(student, teacher[is_counted], log_target=True, reduction="none").sum(-1).mean()
        total = total + GUESS_DECAY**index * divergence
        weight_sum += GUESS_DECAY**index
    return total / weight_sum


@dataclass(slots=True)
class HeldGuesses:
    """How often the g-th guess of a chain is what the target says (greedily), given that those before it were."""

    num_tried: list[int]
    num_held: list[int]

    @property
    def rates(self) -> list[float]:
        return [held / max(1, tried) for held, tried in zip(self.num_held, self.num_tried, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step that verifies the whole chain."""
        tokens, reach = 1.0, 1.0
        for rate in self.rates:
            reach *= rate
            tokens += reach
        return tokens


@torch.no_grad()
def count_held(
    states: list[torch.Tensor], batch: Batch, target: TargetParts, vocabulary: torch.Tensor, counted: HeldGuesses
) -> None:
    """Adds a batch. A chain counts from each row on, as long as the turn's own tokens are the target's choice."""
    head = target.head[vocabulary]
    last_hidden = target.normed(batch.taps[:, 1:, -1])
    wanted = functional.linear(last_hidden, target.head).argmax(-1)
    said = batch.next_ids[:, 1:]
    is_on_track = batch.is_row[:, 1:]  # of the chain that reaches row p with its g-th guess
    for index, state in enumerate(states):
        guesses = vocabulary[functional.linear(state[:, :-1].float(), head).argmax(-1)]
        holds = is_on_track & (guesses == wanted)
        counted.num_tried[index] += int(is_on_track.sum())
        counted.num_held[index] += int(holds.sum())
        # The next guess of the chain is at the next row, behind the token that was said here.
        is_on_track = functional.pad(holds & (said == wanted), (1, 0))[:, :-1] & batch.is_row[:, 1:]
