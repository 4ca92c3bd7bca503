"""The frozen definition of the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.noise import NoiseKeys, _philox, gap, gumbel, gumbel_of_bits, ln, token_bits, vocabulary_bits


def keys(seed: int, choice: int, position: int) -> NoiseKeys:
    return NoiseKeys(*(np.array([value], dtype=np.uint64) for value in (seed, choice, position)))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's known-answer file, philox4x32 10 (the fourth counter word is our purpose: 0)
        ((0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int], key: int, words: tuple[int, int, int, int]
) -> None:
    got = _philox(np.array([counter[0]], dtype=np.uint64), keys(key, counter[2], counter[1]))
    assert tuple(int(word[0]) for word in got) == words


def philox_in_plain_integers(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        high = (0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2])
        counter = [
            (high[1] >> 32) ^ counter[1] ^ key[0],
            high[1] & 0xFFFFFFFF,
            (high[0] >> 32) ^ counter[3] ^ key[1],
            high[0] & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x299F31D0A4093822])
def test_philox_agrees_with_plain_integers(seed: int) -> None:
    got = _philox(np.array([12287], dtype=np.uint64), keys(seed, 3, 131071))
    want = philox_in_plain_integers([12287, 131071, 3, 0], [seed & 0xFFFFFFFF, seed >> 32])
    assert [int(word[0]) for word in got] == want


def test_the_noise_is_frozen() -> None:
    token_ids = np.array([0, 1, 2, 3, 4, 49151])
    assert token_bits(token_ids, keys(2**64 - 3, 5, 1234)).tolist() == [
        2907987, 6157986, 9361723, 15814506, 12916382, 16010619,
    ]  # fmt: skip
    assert [value.hex() for value in gumbel(token_ids, keys(2**64 - 3, 5, 1234)).tolist()] == [
        "-0x1.1f459938e4648p-1",
        "-0x1.297275af13c2ap-9",
        "0x1.13ea15db972eep-1",
        "0x1.6a105823ce2b5p+1",
        "0x1.575a786816728p+0",
        "0x1.8800bf81df7c0p+1",
    ]


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 33, 49152])
def test_a_whole_vocabulary_has_the_noise_of_its_tokens(vocab_size: int) -> None:
    whole = vocabulary_bits(vocab_size, keys(7, 1, 99))
    assert np.array_equal(whole, token_bits(np.arange(vocab_size), keys(7, 1, 99)))


def test_seed_choice_and_position_each_change_the_noise() -> None:
    rows = [vocabulary_bits(64, keys(*key)) for key in ((1, 0, 5), (2, 0, 5), (2**32 + 1, 0, 5), (1, 1, 5), (1, 0, 6))]
    for index, left in enumerate(rows):
        for right in rows[index + 1 :]:
            assert not np.any(left == right)


def test_ln_is_within_one_unit_of_the_library() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.random(20_000) + 1e-12, 2.0 ** -np.arange(1.0, 60.0), [1.0 - 2.0**-25, 17.3]])
    library = np.array([math.log(value) for value in values])
    assert np.all(np.abs(ln(values) - library) <= np.spacing(np.abs(library)))


def test_the_noise_is_finite_and_below_its_bound() -> None:
    bits = np.concatenate([[0, 1, 2**24 - 2, 2**24 - 1], np.random.default_rng(1).integers(0, 2**24, 5000)])
    noise = gumbel_of_bits(bits.astype(np.uint32))
    assert np.all(np.isfinite(noise))
    assert noise.max() < 17.4
    assert np.all(noise <= -np.log(gap(bits.astype(np.uint32)).astype(np.float64)) + 1e-6)


def test_the_uniforms_are_uniform() -> None:
    bits = vocabulary_bits(2**18, keys(1234, 0, 0))
    counts = np.bincount((bits >> np.uint32(18)).astype(np.int64), minlength=64)
    chi_square = float(((counts - 4096) ** 2 / 4096).sum())
    assert 25 < chi_square < 122  # 63 degrees of freedom, 1e-5 on each side
