"""A tokenizer from the metadata of a GGUF file.

`tokenizer.ggml.model` says which kind: `gpt2` is byte-level BPE, cut by the pattern that `tokenizer.ggml.pre` names;
`llama` is SentencePiece BPE, whose merges follow from the pieces' scores.
Patterns' source: llama.cpp (llama-vocab.cpp), as the models' own tokenizer.json files have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerBackend

from cluster.errors import StartupError, shown
from cluster.gguf_file import GgufFile
from cluster.token_bytes import (
    SENTENCEPIECE_SPACE,
    byte_level_bytes,
    is_byte_level_piece,
    sentencepiece_bytes,
    spell_bytes,
)
from cluster.vocabulary import Vocabulary

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_NAMES = ("gpt-2", "gpt2", "default", "olmo", "mpt", "jais", "phi-2")
_SINGLE_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_SPLIT_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "pixtral", "lfm2"), _LLAMA3_PATTERN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_PATTERN),
    "tekken": _TEKKEN_PATTERN,
}
# These look a whole word up in the vocabulary before they merge its pieces.
_WHOLE_WORD_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})
_COMPOSED_UNICODE = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})  # NFC before splitting

# Where a file names the end tokens; instruction-tuned models end a turn with one and a text with another.
_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_gguf_tokenizer(path: Path) -> tuple[TokenizerBackend, Vocabulary]:
    """Raises `StartupError` for a file without a tokenizer, or with one of an unsupported kind."""
    with GgufFile(path) as file:
        kind = file.value("tokenizer.ggml.model")
        pieces: list[str] = file.value("tokenizer.ggml.tokens", [])
        if not pieces:
            raise StartupError(f"{path} holds no tokenizer: convert the model again with its vocabulary", param="model")
        if kind == "gpt2":
            backend = _byte_level_backend(file, pieces)
        elif kind == "llama":
            backend = _sentencepiece_backend(file, pieces)
        else:
            raise StartupError(
                f"{path} has a tokenizer of kind {shown(kind)}; supported: 'gpt2' (byte-level BPE), 'llama'",
                param="model",
            )
        types: list[int] = file.value("tokenizer.ggml.token_type", [])
        _add_whole_tokens(backend, pieces, types, is_byte_level=kind == "gpt2")
        return backend, _vocabulary(file, pieces, types, kind)


def _byte_level_backend(file: GgufFile, pieces: list[str]) -> TokenizerBackend:
    name = file.value("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges", [])]
    model = models.BPE(
        vocab={_as_byte_level(piece): token_id for token_id, piece in enumerate(pieces)},
        merges=merges,
        ignore_merges=name in _WHOLE_WORD_FIRST,
    )
    backend = TokenizerBackend(model)
    if name in _COMPOSED_UNICODE:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _byte_level_pre_tokenizer(name, file.path)
    return backend


def _as_byte_level(piece: str) -> str:
    """Some converters wrote control tokens as plain text into a byte-level vocabulary."""
    return piece if is_byte_level_piece(piece) else spell_bytes(piece.encode())


def _byte_level_pre_tokenizer(name: str, path: Path) -> Any:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SINGLE_DIGIT_NAMES:
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    elif name in _SPLIT_PATTERNS:
        steps = [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        known = ", ".join(sorted((*_GPT2_NAMES, *_SINGLE_DIGIT_NAMES, *_SPLIT_PATTERNS)))
        raise StartupError(
            f"{path}: tokenizer.ggml.pre is {shown(name)}; supported: {known}; or use the model's safetensors",
            param="model",
        )
    return pre_tokenizers.Sequence(steps)


def _sentencepiece_backend(file: GgufFile, pieces: list[str]) -> TokenizerBackend:
    scores: list[float] = file.value("tokenizer.ggml.scores", [])
    if len(scores) != len(pieces):
        raise StartupError(
            f"{file.path}: {len(pieces)} tokens and {len(scores)} scores: convert the model again", param="model"
        )
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    unknown_id = file.value("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=ids,
        merges=_merges_from_scores(ids, scores),
        unk_token=pieces[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = TokenizerBackend(model)
    has_prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SENTENCEPIECE_SPACE, prepend_scheme="first" if has_prefix else "never", split=False
    )
    return backend


def _merges_from_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece always joins the pair whose joint piece has the best score: the same as merges in that order."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_whole_tokens(backend: TokenizerBackend, pieces: list[str], types: list[int], *, is_byte_level: bool) -> None:
    """Control and user-defined tokens are found whole in a text, before it is cut into pieces."""
    control, user_defined = [], []
    for piece, token_type in zip(pieces, types, strict=False):
        if is_byte_level and not is_byte_level_piece(piece):
            continue  # a mislabelled piece: adding it would give it a second id
        if token_type == _CONTROL:
            control.append(AddedToken(piece, normalized=False, special=True))
        elif token_type == _USER_DEFINED:
            user_defined.append(AddedToken(piece, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def _vocabulary(file: GgufFile, pieces: list[str], types: list[int], kind: str) -> Vocabulary:
    is_sentencepiece = kind == "llama"
    to_bytes = sentencepiece_bytes if is_sentencepiece else byte_level_bytes
    end_ids = {file.value(f"tokenizer.ggml.{key}") for key in _END_TOKEN_KEYS} - {None}
    named = {name: file.value(f"tokenizer.ggml.{key}") for name, key in _NAMED_TOKENS.items()}
    bos_id = named["bos_token"]
    # Older SentencePiece files have no flag, and begin every text with BOS.
    adds_bos = file.value("tokenizer.ggml.add_bos_token", is_sentencepiece)
    architecture = file.value("general.architecture")
    return Vocabulary(
        token_bytes=tuple(to_bytes(piece) for piece in pieces),
        special_ids=frozenset(i for i, token_type in enumerate(types) if token_type == _CONTROL),
        end_ids=frozenset(end_ids),
        special_tokens={name: pieces[token_id] for name, token_id in named.items() if token_id is not None},
        chat_template=file.value("tokenizer.chat_template"),
        has_space_prefix=is_sentencepiece and file.value("tokenizer.ggml.add_space_prefix", True),
        bos_id=bos_id if adds_bos else None,
        max_model_len=file.value(f"{architecture}.context_length", 0),
    )
