"""The EAGLE drafter: what it computes is what was trained, and what it keeps of a request can be rolled back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import EngineFailure
from cluster.identity import RequestId
from decode_worker.speculation.eagle import (
    BLOCKS_PER_CONTEXT,
    MAX_UNREAD,
    WINDOW_BLOCKS,
    EagleDrafter,
)
from decode_worker.speculation.eagle_layer import BLOCK_TOKENS, Reading, open_eagle_layer
from engine import native_library
from engine.draft import Draft
from engine.model_config import ModelConfig
from tests.decode_worker.speculation.trained_files import eagle_file, random_eagle

CONFIG = ModelConfig(
    architecture="llama", name="small", vocab_size=211, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, rope_theta=10000.0, rms_norm_eps=1e-5, max_model_len=1024, tie_embeddings=True,
    fingerprint="small-target",
)  # fmt: skip
TAPS = (0, 1, 3)
DRAFT_VOCAB = 96
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
MODEL = random_eagle(CONFIG, TAPS)
FILE = eagle_file(MODEL, TAPS, DRAFT_VOCAB)
EMBEDDING = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
HEAD = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native_library, "is_available", lambda: False)
    return str(request.param)


def drafter(max_contexts: int = 2) -> EagleDrafter:
    layer = open_eagle_layer(FILE, CONFIG, EMBEDDING, HEAD, max_contexts * BLOCKS_PER_CONTEXT)
    return EagleDrafter(layer, max_contexts, min_confidence=0.0, min_reach=0.0)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Hidden states of rows and the tokens that they chose."""
    source = np.random.default_rng(seed)
    taps = source.standard_normal((count, len(TAPS), CONFIG.hidden_size)).astype(np.float32)
    return taps, source.integers(0, CONFIG.vocab_size, count).tolist()


