"""Chained, keyed hashes of full KV blocks: the names under which a prefix is found in a cache or an index.

    seed   = BLAKE2b-256(key = scope key; model fingerprint, LoRA name, block_tokens)
    h[-1]  = 16 zero bytes
    h[i]   = BLAKE2b-128(key = seed; h[i-1], token ids of block i as little-endian int32)

So h[i] names the whole prefix up to block i, within one scope: another tenant, model, adapter or block size gives
other hashes, and without the scope key they say nothing about token ids. The definition is frozen: the router, both
workers and their peers compute the same bytes in different processes (`hash_test_vector` is compared at Hello).
A hash is a name, not a proof: `engine.prefix_cache` compares token ids on every hit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cluster.identity import BlockHash

HASH_ALGORITHM = "tandem-blake2b-128-v1"
HASH_BYTES = 16
SEED_BYTES = 32
MAX_SCOPE_KEY_BYTES = 64  # BLAKE2b's own limit for a key
TOKEN_BYTES = 4
CHAIN_START = BlockHash(bytes(HASH_BYTES))


@dataclass(frozen=True, slots=True)
class HashScope:
    """What must be equal for two requests to share KV blocks."""

    scope_key: bytes  # at most 64 bytes; made by the router from its secret, the tenant and the client's salt
    model_fingerprint: str
    block_tokens: int
    lora_name: str = ""

    def seed(self) -> bytes:
        """The key of every block hash in this scope. Fields are length-prefixed, so none can run into the next."""
        digest = blake2b(key=self.scope_key, digest_size=SEED_BYTES, person=b"tandem-scope")
        for field in (self.model_fingerprint.encode(), self.lora_name.encode()):
            digest.update(len(field).to_bytes(4, "little") + field)
        digest.update(self.block_tokens.to_bytes(4, "little"))
        return digest.digest()


class HashChain:
    """The block hashes of one growing sequence. Extending costs O(new blocks)."""

    def __init__(self, scope: HashScope) -> None:
        self.block_tokens = scope.block_tokens
        self.hashes: list[BlockHash] = []
        self._keyed = blake2b(key=scope.seed(), digest_size=HASH_BYTES)

    def fork(self) -> HashChain:
        """The same hashes, to be extended apart."""
        twin = copy.copy(self)
        twin.hashes = list(self.hashes)
        return twin

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Hashes the full blocks that are new. `token_ids` is the whole sequence from its start."""
        block_bytes = self.block_tokens * TOKEN_BYTES
        first = len(self.hashes)
        num_full = len(token_ids) // self.block_tokens
        if num_full <= first:
            return
        new_tokens = token_ids[first * self.block_tokens : num_full * self.block_tokens]
        data = np.ascontiguousarray(new_tokens, dtype="<i4").tobytes()
        parent = self.hashes[-1] if self.hashes else CHAIN_START
        for start in range(0, len(data), block_bytes):
            digest = self._keyed.copy()
            digest.update(parent + data[start : start + block_bytes])
            parent = BlockHash(digest.digest())
            self.hashes.append(parent)


def hash_blocks(token_ids: npt.NDArray[np.int32], scope: HashScope) -> list[BlockHash]:
    """The hashes of all full blocks of a sequence, in order."""
    chain = HashChain(scope)
    chain.extend(token_ids)
    return chain.hashes


def hash_test_vector(block_tokens: int) -> BlockHash:
    """The hash of tokens 0..block_tokens-1 under an empty scope: peers whose vectors differ must not share an index."""
    scope = HashScope(scope_key=b"", model_fingerprint="", block_tokens=block_tokens)
    return hash_blocks(np.arange(block_tokens, dtype=np.int32), scope)[0]
