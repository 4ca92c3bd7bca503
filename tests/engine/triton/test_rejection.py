"""The rejection kernel draws the tokens that `engine.rejection` draws, over fixed seeds, and the target's law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.sampling_params import SamplingParams
from engine import device_sampler
from engine.draft import DraftLaw, DrawnGuess
from engine.rejection import draw_after_guesses, probabilities_of
from engine.sampler import SampleRow, SamplerState, draw_on_device, sample
from tests.engine.triton.paged_batch import DEVICE


def random_scaled(generator: np.random.Generator, vocab_size: int, *, share_kept: float = 1.0) -> np.ndarray:
    """Scaled logits as a filter leaves them: the largest is 0, some are -inf."""
    logits = generator.normal(0, 2, vocab_size).astype(np.float32)
    logits -= logits.max()
    logits[(generator.random(vocab_size) >= share_kept) & (logits < 0)] = -np.inf
    return logits


def random_guesses(generator: np.random.Generator, vocab_size: int, count: int) -> tuple[DrawnGuess, ...]:
    """Siblings, drawn one after the other from one law."""
    law: DraftLaw | None = DraftLaw.of(probabilities_of(random_scaled(generator, vocab_size, share_kept=0.5)))
    guesses: list[DrawnGuess] = []
    while law is not None and len(guesses) < count:
        guesses.append(DrawnGuess(law.draw(float(generator.random())), law))
        law = law.without(guesses[-1].token_id)
    return tuple(guesses)


def drawn(scaled: np.ndarray, guesses: Sequence[Sequence[DrawnGuess]], numbers: Sequence[np.ndarray]) -> list[int]:
    token_ids: list[int] = device_sampler.draw_guessed(torch.from_numpy(scaled).to(DEVICE), guesses, numbers).tolist()
    return token_ids


@pytest.mark.parametrize(("vocab_size", "share_kept"), [(7, 1.0), (1023, 0.3), (1024, 1.0), (2500, 0.05)])
def test_tokens_equal_the_reference(vocab_size: int, share_kept: float) -> None:
    generator = np.random.default_rng(vocab_size)
    counts = [1, 1, 1, 0, 3, 2, 5, 1, 4]
    scaled = np.stack([random_scaled(generator, vocab_size, share_kept=share_kept) for _ in counts])
    guesses = [random_guesses(generator, vocab_size, count) for count in counts]
    # A drafter that agrees, and one that never does.
    same = DraftLaw.of(probabilities_of(scaled[0]))
    guesses[0] = (DrawnGuess(same.draw(0.4), same),)
    scaled[1, guesses[1][0].token_id] = -np.inf
    numbers = [generator.random(len(one) + 1) for one in guesses]
    expected = [
        draw_after_guesses(probabilities_of(row), one, uniforms)
        for row, one, uniforms in zip(scaled, guesses, numbers, strict=True)
    ]
    assert drawn(scaled, guesses, numbers) == expected
    assert expected[0] == guesses[0][0].token_id
    assert expected[1] != guesses[1][0].token_id
    assert {len(one) for one in guesses} >= {0, 1, 2}


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_numbers_at_the_ends_of_their_range_draw_a_token_that_has_mass(number: float) -> None:
    generator = np.random.default_rng(2)
    scaled = random_scaled(generator, 40, share_kept=0.2)[None]
    (guess,) = random_guesses(generator, 40, 1)
    for numbers in ([number, number], [1.0 - 2.0**-53, number]):
        (token,) = drawn(scaled, [(guess,)], [np.array(numbers)])
        assert token == draw_after_guesses(probabilities_of(scaled[0]), (guess,), np.array(numbers))
        assert np.isfinite(scaled[0, token])


def test_the_law_is_the_targets() -> None:
    """Chi-square over six tokens, two siblings: 20.5 is passed once in a thousand seeds, and this seed stays below."""
    generator, num_draws = np.random.default_rng(11), 150
    scaled = random_scaled(generator, 6)
    law = DraftLaw.of(probabilities_of(random_scaled(generator, 6)))
    guesses, numbers = [], []
    for _ in range(num_draws):
        first = DrawnGuess(law.draw(float(generator.random())), law)
        rest = law.without(first.token_id)
        assert rest is not None
        guesses.append((first, DrawnGuess(rest.draw(float(generator.random())), rest)))
        numbers.append(generator.random(3))
    counts = np.bincount(drawn(np.tile(scaled, (num_draws, 1)), guesses, numbers), minlength=6)
    expected = probabilities_of(scaled) * num_draws
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_a_mixed_batch_draws_the_hosts_tokens() -> None:
    """Through the sampler: rows with guesses beside rows without."""
    generator = np.random.default_rng(4)
    logits = generator.normal(0, 2, (5, 300)).astype(np.float32)
    rows = [
        SampleRow(
            SamplerState(SamplingParams(max_tokens=9, seed=seed, temperature=1.3, top_k=50 * (seed % 2)), 3),
            np.arange(4 + seed, dtype=np.int32),
            num_generated=1,
            guesses=random_guesses(generator, 300, count),
        )
        for seed, count in enumerate((0, 1, 3, 0, 2))
    ]
    expected = sample(torch.from_numpy(logits.copy()), rows).token_ids
    on_device = draw_on_device(torch.from_numpy(logits).to(DEVICE), logits.max(1), rows)
    assert on_device.tolist() == expected.tolist()


def test_a_guess_that_its_law_could_not_draw_is_refused() -> None:
    law = DraftLaw(np.array([1, 2]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="no probability under the law"):
        drawn(np.zeros((1, 4), np.float32), [(DrawnGuess(3, law),)], [np.zeros(2)])
