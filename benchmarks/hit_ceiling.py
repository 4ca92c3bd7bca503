"""The most cache hits and the shortest prefills that any routing could have: what a router's are to be read against."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benchmarks.mock_server import BLOCK_TOKENS
from benchmarks.workload import PlannedRequest
from cluster.block_hash import HashScope
from cluster.chat_template import ChatTemplate
from cluster.identity import BlockHash
from cluster.tokenizer import Tokenizer
from router.cache_view import prompt_hashes

Prompt = tuple[int, list[BlockHash]]  # its number of tokens, and the names of its full blocks


def prompts_of(planned: Iterable[PlannedRequest], tokenizer: Tokenizer) -> list[Prompt]:
    """As the model's template writes them."""
    vocabulary = tokenizer.vocabulary
    template = ChatTemplate(vocabulary.chat_template or "", vocabulary.special_tokens)
    prompts = []
    for request in planned:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        token_ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
        prompts.append((len(token_ids), prompt_hashes(token_ids, HashScope(b"", "mock", BLOCK_TOKENS))))
    return prompts


def most_hits(prompts: Sequence[Prompt], num_blocks: int | None = None) -> float:
    """The share of tokens found in one cache that everybody shares, of so many blocks; None: nothing is evicted."""
    num_tokens = sum(length for length, _ in prompts)
    return sum(found_tokens(prompts, num_blocks)) / num_tokens if num_tokens else 0.0


def quickest_ms(prompts: Sequence[Prompt], prefill: tuple[float, float, float], num_blocks: int) -> list[float]:
    """Each prompt's prefill as it would be if nobody waited and everybody shared one cache of so many blocks: no
    routing is faster. `prefill` are coefficients as workers have them."""
    c0, c1, c2 = prefill
    times_ms = []
    for (length, _), cached in zip(prompts, found_tokens(prompts, num_blocks), strict=True):
        uncached = length - cached
        times_ms.append(c0 + c1 * uncached + c2 * uncached * (cached + uncached / 2))
    return times_ms


def found_tokens(prompts: Sequence[Prompt], num_blocks: int | None = None) -> list[int]:
    """Of each prompt, how many tokens such a cache has.

    Least recently used blocks go first, the end of a prompt before its beginning, as in a worker.
    """
    cache: OrderedDict[BlockHash, None] = OrderedDict()
    found = []
    for length, hashes in prompts:
        reusable = hashes[: (length - 1) // BLOCK_TOKENS]
        found.append(BLOCK_TOKENS * next((at for at, name in enumerate(reusable) if name not in cache), len(reusable)))
        for name in reversed(hashes):
            cache[name] = None
            cache.move_to_end(name)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return found


def num_distinct_blocks(prompts: Iterable[Prompt]) -> int:
    """What a cache would have to hold to evict nothing."""
    return len({name for _, hashes in prompts for name in hashes})