def trained_guesses(taps: np.ndarray, next_ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The chain behind the last row by the module that is trained, and the first guess's logits."""
    guesses: list[int] = []
    first_logits = torch.empty(0)
    for _ in range(count):
        ids = [*next_ids, *guesses]
        padded = np.concatenate((taps, np.zeros((len(guesses), *taps.shape[1:]), np.float32)))
        with torch.no_grad():
            states = MODEL.unrolled(
                torch.from_numpy(padded)[None], EMBEDDING[ids].float()[None], num_guesses=len(guesses) + 1
            )
            logits = MODEL.normed(states[-1][0, -1]) @ HEAD[FILE.vocabulary].float().T
        if not guesses:
            first_logits = logits
        guesses.append(int(FILE.vocabulary[logits.argmax()]))
    return guesses, first_logits


def test_guesses_are_those_of_the_trained_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch and float32, exactly: the chain of the unrolled training is the chain of serving."""
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    for seed in range(6):
        taps, next_ids = rows(5 + 7 * seed, seed)
        eagle = drafter()
        for start in range(0, len(next_ids), 4):
            eagle.sampled(R1, 10 + start, next_ids[start : start + 4], taps[start : start + 4])
            tree = eagle.propose(R1, 15)
        chain = tree.first_chain()
        assert len(chain) >= 3
        expected, _ = trained_guesses(taps, next_ids, len(chain))
        assert chain == Draft.chain(expected)
        eagle.close()


def test_native_layer_in_4_bits_is_close_to_the_trained_module() -> None:
    taps, next_ids = rows(20)
    layer = open_eagle_layer(FILE, CONFIG, EMBEDDING, HEAD, BLOCKS_PER_CONTEXT)
    blocks = np.arange(BLOCKS_PER_CONTEXT, dtype=np.int32)
    ((law,),) = layer.guess([Reading(blocks, 0, 0, taps, next_ids, 1)], 0.0)
    _, logits = trained_guesses(taps, next_ids, 1)
    expected = torch.softmax(logits, 0)
    likeliest = expected.topk(3)
    assert list(law.token_ids) == FILE.vocabulary[likeliest.indices].tolist()
    assert np.abs(np.log(law.probabilities) - likeliest.values.log().numpy()).max() < 0.15 * logits.std().item()
    layer.close()


def test_s29_rejected_guesses_leave_no_trace(backend: str) -> None:
    """Guessing between the rows, or not at all until the end: the same guesses after the same rows."""
    taps, next_ids = rows(30)
    guessing, silent = drafter(), drafter()
    for start in range(0, 30, 3):
        for eagle in (guessing, silent):
            eagle.sampled(R1, start, next_ids[start : start + 3], taps[start : start + 3])
        if start % 2 == 0:
            guessing.propose(R1, 4)
    assert guessing.propose(R1, 4) == silent.propose(R1, 4)


def test_s30_after_full_acceptance_the_drafter_has_read_every_token(backend: str) -> None:
    """The bonus token's row comes with the next step: read rows are always all rows but none twice."""
    taps, next_ids = rows(12)
    eagle = drafter()
    eagle.sampled(R1, 0, next_ids[:1], taps[:1])
    eagle.propose(R1, 3)
    eagle.sampled(R1, 1, next_ids[1:5], taps[1:5])  # three accepted and the bonus token
    eagle.propose(R1, 3)
    assert eagle._contexts[R1].num_cached == 5
    again = drafter()
    again.sampled(R1, 0, next_ids[:5], taps[:5])
    eagle.sampled(R1, 5, next_ids[5:6], taps[5:6])
    again.sampled(R1, 5, next_ids[5:6], taps[5:6])
    assert eagle.propose(R1, 3) == again.propose(R1, 3)


def test_s25_no_new_rows_no_guess(backend: str) -> None:
    eagle = drafter()
    assert eagle.propose(R1, 3) == Draft()
    taps, next_ids = rows(1)
    eagle.sampled(R1, 0, next_ids, taps)
    assert len(eagle.propose(R1, 3)) == 3
    assert eagle.propose(R1, 3) == Draft()


def test_s26_a_long_answer_slides_through_the_window(backend: str) -> None:
    """Past the window's end only its newest tokens count, as for one that starts there."""
    count = 3 * WINDOW_BLOCKS * BLOCK_TOKENS
    taps, next_ids = rows(count)
    eagle = drafter(max_contexts=1)
    for start in range(0, count, 8):
        eagle.sampled(R1, start, next_ids[start : start + 8], taps[start : start + 8])
        assert len(eagle.propose(R1, 15)) == 15
        assert eagle._contexts[R1].num_cached <= WINDOW_BLOCKS * BLOCK_TOKENS
    assert sorted(eagle._contexts[R1].blocks.tolist()) == list(range(BLOCKS_PER_CONTEXT))


def test_rows_that_were_not_seen_start_a_new_context(backend: str) -> None:
    taps, next_ids = rows(10)
    eagle, fresh = drafter(), drafter()
    eagle.sampled(R1, 0, next_ids[:4], taps[:4])
    eagle.propose(R1, 2)
    eagle.sampled(R1, 7, next_ids[7:], taps[7:])
    fresh.sampled(R1, 7, next_ids[7:], taps[7:])
    assert eagle.propose(R1, 3) == fresh.propose(R1, 3)


def test_unread_rows_are_bounded(backend: str) -> None:
    taps, next_ids = rows(3 * MAX_UNREAD)
    eagle, fresh = drafter(), drafter()
    for index, token_id in enumerate(next_ids):
        eagle.sampled(R1, index, [token_id], taps[index : index + 1])
    for index, token_id in enumerate(next_ids[-MAX_UNREAD:]):
        fresh.sampled(R1, index, [token_id], taps[index - MAX_UNREAD :][:1])
    assert eagle.propose(R1, 3) == fresh.propose(R1, 3)


def test_more_requests_than_contexts_take_the_one_that_rested_longest(backend: str) -> None:
    taps, next_ids = rows(2)
    eagle = drafter(max_contexts=2)
    for request_id in (R1, R2, R3):
        eagle.sampled(request_id, 0, next_ids, taps)
    assert eagle.propose(R1, 2) == Draft()
    assert eagle.propose(R2, 2) == eagle.propose(R3, 2)
    eagle.forget(R2)
    eagle.forget(R2)
    eagle.sampled(R1, 0, next_ids, taps)
    assert len(eagle.propose(R1, 2)) == 2


def test_requests_do_not_see_each_other(backend: str) -> None:
    taps, next_ids = rows(12)
    other_taps, other_ids = rows(12, seed=9)
    alone, beside = drafter(), drafter()
    for start in range(0, 12, 2):
        part = slice(start, start + 2)
        alone.sampled(R1, start, next_ids[part], taps[part])
        beside.sampled(R2, start, other_ids[part], other_taps[part])
        beside.sampled(R1, start, next_ids[part], taps[part])
        beside.propose(R2, 4)
        assert alone.propose(R1, 4) == beside.propose(R1, 4)


def test_it_keeps_copies_of_the_rows(backend: str) -> None:
    """The engine's array is overwritten by its next step."""
    taps, next_ids = rows(3)
    eagle, other = drafter(), drafter()
    other.sampled(R1, 0, next_ids, taps)
    mutable = taps.copy()
    eagle.sampled(R1, 0, next_ids, mutable)
    mutable[:] = np.nan
    assert eagle.propose(R1, 3) == other.propose(R1, 3)


def test_an_unsure_guess_ends_the_chain(backend: str) -> None:
    layer = open_eagle_layer(FILE, CONFIG, EMBEDDING, HEAD, 2 * BLOCKS_PER_CONTEXT)
    strict = EagleDrafter(layer, 2, min_confidence=1.1, min_reach=1.1)
    taps, next_ids = rows(3)
    strict.sampled(R1, 0, next_ids, taps)
    assert strict.propose(R1, 3) == Draft()


def test_target_with_biases_and_an_untied_head_gets_a_plain_layer(backend: str) -> None:
    config = replace(CONFIG, architecture="qwen2", attention_bias=True, tie_embeddings=False)
    layer = open_eagle_layer(FILE, config, EMBEDDING, HEAD, BLOCKS_PER_CONTEXT)
    eagle = EagleDrafter(layer, 1, min_confidence=0.0, min_reach=0.0)
    taps, next_ids = rows(3)
    eagle.sampled(R1, 0, next_ids, taps)
    assert len(eagle.propose(R1, 2)) == 2


def test_requests_that_guess_together_guess_what_each_would_alone(backend: str) -> None:
    """Different numbers of rows, cached tokens and guesses in one call; one has nothing new, one was never seen."""
    together, alone = drafter(max_contexts=4), drafter(max_contexts=4)
    unseen = RequestId("unseen")
    for turn in range(4):
        for place, request_id in enumerate((R1, R2, R3)):
            count = 1 + (turn + 2 * place) % 5
            taps, next_ids = rows(count, seed=10 * turn + place)
            for eagle in (together, alone):
                position = 0 if eagle._contexts.get(request_id) is None else eagle._contexts[request_id].target_position
                eagle.sampled(request_id, position, next_ids, taps)
        wanted = [(R1, 4), (R2, 1), (R3, 7)]
        drafts = together.propose_all([*wanted, (unseen, 3)])
        assert drafts == [*(alone.propose(request_id, count) for request_id, count in wanted), Draft()]
        assert [len(draft) for draft in drafts] == [4, 1, 7, 0]
        assert together.propose_all(wanted) == [Draft()] * 3, "no new rows, no guess"


def test_confidences_fall_and_are_those_of_each_branch(backend: str) -> None:
    taps, next_ids = rows(6)
    eagle = drafter()
    eagle.sampled(R1, 0, next_ids, taps)
    draft = eagle.propose(R1, 9)
    assert len(draft.confidences) == len(draft) == 9
    assert list(draft.confidences) == sorted(draft.confidences, reverse=True)
    for confidence, parent in zip(draft.confidences, draft.parents, strict=True):
        assert 0 < confidence <= (1.0 if parent < 0 else draft.confidences[parent])
    assert draft.first(3).confidences == draft.confidences[:3]
    assert len(draft.first_chain().confidences) == len(draft.first_chain())


def test_native_code_refuses_what_points_outside() -> None:
    layer = open_eagle_layer(FILE, CONFIG, EMBEDDING, HEAD, BLOCKS_PER_CONTEXT)
    taps, next_ids = rows(2)
    blocks = np.arange(BLOCKS_PER_CONTEXT, dtype=np.int32)
    for reading, message in (
        (Reading(blocks, 0, 0, taps, [next_ids[0], CONFIG.vocab_size], 1), "token id is outside"),
        (Reading(blocks, len(blocks) * BLOCK_TOKENS - 2, 0, taps, next_ids, 2), "longer than its block table"),
        (Reading(blocks + 1, 17 * BLOCK_TOKENS, 0, taps, next_ids, 1), "outside the KV pool"),
        (Reading(blocks, 0, -1, taps, next_ids, 1), "position is negative"),
    ):
        with pytest.raises(EngineFailure, match=message):
            layer.guess([reading], 0.0)
    assert layer.guess([], 0.0) == []
    layer.close()
