"""One tree out of the guesses of two drafters, and what of it was whose.

Where both guess the same token it is surer than either says: it fails only if both are wrong. Where they differ, both
tokens stand side by side; were the drafters surer of them than can be, both are taken back to a sum of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.draft import ROOT, Draft


def mixed(drafts: Sequence[Draft], num_nodes: int) -> Draft:
    """The surest tokens of all drafts, each of which knows its confidences, as one tree; the surest first."""
    parents: list[int] = []
    token_ids: list[int] = []
    chances: list[float] = []  # of each node where its parent holds
    places: dict[tuple[int, int], int] = {}
    for draft in drafts:
        own: dict[int, int] = {ROOT: ROOT}  # where the draft's nodes are in the tree
        for node, (parent, token_id) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
            above = draft.confidences[parent] if parent != ROOT else 1.0
            chance = min(1.0, draft.confidences[node] / above) if above else 0.0
            edge = (own[parent], token_id)
            if edge in places:
                own[node] = places[edge]
                chances[own[node]] = 1 - (1 - chances[own[node]]) * (1 - chance)
                continue
            own[node] = places[edge] = len(token_ids)
            parents.append(edge[0])
            token_ids.append(token_id)
            chances.append(chance)
    confidences = _along_branches(parents, chances)
    order = sorted(range(len(token_ids)), key=lambda node: (-confidences[node], node))[:num_nodes]
    index_of = {node: index for index, node in enumerate(order)} | {ROOT: ROOT}
    return Draft(
        tuple(token_ids[node] for node in order),
        tuple(index_of[parents[node]] for node in order),
        confidences=tuple(confidences[node] for node in order),
    )


def _along_branches(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """How likely each node holds with all above it; parents stand before their children."""
    sums: dict[int, float] = {}
    for parent, chance in zip(parents, chances, strict=True):
        sums[parent] = sums.get(parent, 0.0) + chance
    confidences: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        above = confidences[parent] if parent != ROOT else 1.0
        confidences.append(above * chance / max(1.0, sums[parent]))
    return confidences


class Share(NamedTuple):
    """Of a verified tree, what one drafter had guessed: so many levels of it, so many tokens of the accepted branch."""

    num_levels: int
    num_accepted: int


def share_of(own: Draft, verified: Draft, accepted: Sequence[int]) -> Share:
    """`accepted`: nodes of `verified`, one below the other."""
    edges = {edge: node for node, edge in enumerate(zip(own.parents, own.token_ids, strict=True))}
    places = {ROOT: ROOT}  # nodes of the verified tree that `own` has, too
    for node, (parent, token_id) in enumerate(zip(verified.parents, verified.token_ids, strict=True)):
        if parent in places and (places[parent], token_id) in edges:
            places[node] = edges[places[parent], token_id]
    depths = verified.depths()
    return Share(
        max((depths[node] for node in places if node != ROOT), default=0), sum(node in places for node in accepted)
    )
