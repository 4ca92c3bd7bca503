"""Log-probabilities in OpenAI's three shapes: of a chat, of a completion, and vLLM's `prompt_logprobs`.

A worker sends for each position the chosen token and the `k` most likely. JSON has no infinity: a probability of zero
is written as -9999, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.v1 import common_pb2

from cluster.tokenizer import Tokenizer
from router.choice_text import ShownToken

LOWEST_LOGPROB = -9999.0


TokenName = Callable[[int], str]


def id_as_name(token_id: int) -> str:
    """A token by its id, for `return_tokens_as_token_ids`: the texts of two tokens may be the same."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ShownToken], num_top: int, name: TokenName | None = None
) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""
    content = []
    for token in tokens:
        position = token.logprobs
        entry = _chat_entry(tokenizer, token.token_id, _chosen(position), name)
        top = position.top[:num_top] if position is not None else ()
        entry["top_logprobs"] = [_chat_entry(tokenizer, item.token_id, item.logprob, name) for item in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[ShownToken],
    num_top: int,
    *,
    prompt_ids: Sequence[int] = (),
    prompt_positions: Sequence[common_pb2.PositionLogprobs] = (),
    text_start: int = 0,
    name: TokenName | None = None,
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`, with the echoed prompt first when its ids are given."""
    name = name or tokenizer.token_text
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    offset = 0
    for token_id, position in zip(prompt_ids, aligned(prompt_ids, prompt_positions), strict=True):
        text = tokenizer.token_text(token_id)
        names.append(name(token_id))
        values.append(None if position is None else _finite(position.chosen.logprob))
        tops.append(None if position is None else _top_by_name(name, position, num_top))
        offsets.append(offset)
        offset += len(text)
    for token in tokens:
        names.append(name(token.token_id))
        values.append(_chosen(token.logprobs))
        tops.append(None if token.logprobs is None else _top_by_name(name, token.logprobs, num_top))
        offsets.append(text_start + token.start)
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops if num_top > 0 else None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    positions: Sequence[common_pb2.PositionLogprobs],
    num_top: int,
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token `{"<id>": {logprob, rank, decoded_token}}`; the first has none."""
    rows: list[dict[str, Any] | None] = []
    for position in aligned(prompt_ids, positions):
        if position is None:
            rows.append(None)
            continue
        shown = [position.chosen, *(item for item in position.top[:num_top])]
        rows.append(
            {
                str(item.token_id): {
                    "logprob": _finite(item.logprob),
                    "rank": item.rank,
                    "decoded_token": tokenizer.token_text(item.token_id),
                }
                for item in shown
            }
        )
    return rows


def aligned(
    prompt_ids: Sequence[int], positions: Sequence[common_pb2.PositionLogprobs]
) -> list[common_pb2.PositionLogprobs | None]:
    """One entry for each prompt token. Nothing precedes the first, so it has no probability."""
    known = list(positions[-(len(prompt_ids) - 1) :]) if len(prompt_ids) > 1 else []
    missing = len(prompt_ids) - len(known)
    return [*[None] * missing, *known]


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float, name: TokenName | None) -> dict[str, Any]:
    return {
        "token": (name or tokenizer.token_text)(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes[token_id]),
    }


def _top_by_name(name: TokenName, position: common_pb2.PositionLogprobs, num_top: int) -> dict[str, float]:
    """Two tokens with the same text (parts of characters) share a key: the more likely one keeps it."""
    top: dict[str, float] = {}
    for item in (*position.top[:num_top], position.chosen):
        top.setdefault(name(item.token_id), _finite(item.logprob))
    return top


def _chosen(position: common_pb2.PositionLogprobs | None) -> float:
    return LOWEST_LOGPROB if position is None else _finite(position.chosen.logprob)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
