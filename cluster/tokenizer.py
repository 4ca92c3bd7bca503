"""Text to token ids and back, for a model in a GGUF file or in a safetensors directory.

    load_tokenizer(path) -> Tokenizer: encode, decode, the bytes of each token, special and end-of-sequence tokens

The ids equal those of `transformers` (tests compare them). It knows nothing of requests, and holds no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as TokenizerBackend

from cluster.ascii_words import ascii_word_pattern
from cluster.errors import StartupError
from cluster.tokenizer_directory import read_directory_tokenizer
from cluster.tokenizer_gguf import read_gguf_tokenizer
from cluster.vocabulary import Vocabulary


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads at once."""

    def __init__(self, backend: TokenizerBackend, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self.vocabulary = vocabulary
        self.token_bytes = vocabulary.token_bytes
        self.special_ids = vocabulary.special_ids
        self.end_ids = vocabulary.end_ids

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits: a token id is below it."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids. A chat template writes the special tokens itself: pass False for its output."""
        # The batch call lets other threads run meanwhile; the plain `encode` holds the interpreter's lock.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.vocabulary.bos_id is not None:
            ids.insert(0, self.vocabulary.bos_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Never raises for bytes that are no UTF-8: they become U+FFFD."""
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special_ids)]
        text = b"".join([self.token_bytes[token_id] for token_id in kept]).decode("utf-8", "replace")
        is_prefixed = self.vocabulary.has_space_prefix and text.startswith(" ")
        return text[1:] if is_prefixed else text

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of several texts, without special tokens of their own."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def special_tokens_that_cut(self) -> dict[str, int]:
        """Special tokens by their text, when the tokenizer finds them before it looks at anything else; else none."""
        special = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token_id in self.special_ids
        }
        is_plain = all(
            not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            for token in self._backend.get_added_tokens_decoder().values()
        )
        return special if is_plain else {}

    def added_tokens(self) -> frozenset[str]:
        """Texts that are found whole before anything else is looked at: special ones and others."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    def ascii_word_pattern(self) -> re.Pattern[str] | None:
        """What cuts ASCII text without added tokens into the words that are tokenised each by itself; None: unknown."""
        return ascii_word_pattern(self._backend)

    def token_text(self, token_id: int) -> str:
        """One token as readable text; half a character shows as U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", "replace")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`: a GGUF file, or a directory with tokenizer.json and config.json.

    Raises `StartupError` when it is missing, unreadable or of a kind that is not supported.
    """
    # A batch, of one text as well, would be handed to a pool of threads: on a busy machine that takes longer than the
    # work (6 ms measured for 0.2 ms of it). Whoever has many texts has threads of their own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if path.is_dir():
        return Tokenizer(*read_directory_tokenizer(path))
    if path.is_file():
        return Tokenizer(*read_gguf_tokenizer(path))
    raise StartupError(f"no model at {path}: give a GGUF file or a directory with tokenizer.json", param="model")
