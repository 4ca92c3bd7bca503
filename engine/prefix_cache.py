"""Which blocks hold which prefix: a tree of full, verified blocks, found by hash and proven by token ids.

    root ── block 0 ── block 1 ── block 2
                   └── block 1'           an entry lives only while its parent does, so every entry can be reached

A hit needs the hash, the block's own token ids and the parent entry to agree, so a colliding hash costs a hit and never
gives foreign KV. This file knows no reference counts and takes no lock: `engine.block_pool` owns both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.block_hash import CHAIN_START, HashChain
from cluster.identity import BlockHash

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cached block. Owned by the cache; `is_live` ends when the entry leaves it."""

    block_hash: BlockHash
    tokens: bytes  # the block's own token ids, compared on every hit
    block: int
    parent: CacheEntry | None
    children: set[CacheEntry] = field(default_factory=set)
    is_live: bool = True
    is_saved: bool = False  # a lower tier had it when it was last asked; the pool's to set

    @property
    def proof(self) -> bytes:
        """What must be equal beside the hash: the hash before it, and its token ids."""
        return proof_of(self.parent.block_hash if self.parent is not None else CHAIN_START, self.tokens)


class PrefixChain:
    """One sequence's place in the cache: its hashes and the entry of the last block that is matched or published.

    Owned by whoever owns the sequence; only the pool moves it.
    """

    def __init__(self, hash_chain: HashChain) -> None:
        self.hash_chain = hash_chain
        self.num_blocks = 0  # matched or published so far
        self.last_entry: CacheEntry | None = None
        self.can_publish = True  # False after a hash collision or when an ancestor was evicted

    def restart(self) -> None:
        """Forgets the place and keeps the hashes: for a sequence that starts over."""
        self.num_blocks = 0
        self.last_entry = None
        self.can_publish = True

    def fork(self) -> PrefixChain:
        """The same hashes for somebody else, who begins at the start."""
        return PrefixChain(self.hash_chain.fork())


class PrefixCache:
    """The tree of entries."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._entry_by_hash: dict[BlockHash, CacheEntry] = {}

    def __len__(self) -> int:
        return len(self._entry_by_hash)

    def walk(self, chain: PrefixChain, token_ids: TokenIds) -> Iterator[CacheEntry]:
        """The entries that hold the longest cached prefix. Capped so that at least one token is left to compute."""
        num_blocks = (len(token_ids) - 1) // self._block_tokens
        chain.hash_chain.extend(token_ids)
        parent: CacheEntry | None = None
        for index in range(num_blocks):
            entry = self._entry_by_hash.get(chain.hash_chain.hashes[index])
            if entry is None or entry.parent is not parent or entry.tokens != self._tokens(token_ids, index):
                return
            yield entry
            parent = entry

    def find(self, block_hash: BlockHash) -> CacheEntry | None:
        """The entry of that name; whether it is the prefix that somebody means is for `walk` to say."""
        return self._entry_by_hash.get(block_hash)

    def insert(self, chain: PrefixChain, token_ids: TokenIds, block: int) -> CacheEntry | None:
        """Moves the chain on by one block. Gives the new entry, or None when an equal one exists or it cannot be told
        apart from another prefix (the chain then stops publishing)."""
        parent = chain.last_entry
        block_hash = chain.hash_chain.hashes[chain.num_blocks]
        tokens = self._tokens(token_ids, chain.num_blocks)
        existing = self._entry_by_hash.get(block_hash)
        if existing is not None:
            if existing.parent is not parent or existing.tokens != tokens:
                chain.can_publish = False
                return None
            chain.last_entry = existing
            chain.num_blocks += 1
            return None
        entry = CacheEntry(block_hash, tokens, block, parent)
        self._entry_by_hash[block_hash] = entry
        if parent is not None:
            parent.children.add(entry)
        chain.last_entry = entry
        chain.num_blocks += 1
        return entry

    def remove(self, entry: CacheEntry) -> list[CacheEntry]:
        """Takes an entry out with all that hangs on it. Gives what left, parents first."""
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        removed = [entry]
        for current in removed:  # grows while it is read
            current.is_live = False
            del self._entry_by_hash[current.block_hash]
            removed.extend(current.children)
            current.children.clear()
        return removed

    def clear(self) -> list[CacheEntry]:
        """Takes every entry out."""
        removed = list(self._entry_by_hash.values())
        self._entry_by_hash.clear()
        for entry in removed:
            entry.is_live = False
            entry.children.clear()
        return removed

    def _tokens(self, token_ids: TokenIds, index: int) -> bytes:
        return token_ids[index * self._block_tokens : (index + 1) * self._block_tokens].tobytes()


def proof_of(parent: BlockHash, tokens: bytes) -> bytes:
    """Of a block with these token ids behind the block of that hash (CHAIN_START: behind none)."""
    return parent + tokens
