"""Segments that were tokenised before: the same ids as tokenising at once, bounded, and each owner's own."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerBackend

from cluster.chat_template import ChatTemplate
from cluster.tokenizer import Tokenizer, load_tokenizer
from router.api_types import ChatPrompt
from router.known_segments import CHARS_OF_A_SEGMENT, KnownSegments
from router.prompt_encoder import MAX_LOOKED_UP_CHARS, PromptEncoder
from tests.router.byte_tokenizer import byte_tokenizer, chatml

PIECES = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "user\n",
        "\n",
        " ",
        "  a",
        "word ",
        "don't",
        "12345",
        "日本",
        "\u0301",
    ),
    *("<|im_", "start|>", "x" * 200, "The quick brown fox jumps over the lazy dog. " * 5),
)


def encoded(known: KnownSegments, tokenizer: Tokenizer, text: str, owner: bytes = b"a") -> list[int]:
    segments = known.split(text, owner)
    return known.join(segments, tokenizer.encode_each(segments.missing))


def texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(PIECES, k=chance.randrange(1, 12))) for _ in range(count)]


def test_ids_are_those_of_the_whole_text_known_or_not() -> None:
    tokenizer = byte_tokenizer()
    known = KnownSegments(tokenizer)
    for text in [*texts(200, 1), *texts(200, 1)]:
        assert encoded(known, tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.model
def test_so_they_are_with_the_default_models_merges(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    known = KnownSegments(tokenizer)
    for text in [*texts(150, 2), *texts(150, 2)]:
        assert encoded(known, tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


def test_what_was_tokenised_is_not_tokenised_again() -> None:
    tokenizer = byte_tokenizer()
    known = KnownSegments(tokenizer)
    turns = [f"<|im_start|>user\n{letter * 100}<|im_end|>\n" for letter in "abc"]
    encoded(known, tokenizer, "".join(turns[:2]))
    assert known.split("".join(turns), b"a").missing == ["user\n" + "c" * 100]


def test_s_b41_another_owners_segments_are_not_known() -> None:
    """Else how long a first token takes would tell what others said."""
    tokenizer = byte_tokenizer()
    known = KnownSegments(tokenizer)
    encoded(known, tokenizer, "s" * 100, b"a")
    assert known.split("s" * 100, b"a").missing == []
    assert known.split("s" * 100, b"b").missing == ["s" * 100]


def test_the_segment_that_was_not_used_for_longest_goes_first() -> None:
    tokenizer = byte_tokenizer()
    known = KnownSegments(tokenizer, max_chars=2 * (100 + CHARS_OF_A_SEGMENT))
    for letter in "ab":
        encoded(known, tokenizer, letter * 100)
    encoded(known, tokenizer, "a" * 100)
    encoded(known, tokenizer, "c" * 100)
    assert [bool(known.split(letter * 100, b"a").missing) for letter in "abc"] == [False, True, False]
    encoded(known, tokenizer, "d" * 1000)  # larger than all of it: not kept, and nothing goes for it
    assert [bool(known.split(letter * 100, b"a").missing) for letter in "acd"] == [False, False, True]


@pytest.mark.parametrize("kind", ["strips", "joins"])
def test_a_tokenizer_that_does_not_cut_there_is_asked_for_whole_texts(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = _other_tokenizer(kind)
    known = KnownSegments(tokenizer)
    text = " a <|im_end|> b" * 20
    assert known.split(text, b"a").missing == [text]
    for text in texts(50, 3):
        assert encoded(known, tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
    assert [record.levelname for record in caplog.records] == (["WARNING"] if kind == "joins" else [])


def _other_tokenizer(kind: str) -> Tokenizer:
    """One whose special tokens eat the spaces beside them, and one whose normalizer looks at the text's beginning."""
    plain = byte_tokenizer()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocabulary = {piece: number for number, piece in enumerate(["▁", *map(chr, range(32, 127))])}
    backend = TokenizerBackend(models.BPE(vocab=vocabulary, merges=[], unk_token=" "))
    if kind == "joins":
        backend.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.add_special_tokens([AddedToken(name, special=True, lstrip=kind == "strips") for name in names])
    ids = [token_id for name in names if (token_id := backend.token_to_id(name)) is not None]
    return Tokenizer(backend, dataclasses.replace(plain.vocabulary, special_ids=frozenset(ids)))


async def test_a_conversation_that_goes_on_has_the_ids_it_would_have_anyhow() -> None:
    tokenizer = byte_tokenizer(8192)
    template = chatml()
    encoder = PromptEncoder(tokenizer, template)
    messages: list[dict[str, str]] = []
    for turn in range(6):
        messages += [{"role": "user", "content": f"{turn} " * 300}, {"role": "assistant", "content": " fine" * 40}]
        for owner in (b"a", b"b"):
            token_ids = await encoder.encode(ChatPrompt(tuple(messages), ()), owner)
            assert token_ids == tokenizer.encode(template.render(messages), add_special_tokens=False)
    encoder.close()


@pytest.mark.model
async def test_a_prompt_has_the_same_ids_when_its_words_are_looked_up(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    source = tokenizer.vocabulary.chat_template
    assert source is not None
    template = ChatTemplate(source, tokenizer.vocabulary.special_tokens)
    plain, learned = PromptEncoder(tokenizer, template), PromptEncoder(tokenizer, template)
    await asyncio.wrap_future(learned.learn_words())
    assert learned._words is not None
    looked_up, tokenised = "word " * (MAX_LOOKED_UP_CHARS // 5 - 20), "word " * MAX_LOOKED_UP_CHARS
    assert learned._looked_up([looked_up], len(looked_up)) is not None
    assert learned._looked_up([tokenised], len(tokenised)) is None
    for content in ("The quick brown fox doesn't jump 12 times.  It sleeps.", "die Größe", looked_up, tokenised, ""):
        prompt = ChatPrompt(({"role": "user", "content": content},))
        assert await learned.encode(prompt, b"a") == await plain.encode(prompt, b"a")
    plain.close()
    learned.close()
