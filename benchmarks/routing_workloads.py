"""Traffic that shows what a router is worth: prompts with shared beginnings, as chat messages, drawn from a seed.

    documents     each of many long documents is asked about several times, in no order
    system        one long system prompt for everybody, then each one's own question
    chats         conversations whose every turn begins with all turns before

Words are those of the tokenizer that are one token each, so lengths in words are lengths in tokens, about.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.workload import ChatMessage, PlannedRequest
from cluster.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Traffic:
    """How much of it, and how fast. Lengths in tokens."""

    rate_per_s: float
    output_tokens: int = 16
    seed: int = 1


def single_token_words(tokenizer: Tokenizer, count: int = 4000) -> list[str]:
    """Words that are one token with the space before them."""
    texts = (tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size))
    words = [text[1:] for text in texts if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()]
    return [word for word in words if len(word) > 3][:count]


def documents(
    words: Sequence[str],
    traffic: Traffic,
    *,
    num_documents: int,
    times_each: int,
    document_tokens: int,
    own_tokens: int,
) -> list[PlannedRequest]:
    """`session` is the document's number."""
    chance = random.Random(traffic.seed)
    texts = [_text(chance, words, document_tokens) for _ in range(num_documents)]
    order = [number for number in range(num_documents) for _ in range(times_each)]
    chance.shuffle(order)
    prompts = ((number, f"{texts[number]} {_text(chance, words, own_tokens)}") for number in order)
    return _planned(chance, traffic, ((number, 0, (ChatMessage("user", text),)) for number, text in prompts))


def shared_system_prompt(
    words: Sequence[str], traffic: Traffic, *, num_requests: int, system_tokens: int, own_tokens: int
) -> list[PlannedRequest]:
    """`session` is the request's number."""
    chance = random.Random(traffic.seed)
    system = ChatMessage("system", _text(chance, words, system_tokens))
    asked = ((number, _text(chance, words, own_tokens)) for number in range(num_requests))
    return _planned(chance, traffic, ((number, 0, (system, ChatMessage("user", text))) for number, text in asked))


def chats(
    words: Sequence[str], traffic: Traffic, *, num_chats: int, num_turns: int, first_tokens: int, turn_tokens: int
) -> list[PlannedRequest]:
    """Turns of all chats in rounds, each in an order of its own. Answers are made up here: they are what the next turn
    begins with. In one order for all rounds, taking workers in turn would lead every chat back to its own worker.
    """
    chance = random.Random(traffic.seed)
    histories: list[tuple[ChatMessage, ...]] = [
        (ChatMessage("user", _text(chance, words, first_tokens)),) for _ in range(num_chats)
    ]
    turns = []
    for turn in range(num_turns):
        for number in chance.sample(range(num_chats), num_chats):
            history = histories[number]
            turns.append((number, turn, history))
            answer = ChatMessage("assistant", _text(chance, words, turn_tokens))
            histories[number] = (*history, answer, ChatMessage("user", _text(chance, words, turn_tokens)))
    return _planned(chance, traffic, turns)


def _planned(
    chance: random.Random, traffic: Traffic, prompts: Iterable[tuple[int, int, tuple[ChatMessage, ...]]]
) -> list[PlannedRequest]:
    """Poisson arrivals."""
    at_s, planned = 0.0, []
    for index, (session, turn, messages) in enumerate(prompts):
        at_s += chance.expovariate(traffic.rate_per_s)
        planned.append(
            PlannedRequest(
                index=index,
                intended_s=at_s,
                output_tokens=traffic.output_tokens,
                messages=messages,
                shareable_tokens=None,
                session=session,
                turn=turn,
            )
        )
    return planned


def _text(chance: random.Random, words: Sequence[str], num_words: int) -> str:
    return " ".join(chance.choices(words, k=num_words))
