"""The drawn token of each row: argmax of scaled logits + Gumbel noise, the bits of `engine.noise` exactly.

Noise is a function of (seed, choice, position, token), so the GPU chooses the token that every other path chooses. All
logarithms are `engine.noise.ln`'s, in float64 without fused multiply-add: launch it through `gumbel_argmax` alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch_config import LaunchConfig

TILE_TOKENS = 1024
NO_TOKEN = 2**31 - 1


def gumbel_argmax(
    scaled: torch.Tensor, seeds: torch.Tensor, choice_indices: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Token ids `[rows]` int64 of scaled logits `[rows, vocab]` float32; a tie goes to the lower id.

    seeds `[rows]` int64 (the 64 bits as they are), choice_indices and positions `[rows]` int32. -inf is never chosen
    while a finite logit is there.
    """
    rows, vocab_size = scaled.shape
    parts = triton.cdiv(vocab_size, TILE_TOKENS)
    best = scaled.new_empty((rows, parts), dtype=torch.float64)
    tokens = scaled.new_empty((rows, parts), dtype=torch.int32)
    config = gumbel_config()
    if rows:
        _gumbel_kernel[(rows, parts)](
            scaled,
            seeds,
            choice_indices,
            positions,
            best,
            tokens,
            vocab_size,
            scaled.stride(0),
            parts,
            **config.constants,
            num_warps=config.num_warps,
            enable_fp_fusion=config.fuses_multiply_add,
        )
    is_best = best == best.amax(1, keepdim=True)
    return torch.where(is_best, tokens, NO_TOKEN).amin(1).long()


def gumbel_config() -> LaunchConfig:
    return LaunchConfig({"TILE_TOKENS": TILE_TOKENS}, num_warps=4, fuses_multiply_add=False)


@triton.jit
def _gumbel_kernel(
    scaled,
    seeds,
    choice_indices,
    positions,
    best,
    tokens,
    vocab_size,
    row_stride,
    parts,
    TILE_TOKENS: tl.constexpr,
):
    """Grid (row, part). One program: the best score of TILE_TOKENS tokens of one row, and the lowest such token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token = token < vocab_size
    value = tl.load(scaled + row * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float64)
    seed = tl.load(seeds + row)
    zeros = tl.zeros([TILE_TOKENS], tl.uint32)
    position = zeros + tl.load(positions + row).to(tl.uint32)
    choice = zeros + tl.load(choice_indices + row).to(tl.uint32)
    word = _philox_word(token, choice, position, seed, zeros)
    score = value + _gumbel_of(word)
    # A part of -inf alone (filtered, or past the vocabulary) still names a token of the vocabulary.
    highest = tl.max(score, 0)
    winner = tl.min(tl.where((score == highest) & is_token, token, 2147483647), 0)
    tl.store(best + row * parts + part, highest)
    tl.store(tokens + row * parts + part, winner)


@triton.jit
def _philox_word(token, choice, position, seed, zeros):
    """Word `token & 3` of philox4x32_10((token >> 2, position, choice, 0), seed)."""
    a, b, c, d = (token >> 2).to(tl.uint32), position, choice, zeros
    low_key = zeros + (seed & 0xFFFFFFFF).to(tl.uint32)
    high_key = zeros + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    multiplier_0 = tl.full(a.shape, 0xD2511F53, tl.uint32)
    multiplier_1 = tl.full(a.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(a, multiplier_0), a * multiplier_0
        high_1, low_1 = tl.umulhi(c, multiplier_1), c * multiplier_1
        a = high_1 ^ b ^ low_key
        c = high_0 ^ d ^ high_key
        b = low_1
        d = low_0
        low_key += tl.full(a.shape, 0x9E3779B9, tl.uint32)
        high_key += tl.full(a.shape, 0xBB67AE85, tl.uint32)
    lane = token & 3
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@triton.jit
def _gumbel_of(word):
    uniform = (2.0 * (word >> 8).to(tl.float64) + 1.0) * 2.9802322387695312e-08
    return -_ln(-_ln(uniform))


@triton.jit
def _ln(x):
    """`engine.noise.ln`: fdlibm's logarithm of a positive normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    is_small = mantissa < 0.70710678118654752440
    mantissa = tl.where(is_small, mantissa * 2.0, mantissa)
    k = tl.where(is_small, exponent - 1, exponent).to(tl.float64)
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
    return k * 6.93147180369123816490e-01 - ((half_square - correction) - f)
