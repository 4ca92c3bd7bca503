"""Keys and values as FP8 (e4m3) with a float32 scale for each token of each head: how they are made and read.

    scale = largest magnitude of the token's row / 448        (1 where the row is 0)
    value = row / scale, rounded to e4m3

A scale is a function of its own token alone: so KV does not depend on chunks, blocks, batch or who computed it, as with
every other dtype, and nothing has to be calibrated. `cluster.kv_layout` says where the scales lie.
"""

from __future__ import annotations

import torch

from cluster.kv_layout import SCALE_BYTES

VALUE_DTYPE = torch.float8_e4m3fn
LARGEST_VALUE = 448.0


def is_fp8(pool: torch.Tensor) -> bool:
    """Whether a pool's tensor holds FP8 KV; every other pool is of the dtype that its model computes in."""
    return pool.dtype == torch.uint8


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` `[..., head_dim]` as e4m3, and their scales `[...]` float32."""
    wide = rows.float()
    scales = wide.abs().amax(-1) / LARGEST_VALUE
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales[..., None]).to(VALUE_DTYPE), scales


def split_planes(planes: torch.Tensor, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of head planes `[..., plane bytes]` uint8: bytes of the values `[..., block_tokens, head_dim]`, and scales
    `[..., block_tokens]` float32."""
    num_value_bytes = planes.shape[-1] - block_tokens * SCALE_BYTES
    shape = (*planes.shape[:-1], block_tokens, num_value_bytes // block_tokens)
    return planes[..., :num_value_bytes].view(shape), planes[..., num_value_bytes:].view(torch.float32)


def split_pool(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same views of a whole pool `[blocks, layers, 2, kv_heads, block_tokens, row]`."""
    return split_planes(pool.flatten(4), int(pool.shape[4]))


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 of the bytes of values `[..., head_dim]` under scales `[...]`."""
    return values.view(VALUE_DTYPE).float() * scales[..., None]
