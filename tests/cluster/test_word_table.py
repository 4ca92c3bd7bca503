"""Looked-up words have the tokenizer's own ids, whatever stands around them; where `re` cannot say how, no table."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerBackend

from cluster import word_table
from cluster.ascii_words import ascii_word_pattern
from cluster.token_bytes import byte_level_bytes
from cluster.tokenizer import Tokenizer, load_tokenizer
from cluster.tokenizer_gguf import _LLAMA3_PATTERN, _QWEN2_PATTERN, _TEKKEN_PATTERN
from cluster.vocabulary import Vocabulary
from cluster.word_table import MAX_UNKNOWN, build_word_table

TEXT = "It's the 1st of 2024: they'll have\n\n  been\tthere,  I'd SAY'VE...  (x_y == 3.14159)  and  so on\r\n "
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
CUTS = {
    "gpt-2": _GPT2,
    "single digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama 3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"), _BYTE_LEVEL]),
    "qwen 2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"), _BYTE_LEVEL]),
}


def _tokenizer(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    backend = TokenizerBackend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=450, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(
        [TEXT * 3, "the quick brown fox and the lazy dog were there and have been so"] * 5, trainer
    )
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    pieces = [piece for piece, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    spellings = tuple(piece.encode() if piece in added else byte_level_bytes(piece) for piece in pieces)
    end_id = backend.get_vocab()["<|end|>"]
    return Tokenizer(backend, Vocabulary(spellings, frozenset({end_id}), frozenset(), {}, None, False, None, 8192))


def _texts(count: int) -> list[str]:
    chance = random.Random(5)
    parts = [*re.findall(r"\s+|\S+", TEXT), *" \t\n\r'\"0189aZ._-\x00\x1c\x1f\x7f", "the", " lazy", "<", "tool>"]
    return ["".join(chance.choices(parts, k=chance.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("name", CUTS)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    tokenizer = _tokenizer(CUTS[name], normalizers.NFC() if name == "qwen 2" else None)
    table = build_word_table(tokenizer)
    assert table is not None
    assert len(table) > 40
    looked_up = [text for text in _texts(600) if table.encode(text, 1.0) is not None]
    assert len(looked_up) > 500
    for text in looked_up:
        assert table.encode(text, 1.0) == tokenizer.encode(text, add_special_tokens=False), repr(text)


@pytest.mark.model
def test_so_they_are_with_the_default_models_vocabulary(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    table = build_word_table(tokenizer)
    assert table is not None
    assert len(table) > 40_000
    for text in _texts(600):
        assert table.encode(text, 1.0) in (None, tokenizer.encode(text, add_special_tokens=False)), repr(text)


def test_texts_that_are_better_tokenised_whole_are_left_alone() -> None:
    table = build_word_table(_tokenizer(CUTS["llama 3"]))
    assert table is not None
    assert table.encode("the dog") is not None
    assert table.encode("the dög") is None
    assert table.encode("the <tool> dog") is None
    assert table.encode("zyxw vuts qpon") is None  # no word of them is a token


def test_words_that_have_to_be_asked_for_are_few_however_long_the_text_is() -> None:
    table = build_word_table(_tokenizer(CUTS["llama 3"]))
    assert table is not None
    unknown, known = " zyxw", " the lazy dog" * 500
    assert table.encode(known + unknown * MAX_UNKNOWN) is not None
    assert table.encode(known + unknown * (MAX_UNKNOWN + 1)) is None


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (None, None),
        (_BYTE_LEVEL, None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Metaspace(), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_TEKKEN_PATTERN), "isolated"), _BYTE_LEVEL]), None),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\h+"), "isolated"), _BYTE_LEVEL]), None),
        (_GPT2, normalizers.Lowercase()),
    ],
)
def test_cuts_that_are_not_known_have_no_pattern(pre_tokenizer: Any, normalizer: Any) -> None:
    backend = TokenizerBackend(models.BPE())
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    assert ascii_word_pattern(backend) is None


def test_a_pattern_that_cuts_otherwise_than_the_tokenizer_gives_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer(CUTS["llama 3"])
    other = ascii_word_pattern(_tokenizer(CUTS["gpt-2"])._backend)
    monkeypatch.setattr(tokenizer, "ascii_word_pattern", lambda: other)
    warned: list[str] = []
    monkeypatch.setattr(word_table._log, "warning", warned.append)
    assert build_word_table(tokenizer) is None
    assert warned
