"""What a drafter gives: a chain or a tree of guessed tokens; and what every drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId

ROOT = -1
MAX_TREE_NODES = 31  # a row's ancestors fit into the bits of one int32


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
        if any(not ROOT <= parent < index for index, parent in enumerate(self.parents)):
            raise ValueError(f"a draft's parent must stand before it: {self.parents}")
        if len(set(zip(self.parents, self.token_ids, strict=True))) < len(self.token_ids):
            raise ValueError("two drafts of one parent are the same token")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def depths(self) -> tuple[int, ...]:
        """Distance of each draft from the last known token: its position is that token's position plus this."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def tree_masks(self) -> tuple[int, ...]:
        """For the row of the last known token and of each draft: bit j says that it sees the j-th of those rows."""
        masks = [1]
        for index, parent in enumerate(self.parents):
            masks.append(masks[parent + 1] | 1 << (index + 1))
        return tuple(masks)


class Drafter(Protocol):
    """Guesses for many requests. Called from the engine thread; forgets a request when told, never by itself.

    Implementations: `ngram.NgramDrafter`, `suffix.SuffixDrafter`, `eagle.EagleDrafter`, `medusa.MedusaDrafter`.
    """

    name: str

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """A request starts with these tokens, prompt and what is generated already."""
        ...

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """The target said these tokens."""
        ...

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        """At most `num_drafts` guesses; an empty draft when nothing is worth guessing."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """The request has ended; unknown ids change nothing."""
        ...


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter that guesses from the target's hidden states, too."""

    tap_layers: tuple[int, ...]  # whose states it reads, ascending

    def sampled(
        self, request_id: RequestId, position: int, token_ids: Sequence[int], taps: npt.NDArray[np.float32]
    ) -> None:
        """The target said `token_ids` at `position` and behind, out of `taps` [tokens, tap layers, hidden].

        The array is the caller's and changes later.
        """
        ...
