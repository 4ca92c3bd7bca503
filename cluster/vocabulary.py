"""What a model's files say about its tokens, whichever kind of file it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's files say about its tokens."""

    token_bytes: tuple[bytes, ...]  # by token id, for every row of the model's logits
    special_ids: frozenset[int]  # control tokens: not part of the text unless asked for
    end_ids: frozenset[int]  # generation ends at any of these
    special_tokens: dict[str, str]  # `bos_token`, `eos_token`, ...: what chat templates refer to
    chat_template: str | None
    # SentencePiece writes a space before the first word of a text; decoding a whole text drops it again.
    has_space_prefix: bool
    # Put in front of a prompt that is not a chat; None where the backend's own post-processor does it, or nobody.
    bos_id: int | None
    max_model_len: int  # context length that the model was made for
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # as its file says; a GGUF file has none
