"""The accuracy gate on models whose losses are known, on the default model, and its verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.accuracy import AnswerLoss, SequenceReader, TextLoss, compare_answers, compare_texts, greedy, is_json
from benchmarks.accuracy_gate import GateLimits, why_not
from benchmarks.accuracy_texts import NotEnoughText, read_texts
from benchmarks.eval_command import evaluate
from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.torch_runner import TorchRunner
from tests.engine.tiny_models import random_model, save_safetensors

VOCAB = 8


class CountingModel:
    """After token t, t + `step` has probability `share` and the others share the rest."""

    def __init__(self, step: int, share: float) -> None:
        self._step, self._share = step, share
        self.num_restarts = 0

    def restart(self) -> None:
        self.num_restarts += 1

    def read(self, token_ids: Sequence[int]) -> torch.Tensor:
        rows = torch.full((len(token_ids), VOCAB), (1 - self._share) / (VOCAB - 1))
        for row, token in enumerate(token_ids):
            rows[row, (token + self._step) % VOCAB] = self._share
        return rows.log() + 5.0  # logits have no absolute height


def test_losses_of_known_distributions() -> None:
    """The text counts up, the candidate expects every second number: p = 0.9 falls to 0.1 / 7 at each position."""
    text = [number % VOCAB for number in range(600)]
    loss = compare_texts(CountingModel(1, 0.9), CountingModel(2, 0.9), [text], 600, lambda tokens: None)
    assert loss.num_positions == 599
    assert loss.reference_perplexity == pytest.approx(1 / 0.9, rel=1e-4)
    assert loss.candidate_perplexity == pytest.approx(70.0, rel=1e-4)
    assert loss.top1_agreement == 0.0
    assert loss.mean_divergence == pytest.approx((0.9 - 0.1 / 7) * np.log(0.9 / (0.1 / 7)), rel=1e-3)


def test_a_model_against_itself_loses_nothing() -> None:
    model = CountingModel(1, 0.7)
    loss = compare_texts(model, model, [[1, 2, 3, 4], [5, 5, 5, 5]], 4, lambda tokens: None)
    assert (loss.perplexity_ratio, loss.top1_agreement) == (1.0, 1.0)
    assert loss.mean_divergence == pytest.approx(0.0, abs=1e-6)


def test_greedy_answers_part_where_the_models_do() -> None:
    same = compare_answers(
        CountingModel(1, 0.9), CountingModel(1, 0.6), [[1]], [], str, frozenset(), 6, lambda tokens: None
    )
    parted = compare_answers(
        CountingModel(1, 0.9), CountingModel(2, 0.6), [[1]], [], str, frozenset(), 6, lambda tokens: None
    )
    assert (same.greedy_agreement, parted.greedy_agreement) == (1.0, 0.0)
    assert greedy(CountingModel(1, 0.9), [1], frozenset({5}), 100) == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"a": 1}', True), ('```json\n{"a": 1}\n```', True), ("[1]", False), ('{"a": 1} and more', False), ("", False)],
)
def test_only_one_object_alone_is_json(text: str, expected: bool) -> None:
    assert is_json(text) is expected


def test_every_broken_limit_is_named() -> None:
    good = TextLoss(128, 100, 10.0, 10.1, 0.95, 0.01)
    answers = AnswerLoss(4, 0.9, 1.0, 1.0)
    assert list(why_not([good], answers, GateLimits())) == []
    bad = replace(good, context_tokens=512, candidate_perplexity=11.0, top1_agreement=0.5)
    reasons = list(why_not([good, bad], replace(answers, candidate_json_validity=0.5), GateLimits()))
    assert len(reasons) == 3
    assert "1.100 times" in reasons[0]
    assert "512" in reasons[1]
    assert "50% of the JSON" in reasons[2]
    assert list(why_not([replace(good, candidate_perplexity=float("nan"))], answers, GateLimits()))


def test_a_reader_gives_the_logits_of_one_pass_and_refuses_what_its_pool_cannot_hold(tmp_path: Path) -> None:
    weights = open_weights(save_safetensors(random_model("llama"), tmp_path))
    memory = KvMemory(layout_of(weights.config, "float32", 16), 2)
    reader = SequenceReader(TorchRunner(weights, memory), 16, 2)
    tokens = list(range(20))
    whole = reader.read(tokens)
    reader.restart()
    assert torch.allclose(torch.cat([reader.read(tokens[:7]), reader.read(tokens[7:])]), whole, atol=1e-4)
    with pytest.raises(ValueError, match="holds 32 tokens"):
        reader.read(tokens)


def test_texts_do_not_overlap_and_short_ones_are_refused() -> None:
    pieces = read_texts(None, lambda text: list(range(len(text))), 3, 1000)
    assert [len(piece) for piece in pieces] == [1000] * 3
    assert pieces[0][-1] < pieces[1][0]
    with pytest.raises(NotEnoughText, match="need"):
        read_texts(None, lambda text: [1, 2, 3], 2, 2)


def _command() -> typer.Typer:
    app = typer.Typer()
    app.command()(evaluate)
    return app


def test_the_files_own_blocks_pass_on_the_default_model(default_model_path: Path, tmp_path: Path) -> None:
    """The reference holds the very same values, widened: what differs is rounding inside the products."""
    out = tmp_path / "eval.json"
    arguments = [
        "--model",
        str(default_model_path),
        "--lengths",
        "48",
        "--pieces",
        "1",
        "--answer-tokens",
        "4",
        "--out",
        str(out),
    ]
    found = CliRunner().invoke(_command(), arguments)
    assert found.exit_code == 0, found.output
    report = json.loads(out.read_text())
    assert report["reasons"] == []
    assert 0.95 < report["texts"][0]["perplexity_ratio"] < 1.05
    assert report["texts"][0]["top1_agreement"] > 0.85


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--lengths", "1,x"], "--lengths"), (["--model", "absent.gguf"], "absent.gguf")]
)
def test_what_cannot_run_is_one_line(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(_command(), arguments)
    assert found.exit_code == 2
    assert message in found.output
    assert "Traceback" not in found.output
