"""What a request must fulfil before an engine takes it: no path into the engine skips these limits."""

from __future__ import annotations

from cluster.errors import ContextLengthExceeded, InvalidRequest
from cluster.sampling_params import SamplingParams
from engine.drafting import Speculator
from engine.request import EngineLimits, EngineRequest

SPECULATION_OFF = ("", "auto", "off")


def check_request(
    request: EngineRequest, vocab_size: int, limits: EngineLimits, *, has_grammars: bool, speculator: Speculator | None
) -> int:
    """The KV tokens of its longest life. Raises `InvalidRequest` and `ContextLengthExceeded`."""
    params, token_ids = request.sampling.checked(vocab_size), request.token_ids
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise InvalidRequest(
            f"the prompt has a token id outside [0, {vocab_size})", param="prompt", code="invalid_token_id"
        )
    if not 0 <= request.num_generated < min(num_tokens, params.max_tokens):
        raise InvalidRequest(
            f"num_generated is {request.num_generated}: must leave a prompt and stay below max_tokens",
            param="num_generated",
        )
    if params.guide is not None and not has_grammars:
        raise InvalidRequest("this engine has no constrained decoding", param="response_format")
    if not request.hold_blocks:  # drafts are the decode side's
        _check_speculation(params, speculator)
    if num_tokens >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens and the context {limits.max_model_len}: no room for a token",
            param="prompt",
        )
    max_tokens = 1 if request.hold_blocks else params.max_tokens - request.num_generated
    return min(num_tokens + max_tokens, limits.max_model_len) - 1


def _check_speculation(params: SamplingParams, speculator: Speculator | None) -> None:
    if speculator is not None:
        speculator.check(params)
    elif params.speculation not in SPECULATION_OFF:
        raise InvalidRequest(f"this engine has no drafter {params.speculation!r}", param="speculation")
