"""The shape of a KV pool as both sides of a handoff state it; knows nothing of memory or of transports.

The pool's order is `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`: within one block, consecutive layers are
contiguous, so a (block, layer range) is one run of bytes. `engine.kv_memory` has the pool itself.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDER = "block,layer,kv,head,token,dim"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one worker's pool. Two workers exchange KV only as far as these agree (`kv_transfer.hello`)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32 | bfloat16 | float16
    element_bytes: int
    block_tokens: int
    order: str = ORDER

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys (or values) of one (block, layer): the smallest run that is always contiguous."""
        return self.block_tokens * self.head_dim * self.element_bytes

    @property
    def cell_bytes(self) -> int:
        """Bytes of one (block, layer): keys and values of `block_tokens` tokens."""
        return 2 * self.num_kv_heads * self.block_tokens * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.cell_bytes
