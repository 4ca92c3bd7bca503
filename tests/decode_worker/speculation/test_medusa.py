"""The Medusa drafter: what it computes is what was trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.identity import RequestId
from decode_worker.speculation.drafter_file import DrafterFile
from decode_worker.speculation.medusa import MedusaDrafter
from drafter_training.medusa_model import MedusaModel
from engine import native_library
from engine.draft import Draft
from tests.decode_worker.speculation.test_eagle import CONFIG, HEAD
from tests.decode_worker.speculation.trained_files import medusa_file

R1, R2 = RequestId("r1"), RequestId("r2")
FILE = medusa_file(CONFIG, draft_vocab=96)
FINAL_NORM = torch.linspace(0.5, 2.0, CONFIG.hidden_size)


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native_library, "is_available", lambda: False)
    return str(request.param)


def drafter(file: DrafterFile = FILE, max_contexts: int = 2) -> MedusaDrafter:
    return MedusaDrafter(file, CONFIG, HEAD, FINAL_NORM, max_contexts, min_confidence=0.0)


def states(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 1, CONFIG.hidden_size)).astype(np.float32)


def test_guesses_are_those_of_the_trained_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    model = MedusaModel(CONFIG, 3)
    model.load_state_dict(dict(FILE.tensors))
    for seed in range(8):
        taps = states(2, seed)
        medusa = drafter()
        medusa.sampled(R1, 4, [7, 8], taps)
        residual = torch.from_numpy(taps[-1, 0])
        with torch.no_grad():
            hidden = torch.nn.functional.rms_norm(residual, residual.shape, FINAL_NORM, CONFIG.rms_norm_eps)
            expected = [
                int(FILE.vocabulary[(state @ HEAD[FILE.vocabulary].float().T).argmax()])
                for state in model.states(hidden)
            ]
        chain = medusa.propose(R1, 15).first_chain()
        assert chain == Draft.chain(expected)


def test_only_the_newest_state_counts(backend: str) -> None:
    once, twice = drafter(), drafter()
    twice.sampled(R1, 0, [1], states(1, seed=5))
    for medusa in (once, twice):
        medusa.sampled(R1, 1, [2, 3], states(2))
    assert once.propose(R1, 2) == twice.propose(R1, 2)
    assert twice.propose(R1, 2) == Draft()


def test_an_unsure_guess_ends_the_chain(backend: str) -> None:
    strict = MedusaDrafter(FILE, CONFIG, HEAD, FINAL_NORM, 2, min_confidence=1.1)
    strict.sampled(R1, 0, [1], states(1))
    assert strict.propose(R1, 3) == Draft()


def test_states_are_bounded_and_forgotten(backend: str) -> None:
    medusa = drafter(max_contexts=1)
    medusa.sampled(R1, 0, [1], states(1))
    medusa.sampled(R2, 0, [1], states(1))
    assert medusa.propose(R1, 2) == Draft()
    medusa.forget(R2)
    medusa.forget(R2)
    assert medusa.propose(R2, 2) == Draft()


def test_requests_that_guess_together_guess_what_each_would_alone(backend: str) -> None:
    """Different numbers of guesses in one call; one has nothing new, one was never seen."""
    unseen, rested = RequestId("unseen"), RequestId("rested")
    together, alone = drafter(max_contexts=4), drafter(max_contexts=4)
    for medusa in (together, alone):
        for index, request_id in enumerate((R1, R2, rested)):
            medusa.sampled(request_id, 0, [1], states(1, seed=index))
        medusa.propose(rested, 2)
    drafts = together.propose_all([(R1, 7), (rested, 2), (R2, 1), (unseen, 3)])
    assert drafts == [alone.propose(R1, 7), Draft(), alone.propose(R2, 1), Draft()]
    assert [len(draft) for draft in drafts] == [7, 0, 1, 0]
    assert together.propose_all([(R1, 7), (R2, 1)]) == [Draft()] * 2, "no new rows, no guess"
