"""Guessed tokens of one sequence: a chain or a tree, as a step verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
MAX_TREE_NODES = 30  # with the last known token, 31 rows fit into the bits of an int32 without its sign


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens after the last known one.

    `parents[i]` is the index of token i's parent among the drafts, ROOT for a child of the last known token; parents
    stand before their children. A chain is the tree in which each token's parent is the one before it.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> Draft:
        return cls(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1)))

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} drafts have {len(self.parents)} parents")
        if self.is_chain:
            return
        if len(self) > MAX_TREE_NODES:
            raise ValueError(f"a tree of {len(self)} drafts: at most {MAX_TREE_NODES} can be verified at once")
        if any(not ROOT <= parent < index for index, parent in enumerate(self.parents)):
            raise ValueError(f"a draft's parent must stand before it: {self.parents}")
        if len(set(zip(self.parents, self.token_ids, strict=True))) < len(self.token_ids):
            raise ValueError("two drafts of one parent are the same token")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def num_levels(self) -> int:
        """How many tokens it guesses ahead at most."""
        return len(self) if self.is_chain else max(self.depths())

    def first(self, num_drafts: int) -> Draft:
        """The draft cut to its first tokens."""
        return self if num_drafts >= len(self) else Draft(self.token_ids[:num_drafts], self.parents[:num_drafts])

    def first_chain(self) -> Draft:
        """Only each token's first child, from the last known token down: for whoever verifies no trees."""
        if self.is_chain:
            return self
        token_ids: list[int] = []
        node = ROOT
        while node in self.parents:
            node = self.parents.index(node)
            token_ids.append(self.token_ids[node])
        return Draft.chain(token_ids)

    def depths(self) -> tuple[int, ...]:
        """Distance of each draft from the last known token: its position is that token's position plus this."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from below the last known token down to `node`; none for ROOT."""
        token_ids: list[int] = []
        while node != ROOT:
            token_ids.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(token_ids))

    def tree_masks(self) -> tuple[int, ...]:
        """For the row of the last known token and of each draft: bit j says that it sees the j-th of those rows."""
        masks = [1]
        for index, parent in enumerate(self.parents):
            masks.append(masks[parent + 1] | 1 << (index + 1))
        return tuple(masks)


NO_DRAFT = Draft()
