"""A gRPC client of the public front, through the committed stubs."""

from __future__ import annotations

import threading

import grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 240.0


def generate_tokens(
    address: str,
    prompt: list[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    has_begun: threading.Event | None = None,
) -> tuple[list[int], inference_pb2.GenerateResponse]:
    """The generated token ids (end-of-sequence passed over) and the last message with usage and timeline.

    `has_begun` is set when the first tokens are here.
    """
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        return_timeline=True,
    )
    token_ids: list[int] = []
    response = inference_pb2.GenerateResponse()
    with grpc.insecure_channel(address) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=CALL_TIMEOUT_S):
            for choice in response.choices:
                token_ids.extend(choice.token_ids)
            if has_begun is not None and token_ids:
                has_begun.set()
    return token_ids, response
