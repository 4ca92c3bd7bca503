"""Sampling parameters on the wire: what goes in comes out, every field of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cluster.sampling_params import SamplingParams

# Of every field another value than its default.
OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 1.0, "frequency_penalty": -1.0,
    "repetition_penalty": 1.5, "logit_bias": {3: 2.0}, "seed": 2**63, "choice_index": 2, "min_tokens": 1,
    "stop_token_ids": (1, 2), "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 4, "json_schema": "{}",
    "regex": "a", "grammar": "b", "allowed_token_ids": (5, 6), "bad_words": ((5,), (1, 2, 3)), "speculation": "ngram",
    "num_drafts": 2,
}  # fmt: skip


def test_every_field_travels() -> None:
    assert set(OTHER_VALUES) == {field.name for field in fields(SamplingParams)} - {"max_tokens"}
    for name, value in OTHER_VALUES.items():
        params = SamplingParams(max_tokens=8, **{name: value})
        assert params != SamplingParams(max_tokens=8), name
        assert SamplingParams.from_proto(params.to_proto()) == params, name
