"""Traffic whose prefixes are more than one worker's cache holds, and less than all of them together: caches evict.

    tenants     conversations, each behind its tenant's system prompt; a few tenants have most of them
    library     questions about documents, a few of which most are about

A request is made of messages whose content is an id and a length; `as_planned` writes them as text. Everything is drawn
from the seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.workload import ChatMessage, PlannedRequest

OUTPUT_TOKENS = 16
# Of all tenants or documents, the one of rank r is asked for in proportion to 1 / r ** ZIPF_EXPONENT.
ZIPF_EXPONENT = 0.9
NUM_TENANTS = 40
SYSTEM_TOKENS = (400, 1600)
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = (100, 800), (30, 200), (50, 250)
MEAN_TURNS, MAX_TURNS, MEAN_THINK_S = 5.0, 12, 8.0  # the longest is some 7,000 tokens
NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 80, (1000, 3000), (20, 80)


@dataclass(frozen=True, slots=True)
class Content:
    """One message: equal ids are equal text."""

    role: str
    content_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CrowdedRequest:
    """One request, in order of time."""

    time_s: float
    session: int
    turn: int
    messages: tuple[Content, ...]


def tenants(rate_per_s: float, duration_s: float, seed: int) -> list[CrowdedRequest]:
    """Conversations of several turns begin at random; a turn comes when the one before was read and answered.

    `rate_per_s`: requests of all kinds, once as many conversations end as begin.
    """
    chance = random.Random(f"tenants {seed}")
    ids = itertools.count()
    systems = [Content("system", next(ids), chance.randint(*SYSTEM_TOKENS)) for _ in range(NUM_TENANTS)]
    begins = _poisson(chance, rate_per_s / MEAN_TURNS, duration_s)
    # (time, conversation, turn, history): the heap keeps turns of all conversations in order of time.
    due: list[tuple[float, int, int, tuple[Content, ...]]] = [
        (time_s, number, 0, (_zipf(chance, systems),)) for number, time_s in enumerate(begins)
    ]
    heapq.heapify(due)
    requests = []
    while due:
        time_s, number, turn, history = heapq.heappop(due)
        if time_s >= duration_s:
            continue
        said = Content("user", next(ids), chance.randint(*(TURN_TOKENS if turn else FIRST_TOKENS)))
        messages = (*history, said)
        requests.append(CrowdedRequest(time_s, number, turn, messages))
        answer = Content("assistant", next(ids), chance.randint(*ANSWER_TOKENS))
        if turn + 1 < MAX_TURNS and chance.random() >= 1 / MEAN_TURNS:
            later_s = time_s + 1.0 + chance.expovariate(1 / MEAN_THINK_S)
            heapq.heappush(due, (later_s, number, turn + 1, (*messages, answer)))
    return requests


def library(rate_per_s: float, duration_s: float, seed: int) -> list[CrowdedRequest]:
    """`session` is the document's rank."""
    chance = random.Random(f"library {seed}")
    ids = itertools.count()
    documents = [Content("user", next(ids), chance.randint(*DOCUMENT_TOKENS)) for _ in range(NUM_DOCUMENTS)]
    requests = []
    for time_s in _poisson(chance, rate_per_s, duration_s):
        document = _zipf(chance, documents)
        question = Content("user", next(ids), chance.randint(*QUESTION_TOKENS))
        requests.append(CrowdedRequest(time_s, document.content_id, 0, (document, question)))
    return requests


SHAPES = {"tenants": tenants, "library": library}


def as_planned(requests: Sequence[CrowdedRequest], words: Sequence[str]) -> list[PlannedRequest]:
    """As text of single-token words."""
    texts: dict[int, ChatMessage] = {}

    def written(content: Content) -> ChatMessage:
        message = texts.get(content.content_id)
        if message is None:
            chosen = random.Random(f"text {content.content_id}").choices(words, k=content.num_tokens)
            message = texts[content.content_id] = ChatMessage(content.role, " ".join(chosen))
        return message

    return [
        PlannedRequest(
            index=index,
            intended_s=request.time_s,
            output_tokens=OUTPUT_TOKENS,
            messages=tuple(map(written, request.messages)),
            shareable_tokens=None,
            session=request.session,
            turn=request.turn,
        )
        for index, request in enumerate(requests)
    ]


def _poisson(chance: random.Random, rate_per_s: float, duration_s: float) -> Iterator[float]:
    time_s = chance.expovariate(rate_per_s)
    while time_s < duration_s:
        yield time_s
        time_s += chance.expovariate(rate_per_s)


def _zipf(chance: random.Random, ranked: Sequence[Content]) -> Content:
    weights = [1 / rank**ZIPF_EXPONENT for rank in range(1, len(ranked) + 1)]
    return chance.choices(ranked, weights)[0]
