"""Rejection sampling where a drafter has drawn guesses: `engine.rejection.draw_after_guesses` for rows on a GPU.

A row's law is never stored: what is left of it after some guesses is worked out anew for each tile, from the logits and
those guesses' laws. A row has one guess in a chain and a few siblings in a tree, so this reads little twice, and no
program waits for what it wrote itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_TOKENS = 256  # larger tiles spill around float64's exponential
FEWEST_GUESSES = 4  # fewer are a kernel of their own, and no faster


def draw_after_guesses(
    scaled: torch.Tensor,
    guess_starts: torch.Tensor,
    guess_ids: torch.Tensor,
    laws: torch.Tensor,
    uniforms: torch.Tensor,
    max_guesses: int,
) -> torch.Tensor:
    """Token ids `[rows]` int64: one of a row's guesses as often as the law of its logits allows, else what is left.

    Shapes: scaled `[rows, vocab]` float32, filtered, the largest one of a row 0; row r has guesses guess_starts[r] to
    guess_starts[r + 1] (`[rows + 1]` int32, at most max_guesses); guess_ids `[guesses]` int32; laws `[guesses, vocab]`
    float64, each with the guess's own probability above 0; uniforms `[guesses + rows]` float64 in [0, 1): those of a
    row's guesses, then the one that draws what none of them was, row after row.
    """
    rows, vocab_size = scaled.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=scaled.device)
    if rows:
        _rejection_kernel[(rows,)](
            scaled,
            guess_starts,
            guess_ids,
            laws,
            uniforms,
            tokens,
            vocab_size,
            scaled.stride(0),
            laws.stride(0),
            MAX_GUESSES=max(FEWEST_GUESSES, triton.next_power_of_2(max_guesses)),
            TILE_TOKENS=TILE_TOKENS,
            num_warps=4,
        )
    return tokens.long()


@triton.jit
def _rejection_kernel(
    scaled,
    guess_starts,
    guess_ids,
    laws,
    uniforms,
    tokens,
    vocab_size,
    row_stride,
    law_stride,
    MAX_GUESSES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Grid (row). One program walks one row's guesses: a pass over the row, one for each that does not stay,
    and one to draw."""
    row = tl.program_id(0)
    first = tl.load(guess_starts + row)
    num_guesses = tl.load(guess_starts + row + 1) - first
    logits = scaled + row.to(tl.int64) * row_stride
    row_laws = laws + first.to(tl.int64) * law_stride
    numbers = uniforms + first + row
    index = tl.arange(0, MAX_GUESSES)
    # Nothing is divided (a division of float64 is a call, and spills): what is left stays as heavy as it is, and each
    # guess's law is made as heavy as what was left before it. 0: its guess left nothing.
    masses = tl.zeros([MAX_GUESSES], tl.float64)

    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        mass += tl.sum(_left_of(logits, row_laws, law_stride, masses, index, 0, token, token < vocab_size), 0)

    chosen = tl.full([], -1, tl.int32)
    for guess in range(num_guesses):
        if chosen < 0:
            guessed = tl.load(guess_ids + first + guess)
            q = tl.load(row_laws + guess * law_stride + guessed)
            left = _left_of(logits, row_laws, law_stride, masses, index, guess, guessed, True)
            if tl.load(numbers + guess) * q * mass < left:
                chosen = guessed
            else:
                rest = tl.full([], 0.0, tl.float64)
                now = tl.where(index == guess, mass, masses)
                for start in range(0, vocab_size, TILE_TOKENS):
                    token = start + tl.arange(0, TILE_TOKENS)
                    is_token = token < vocab_size
                    rest += tl.sum(_left_of(logits, row_laws, law_stride, now, index, guess + 1, token, is_token), 0)
                # A law that is the row's own leaves nothing, and rejects nothing but by rounding.
                if rest > 0:
                    masses = now
                    mass = rest

    if chosen < 0:
        target = tl.load(numbers + num_guesses) * mass
        so_far = tl.full([], 0.0, tl.float64)
        found = tl.full([], 2147483647, tl.int32)
        last = tl.full([], 0, tl.int32)
        for start in range(0, vocab_size, TILE_TOKENS):
            token = start + tl.arange(0, TILE_TOKENS)
            is_token = token < vocab_size
            left_tile = _left_of(logits, row_laws, law_stride, masses, index, num_guesses, token, is_token)
            is_past = (so_far + tl.cumsum(left_tile, 0) > target) & (left_tile > 0)
            found = tl.minimum(found, tl.min(tl.where(is_past, token, 2147483647), 0))
            last = tl.maximum(last, tl.max(tl.where(left_tile > 0, token, 0), 0))
            so_far += tl.sum(left_tile, 0)
        # Rounding may leave the number at the last edge: the last token that has any mass.
        chosen = tl.minimum(found, last)
    tl.store(tokens + row, chosen)


@triton.jit
def _left_of(logits, row_laws, law_stride, masses, index, num_rejected, token, is_token):
    """What is left of tokens' weights once the row's first `num_rejected` guesses were rejected; else 0."""
    left = tl.exp(tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float64))
    for guess in range(num_rejected):
        mass = tl.sum(tl.where(index == guess, masses, 0.0), 0)
        q = tl.load(row_laws + guess * law_stride + token, mask=is_token, other=0.0)
        left = tl.maximum(left - q * mass, 0.0)
    return left
