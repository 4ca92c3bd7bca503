"""What the target writes and how it is kept: turns of serving, whole shards, a vocabulary that covers them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from cluster.tokenizer import load_tokenizer
from drafter_training.conversations import ChatFormat, hold_conversations, write_user_turns
from drafter_training.draft_vocabulary import choose_vocabulary, count_tokens, coverage
from drafter_training.feature_store import FeatureStore
from drafter_training.instructions import FOLLOW_UPS, instructions
from drafter_training.target_parts import read_target_parts
from drafter_training.turn_writer import TurnPrompt, TurnWriter, WrittenTurn

REFERENCE = json.loads((Path(__file__).parents[1] / "exactness" / "greedy_reference.json").read_text())


def test_instructions_are_many_different_and_seeded() -> None:
    some = list(itertools.islice(instructions(5), 600))
    assert len(set(some)) == 600
    assert some == list(itertools.islice(instructions(5), 600))
    assert len(set(some) & set(itertools.islice(instructions(6), 600))) < 300


def written(num_tokens: int, seed: int) -> WrittenTurn:
    taps = torch.randn(num_tokens, 2, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return WrittenTurn(TurnPrompt((1, 2, 90 + seed), 0.0, seed, 64), tuple(range(num_tokens)), True, taps)


def test_a_shard_comes_back_turn_by_turn(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features")
    turns = [written(3, 0), written(5, 1)]
    assert store.save(7, turns) == 8
    assert store.shards() == [7]
    assert store.has(7)
    assert not store.has(0)
    assert store.count_rows(7) == 8
    for stored, turn in zip(store.load(7), turns, strict=True):
        assert stored.token_ids.tolist() == [turn.prompt.token_ids[-1], *turn.token_ids]
        assert torch.equal(stored.taps, turn.taps)
    store.discard()
    assert store.shards() == []


def test_vocabulary_takes_what_is_said_most_then_early_merges() -> None:
    counts = count_tokens([torch.tensor([5, 5, 5, 9, 9, 30])], vocab_size=40)
    vocabulary = choose_vocabulary(counts, 6)
    assert vocabulary.tolist() == [5, 9, 30, 0, 1, 2]
    assert coverage(vocabulary[:2], counts) == pytest.approx(5 / 6)
    assert len(choose_vocabulary(counts, 99)) == 40


@pytest.fixture(scope="module")
def writer(default_model_path: Path) -> TurnWriter:
    end_ids = load_tokenizer(default_model_path).end_ids
    return TurnWriter(
        default_model_path, end_ids, dtype="float32", batch_size=3, max_context_tokens=192, tap_layers=(9, 29)
    )


@pytest.mark.model
@pytest.mark.timeout(300)
def test_greedy_turns_are_those_of_transformers_and_taps_belong_to_them(
    writer: TurnWriter, default_model_path: Path
) -> None:
    rows = REFERENCE[:4]
    prompts = [TurnPrompt(tuple(row["prompt"]), 0.0, index, 12) for index, row in enumerate(rows)]
    key = next(name for name in rows[0] if name != "prompt")
    target = read_target_parts(default_model_path)
    turns = {turn.prompt.seed: turn for turn in writer.write(prompts)}
    assert len(turns) == len(rows)
    for index, row in enumerate(rows):
        turn = turns[index]
        assert list(turn.token_ids) == list(row[key])[: len(turn.token_ids)]
        logits = target.normed(turn.taps[:, -1]) @ target.head.T
        # Kept in bfloat16: a near tie may turn.
        assert (logits.argmax(-1) == torch.tensor(turn.token_ids)).float().mean() > 0.7


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_sampled_turn_does_not_depend_on_its_neighbours(writer: TurnWriter) -> None:
    prompts = [TurnPrompt(tuple(row["prompt"]), 0.8, 40 + index, 8) for index, row in enumerate(REFERENCE[:5])]
    together = {turn.prompt: turn.token_ids for turn in writer.write(prompts)}
    assert {turn.prompt: turn.token_ids for prompt in prompts for turn in writer.write([prompt])} == together


@pytest.mark.model
@pytest.mark.timeout(300)
def test_conversations_answer_what_is_asked(writer: TurnWriter, default_model_path: Path) -> None:
    chat = ChatFormat(load_tokenizer(default_model_path))
    header = chat.user_header()
    prompt = chat.encode([{"role": "user", "content": "Hello there"}])
    assert prompt[: len(header)] == header
    asked = ["Say one word."]
    answers = list(hold_conversations(writer, chat, asked, seed=3, max_answer_tokens=6))
    assert len(answers) >= len(asked)
    texts = [chat.decode(turn.prompt.token_ids) for turn in answers]
    assert all(any(text in prompt_text for prompt_text in texts) for text in asked)
    turns = list(write_user_turns(writer, chat, 2, seed=1))
    assert len(turns) == len(set(turns))
    assert all(follow_up for follow_up in FOLLOW_UPS)
