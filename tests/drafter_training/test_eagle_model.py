"""The unrolled training: each guess sees what it will see when serving, and nothing else."""

from __future__ import annotations

import pytest
import torch

from drafter_training.eagle_model import EagleModel
from tests.decode_worker.speculation.test_eagle import CONFIG

LENGTH, NUM_TAPS, ROW = 9, 2, 6


def states_at(taps: torch.Tensor, embeddings: torch.Tensor, guess: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = EagleModel(CONFIG, NUM_TAPS, 32)
    with torch.no_grad():
        return model.unrolled(taps[None], embeddings[None], 3)[guess - 1][0, ROW]


@pytest.mark.parametrize("guess", [1, 2, 3])
def test_a_guess_reads_true_states_only_up_to_where_its_chain_left_them(guess: int) -> None:
    """Guess g at row p left the true states at row p - g + 1, and knows every token up to row p's."""
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(LENGTH, NUM_TAPS, CONFIG.hidden_size, generator=generator)
    embeddings = torch.randn(LENGTH, CONFIG.hidden_size, generator=generator)
    expected = states_at(taps, embeddings, guess)
    for row in range(LENGTH):
        changed = taps.clone()
        changed[row] += 1.0
        is_read = row <= ROW - guess + 1
        assert (not torch.equal(states_at(changed, embeddings, guess), expected)) == is_read, row
        other = embeddings.clone()
        other[row] += 1.0
        assert (not torch.equal(states_at(taps, other, guess), expected)) == (row <= ROW), row
