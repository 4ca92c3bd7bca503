"""What every drafter is. What it gives, a chain or a tree of guessed tokens, is `engine.draft.Draft`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.draft import Draft


class Drafter(Protocol):
    """Guesses for many requests. Called from the engine thread; forgets a request when told, never by itself.

    Implementations: `ngram.NgramDrafter`, `suffix.SuffixDrafter`, `eagle.EagleDrafter`, `medusa.MedusaDrafter`,
    `draft_model.DraftModelDrafter`.
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
class GuessesTogether(Protocol):
    """A drafter that reads its weights once for many requests."""

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        """`Drafter.propose` for each request, which stands there once, and its number of guesses."""
        ...


@runtime_checkable
class KnowsConfidence(Protocol):
    """A drafter whose drafts carry `confidences`: how much of them is verified is decided by these."""

    min_confidence: float  # tokens below it are not proposed


@runtime_checkable
class LooksUp(Protocol):
    """A drafter that finds the context's end in what stood before: the longer the match, the surer its guesses."""

    def match_length(self, request_id: RequestId) -> int:
        """Of the last guess, which was not empty: so many tokens stood before it both times."""
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


@runtime_checkable
class FollowsSampling(Protocol):
    """A drafter that guesses with the request's own temperature, filters, penalties and noise."""

    def starts(self, request_id: RequestId, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Before `begin`: how the target samples this request."""
        ...
