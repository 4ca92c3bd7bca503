"""What bytes each token stands for: the table that turns token ids into text without a tokenizer library's decoder.

A token is a piece of bytes, not of characters: an emoji may be four tokens. Concatenating these bytes and decoding them
as UTF-8 is all there is to detokenising, in O(1) for each token.

    byte-level BPE (GPT-2, Llama 3, Qwen)   each character of the piece is one byte, in GPT-2's spelling of bytes
    SentencePiece (Llama 2, Mistral, Gemma) `▁` is a space, `<0x0A>` is that byte, all else is UTF-8
"""

from __future__ import annotations

import re

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_byte_spelling() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies. Source: GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelling = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelling]
    spelling.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return spelling


BYTE_SPELLING = _gpt2_byte_spelling()
_SPELLED_BYTE = {character: byte for byte, character in BYTE_SPELLING.items()}


def is_byte_level_piece(piece: str) -> bool:
    """Whether every character of it stands for a byte."""
    return all(character in _SPELLED_BYTE for character in piece)


def spell_bytes(data: bytes) -> str:
    """The piece of a byte-level vocabulary that stands for these bytes."""
    return "".join(BYTE_SPELLING[byte] for byte in data)


def byte_level_bytes(piece: str) -> bytes:
    """A piece with a character outside the spelling is literal text: an added token such as `<|im_end|>` in CJK."""
    try:
        return bytes([_SPELLED_BYTE[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    byte_piece = _BYTE_PIECE.fullmatch(piece)
    if byte_piece is not None:
        return bytes([int(byte_piece.group(1), 16)])
    return piece.replace(SENTENCEPIECE_SPACE, " ").encode()
