"""A tokenizer from the JSON files of a safetensors directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend

from cluster.errors import StartupError
from cluster.token_bytes import byte_level_bytes, sentencepiece_bytes
from cluster.vocabulary import Vocabulary

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_directory_tokenizer(directory: Path) -> tuple[TokenizerBackend, Vocabulary]:
    """Raises `StartupError` when a file is missing or unreadable, or the tokenizer is of an unsupported kind."""
    backend = _read_backend(directory / "tokenizer.json")
    config = _read_json(directory / "config.json", is_required=True)
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    generation_config = _read_json(directory / "generation_config.json")
    decoder_types = _decoder_types(backend)
    if "ByteLevel" in decoder_types:
        is_sentencepiece = False
    elif "ByteFallback" in decoder_types or "Metaspace" in decoder_types:
        is_sentencepiece = True
    else:
        raise StartupError(
            f"{directory}: tokenizer.json decodes by {sorted(decoder_types)}; supported: ByteLevel, ByteFallback",
            param="model",
        )
    # The model's logits may have more rows than the tokenizer has tokens.
    text_config = config.get("text_config", config)
    num_rows = max(int(text_config.get("vocab_size", 0)), backend.get_vocab_size(with_added_tokens=True))
    special_tokens = _special_tokens(tokenizer_config)
    added = backend.get_added_tokens_decoder()
    vocabulary = Vocabulary(
        token_bytes=_token_bytes(backend, num_rows, is_sentencepiece),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        end_ids=_end_ids(backend, (generation_config, text_config), special_tokens),
        special_tokens=special_tokens,
        chat_template=_chat_template(directory, tokenizer_config),
        has_space_prefix="Strip" in decoder_types or "Metaspace" in decoder_types,
        bos_id=None,  # the post-processor in tokenizer.json adds it
        max_model_len=int(text_config.get("max_position_embeddings", 0)),
        generation_config=generation_config,
    )
    return backend, vocabulary


def _read_backend(path: Path) -> TokenizerBackend:
    if not path.is_file():
        raise StartupError(f"{path.parent} has no tokenizer.json: download the model again", param="model")
    try:
        backend = TokenizerBackend.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise StartupError(f"{path} is not a tokenizer: {error}: download the model again", param="model") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path, *, is_required: bool = False) -> dict[str, Any]:
    if not is_required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}: download the model again", param="model") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object: download the model again", param="model")
    return value


def _decoder_types(backend: TokenizerBackend) -> set[str]:
    if backend.decoder is None:
        return set()
    description = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in description.get("decoders", [description])}


def _token_bytes(backend: TokenizerBackend, num_rows: int, is_sentencepiece: bool) -> tuple[bytes, ...]:
    to_bytes = sentencepiece_bytes if is_sentencepiece else byte_level_bytes
    table = [b""] * num_rows
    for piece, token_id in backend.get_vocab(with_added_tokens=True).items():
        table[token_id] = to_bytes(piece)
    for token_id, token in backend.get_added_tokens_decoder().items():
        table[token_id] = token.content.encode()  # literal text in either kind
    return tuple(table)


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`"<s>"`, or the older `{"content": "<s>", ...}`."""
    tokens = {}
    for name in _NAMED_TOKENS:
        value = tokenizer_config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _end_ids(
    backend: TokenizerBackend, configs: tuple[dict[str, Any], ...], special_tokens: dict[str, str]
) -> frozenset[int]:
    """The first configuration that names end tokens, and the tokenizer's own end-of-sequence token."""
    ends: set[int] = set()
    for config in configs:
        named = config.get("eos_token_id")
        if named is not None:
            ends.update(named if isinstance(named, list) else [named])
            break
    own_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    return frozenset(ends if own_id is None else ends | {own_id})


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """In a file of its own in newer models; a list of named templates in a few older ones."""
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text("utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
