"""The sampler's randomness: Gumbel noise that is a function of (seed, choice, position, token id) and nothing else.

Frozen definition, version 1 (a C++ or GPU kernel must give the same bits):

    counter = (token_id >> 2, position, choice_index, purpose)      four uint32
    key     = (seed & 0xffffffff, seed >> 32)                       two uint32
    word    = philox4x32_10(counter, key)[token_id & 3]
    x       = word >> 8                                             24 bits
    u       = (2 x + 1) 2^-25                                       in (0, 1), exact in float64
    noise   = -ln(-ln(u))                                           float64, `ln` as defined in this file

`ln` is fdlibm's algorithm in plain IEEE double operations, without fused multiply-add, because the libraries' own
logarithms differ in the last bit between machines and between vector lengths.

So a token depends on its logits, its seed and its position, and not on batch, chunking, preemption, the number of
processes or speculation. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

PURPOSE_SAMPLE = 0  # every purpose has a number of its own, so no noise is used twice
PURPOSE_DRAFT = 1  # what a drafter draws its guesses with, where they are verified by rejection
PURPOSE_VERIFY = 2  # whether such guesses stay, and what is said instead
NUM_LANES = 4
SMALLEST_GAP = 2.0**-25  # the smallest value of 1 - u
PHILOX_ROUNDS = 10

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_MASK_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


class NoiseKeys(NamedTuple):
    """Whose noise: equal-length columns (or one-element columns that are broadcast)."""

    seeds: UInt64Array
    choice_indices: UInt64Array
    positions: UInt64Array  # of the token that is sampled, counted from the start of the prompt

    def rows(self, index: npt.NDArray[np.int64]) -> NoiseKeys:
        return NoiseKeys(self.seeds[index], self.choice_indices[index], self.positions[index])


def gumbel(token_ids: npt.NDArray[np.int64], keys: NoiseKeys) -> Float64Array:
    """The noise of token_ids[i] under keys[i]."""
    return gumbel_of_bits(token_bits(token_ids, keys))


def token_bits(token_ids: npt.NDArray[np.int64], keys: NoiseKeys) -> UInt32Array:
    """The 24 random bits of token_ids[i] under keys[i]."""
    tokens = token_ids.astype(np.uint64)
    words = np.stack(_philox(tokens >> np.uint64(2), keys))
    lanes = (tokens & np.uint64(3)).astype(np.int64)
    return (words[lanes, np.arange(len(tokens))] >> np.uint64(8)).astype(np.uint32)


def vocabulary_bits(vocab_size: int, key: NoiseKeys) -> UInt32Array:
    """`token_bits` of tokens 0 to vocab_size - 1 under one key, at a quarter of the cost."""
    num_counters = -(-vocab_size // NUM_LANES)
    words = np.empty((num_counters, NUM_LANES), dtype=np.uint32)
    for lane, word in enumerate(_philox(np.arange(num_counters, dtype=np.uint64), key)):
        words[:, lane] = word
    bits = words.reshape(-1)[:vocab_size]
    bits >>= np.uint32(8)
    return bits


def uniforms(count: int, key: NoiseKeys, purpose: int) -> Float64Array:
    """The first `count` numbers in [0, 1) under one key for a purpose other than sampling; 53 bits each."""
    a, b, _, _ = _philox(np.arange(count, dtype=np.uint64), key, purpose)
    numbers: Float64Array = ((a >> np.uint64(5)) * 2.0**26 + (b >> np.uint64(6))) * 2.0**-53
    return numbers


def gap(bits: UInt32Array) -> npt.NDArray[np.float32]:
    """1 - u in float32, rounded: for bounds only. Since -ln(u) >= 1 - u, the noise is at most -ln(gap)."""
    gaps = bits.astype(np.float32)
    gaps *= np.float32(-(2.0**-24))
    gaps += np.float32(1.0)
    gaps -= np.float32(SMALLEST_GAP)
    return gaps


def gumbel_of_bits(bits: UInt32Array) -> Float64Array:
    """The noise that 24 random bits stand for, between -2.9 and 17.4."""
    uniform = (2.0 * bits.astype(np.float64) + 1.0) * SMALLEST_GAP
    return -ln(-ln(uniform))


def ln(values: Float64Array) -> Float64Array:
    """The natural logarithm of positive normal float64, bit for bit the same everywhere.

    x = 2^k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); s = f / (2 + f); ln(1 + f) = f - (f^2/2 - s (f^2/2 + R(s^2))).
    Source: fdlibm, e_log.c (Sun Microsystems, freely granted).
    """
    mantissa, exponent = np.frexp(values)
    is_small = mantissa < 0.70710678118654752440
    mantissa = np.where(is_small, mantissa * 2.0, mantissa)
    k = (exponent - is_small).astype(np.float64)
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332))
    odd = z * (
        0.6666666666666735130 + w * (0.2857142874366239149 + w * (0.1818357216161805012 + w * 0.1479819860511658591))
    )
    half_square = 0.5 * f * f
    correction = s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10
    result: Float64Array = k * 6.93147180369123816490e-01 - ((half_square - correction) - f)
    return result


def _philox(
    counters: UInt64Array, keys: NoiseKeys, purpose: int = PURPOSE_SAMPLE
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox4x32-10 of (counters, position, choice, purpose): four words for each counter, each below 2^32."""
    a = counters.astype(np.uint64, copy=True)
    b, c = np.empty_like(a), np.empty_like(a)
    b[:], c[:] = keys.positions, keys.choice_indices
    d = np.full_like(a, purpose)
    key_0, key_1 = keys.seeds & _MASK_32, keys.seeds >> _SHIFT_32
    product_0, product_1 = np.empty_like(a), np.empty_like(a)
    for _ in range(PHILOX_ROUNDS):
        np.multiply(a, _MULTIPLIER_0, out=product_0)
        np.multiply(c, _MULTIPLIER_1, out=product_1)
        np.right_shift(product_1, _SHIFT_32, out=a)
        a ^= b
        a ^= key_0
        np.bitwise_and(product_1, _MASK_32, out=b)
        np.right_shift(product_0, _SHIFT_32, out=c)
        c ^= d
        c ^= key_1
        np.bitwise_and(product_0, _MASK_32, out=d)
        key_0 = (key_0 + _WEYL_0) & _MASK_32
        key_1 = (key_1 + _WEYL_1) & _MASK_32
    return a, b, c, d
