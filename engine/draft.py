"""Guessed tokens of one sequence: a chain or a tree, as a step verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = -1
MAX_TREE_NODES = 30  # with the last known token, 31 rows fit into the bits of an int32 without its sign


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """The distribution that a guess was drawn from, the very numbers: `token_ids` [n] ascending, `probabilities` [n]
    float64, which need not add up to 1: their sum is what counts as the whole."""

    token_ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    @classmethod
    def of(cls, probabilities: npt.NDArray[np.float64]) -> DraftLaw:
        """From the probabilities of the whole vocabulary."""
        token_ids = np.flatnonzero(probabilities)
        return cls(token_ids, probabilities[token_ids] / probabilities.sum())

    def probability(self, token_id: int) -> float:
        place = int(np.searchsorted(self.token_ids, token_id))
        is_there = place < len(self.token_ids) and self.token_ids[place] == token_id
        return float(self.probabilities[place]) if is_there else 0.0

    def draw(self, uniform: float) -> int:
        """The token in whose part of [0, 1) the number falls."""
        edges = np.cumsum(self.probabilities)
        place = int(np.searchsorted(edges, uniform * edges[-1], side="right"))
        return int(self.token_ids[min(place, len(edges) - 1)])

    def without(self, token_id: int) -> DraftLaw | None:
        """What a sibling of `token_id` is drawn from; None when nothing is left."""
        stays = self.token_ids != token_id
        rest = self.probabilities[stays]
        total = rest.sum()
        return DraftLaw(self.token_ids[stays], rest / total) if total > 0 else None


class DrawnGuess(NamedTuple):
    token_id: int
    law: DraftLaw  # that it was drawn from, given its siblings before it


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens after the last known one.

    `parents[i]` is the index of token i's parent among the drafts, ROOT for a child of the last known token; parents
    stand before their children. A chain is the tree in which each token's parent is the one before it.

    `laws`: what each token was drawn from, given the tokens above it and its siblings before it; a drafter may stop
    behind a drawn token, but never leave one out because of what it is. Empty: the guesses were not drawn, and `match`
    verifies them.

    `confidences`: how likely the drafter thinks each token and all above it, falling. Empty: it cannot say.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: tuple[DraftLaw, ...] = field(default=(), compare=False)
    confidences: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def chain(cls, token_ids: Sequence[int], laws: Sequence[DraftLaw] = ()) -> Draft:
        return cls(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1)), tuple(laws))

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} drafts have {len(self.parents)} parents")
        if self.laws and len(self.laws) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} drafts were drawn from {len(self.laws)} laws")
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
        if num_drafts >= len(self):
            return self
        return Draft(
            self.token_ids[:num_drafts],
            self.parents[:num_drafts],
            self.laws[:num_drafts],
            self.confidences[:num_drafts],
        )

    def first_chain(self) -> Draft:
        """Only each token's first child, from the last known token down: for whoever verifies no trees."""
        if self.is_chain:
            return self
        nodes: list[int] = []
        node = ROOT
        while node in self.parents:
            node = self.parents.index(node)
            nodes.append(node)
        return Draft(
            tuple(self.token_ids[node] for node in nodes),
            tuple(range(ROOT, len(nodes) - 1)),
            tuple(self.laws[node] for node in nodes) if self.laws else (),
            tuple(self.confidences[node] for node in nodes) if self.confidences else (),
        )

    def drawn_children(self, node: int, num_drafts: int) -> tuple[DrawnGuess, ...]:
        """The drawn tokens right below `node` among the first `num_drafts`, in the order of their drawing."""
        if not self.laws:
            return ()
        children = [child for child in range(node + 1, num_drafts) if self.parents[child] == node]
        return tuple(DrawnGuess(self.token_ids[child], self.laws[child]) for child in children)

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
