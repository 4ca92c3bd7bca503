"""A tokenizer for the hash runner's 50 tokens: JSON's signs, some letters and digits, a few longer pieces."""

from __future__ import annotations

from tokenizers import Tokenizer as TokenizerBackend
from tokenizers import models

from cluster.tokenizer import Tokenizer
from cluster.vocabulary import Vocabulary
from tests.engine.hash_runner import VOCAB

PIECES = [*'{}[]":, \n-0123456789abcdefghijk', "true", "false", "null", '": ', '{"', ", ", "ab", "abc", "12", "}}"]
END_IDS = frozenset({48, 49})


class LetterTokenizer(Tokenizer):
    """Takes the longest piece that fits."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((piece for piece in PIECES if text.startswith(piece)), key=len)
            ids.append(PIECES.index(piece))
            text = text[len(piece) :]
        return ids


def letter_tokenizer() -> Tokenizer:
    """Ids below 48 are text (the last of them empty), 48 and 49 end tokens."""
    pieces = [piece.encode() for piece in PIECES]
    token_bytes = (*pieces, *[b""] * (VOCAB - 2 - len(pieces)), b"<end>", b"<stop>")
    vocabulary = Vocabulary(
        token_bytes=token_bytes,
        special_ids=END_IDS,
        end_ids=END_IDS,
        special_tokens={},
        chat_template=None,
        has_space_prefix=False,
        bos_id=None,
        max_model_len=4096,
    )
    return LetterTokenizer(TokenizerBackend(models.BPE()), vocabulary)


def text_of(token_ids: list[int]) -> str:
    return letter_tokenizer().decode(token_ids)
