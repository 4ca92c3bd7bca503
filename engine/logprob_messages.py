"""Logprobs as they cross a process boundary: `engine.request`'s values to and from `common.proto`'s messages."""

from __future__ import annotations

from tandem.v1 import common_pb2

from engine.request import PositionLogprobs, TopLogprob


def to_message(logprobs: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_token_to_message(logprobs.chosen), top=[_token_to_message(top) for top in logprobs.top]
    )


def from_message(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_token_from_message(message.chosen), top=tuple(_token_from_message(top) for top in message.top)
    )


def _token_to_message(token: TopLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def _token_from_message(message: common_pb2.TokenLogprob) -> TopLogprob:
    return TopLogprob(message.token_id, message.logprob, message.rank)
