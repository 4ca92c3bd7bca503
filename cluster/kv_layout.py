"""The shape of a KV pool as both sides of a handoff state it; knows nothing of memory or of transports.

The pool's order is `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`: within one block, consecutive layers are
contiguous, so a (block, layer range) is one run of bytes. `engine.kv_memory` has the pool itself.

FP8 KV has a float32 scale for each token of each head. They lie behind that head's plane, so that a head is still one
run and the rows of values keep their alignment:

    head plane   [block_tokens, head_dim] e4m3, [block_tokens] float32
"""

from __future__ import annotations

from dataclasses import dataclass

ORDER = "block,layer,kv,head,token,dim"
ORDER_WITH_SCALES = "block,layer,kv,head,token,dim;token-scale:float32"
FP8_KV = "fp8_e4m3"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_KV: 1}
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one worker's pool. Two workers exchange KV only as far as these agree (`kv_transfer.hello`)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32 | bfloat16 | float16 | fp8_e4m3
    element_bytes: int
    block_tokens: int
    order: str = ORDER

    @property
    def has_scales(self) -> bool:
        return self.dtype == FP8_KV

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key (or value) of one head, with its scale."""
        return self.head_dim * self.element_bytes + (SCALE_BYTES if self.has_scales else 0)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys (or values) of one (block, layer): the smallest run that is always contiguous."""
        return self.block_tokens * self.token_bytes

    @property
    def cell_bytes(self) -> int:
        """Bytes of one (block, layer): keys and values of `block_tokens` tokens."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.cell_bytes
