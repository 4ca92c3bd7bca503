"""The layer for multi-token prediction: what it guesses is what the checkpoint's own arithmetic gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import StartupError
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.eagle import EagleDrafter
from decode_worker.speculation.eagle_layer import Reading
from decode_worker.speculation.mtp import open_mtp
from decode_worker.speculation.opening import open_speculator
from decode_worker.speculation.speculator import DraftingSpeculator
from engine import native_library
from engine.block_pool import BlockPool
from engine.draft import Draft
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.model_loader import open_weights
from engine.request import EngineLimits
from engine.runner_factory import build_runner
from engine.weights.mtp_names import find_mtp_block
from engine.weights.safetensors_weights import SafetensorsWeights
from tests.decode_worker.speculation.mtp_checkpoints import (
    EXTRA_FILE,
    FAMILIES,
    HIDDEN,
    MtpCheckpoint,
    save_mtp_checkpoint,
)
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request
from tests.engine.tiny_models import VOCAB, random_model, save_gguf, save_safetensors

R1 = RequestId("r1")
NUM_TOKENS = 20


def settings_for(model: Path, **values: Any) -> WorkerSettings:
    return WorkerSettings(
        worker_id="w", model=str(model), listen="unix:unused", runtime_dir=model.parent, num_kv_blocks=64,
        max_model_len=256, max_sequences=4, dtype="float32", **values,
    )  # fmt: skip


def open_drafter(checkpoint: MtpCheckpoint) -> EagleDrafter:
    weights = open_weights(checkpoint.directory)
    try:
        return open_mtp(settings_for(checkpoint.directory), weights.config)
    finally:
        weights.close()


def rows(count: int, seed: int) -> tuple[torch.Tensor, list[int]]:
    """Last hidden states of rows, and the tokens that they chose."""
    source = np.random.default_rng(seed)
    states = 3 * source.standard_normal((count, HIDDEN)).astype(np.float32)
    return torch.from_numpy(states), source.integers(0, VOCAB, count).tolist()


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> MtpCheckpoint:
    return save_mtp_checkpoint(request.param, tmp_path / "model")


def test_guesses_are_those_of_plain_torch(checkpoint: MtpCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, rows coming a few at a time, with guesses in between that the next rows overwrite."""
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    for seed in range(4):
        drafter = open_drafter(checkpoint)
        drafter._min_reach = drafter.min_confidence = 0.0
        states, next_ids = rows(5 + 6 * seed, seed)
        for start in range(0, len(next_ids), 4):
            part = slice(start, start + 4)
            drafter.sampled(R1, 7 + start, next_ids[part], states[part, None].numpy())
            chain = drafter.propose(R1, 12).first_chain()
        assert len(chain) >= 3
        expected = checkpoint.logits(states, next_ids, len(chain))
        assert chain == Draft.chain(expected.argmax(1).tolist())
        drafter.close()


def test_native_laws_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Sizes that 4-bit blocks do not fit keep their weights: what is left is the rounding of the projection. It is
    looked at in the mean of eight contexts, for a single one may multiply it (rounding weights alone to 0.08)."""
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    for name in FAMILIES:
        checkpoint = save_mtp_checkpoint(name, tmp_path / name, intermediate_size=100)
        largest = []
        for seed in range(3, 11):
            drafter = open_drafter(checkpoint)
            states, next_ids = rows(9, seed)
            blocks = np.arange(8, dtype=np.int32)
            (laws,) = drafter._layer.guess([Reading(blocks, 0, 0, states[:, None].numpy(), next_ids, 3)], 0.0)
            expected = checkpoint.logits(states, next_ids, 3).softmax(1)
            errors = []
            for law, probabilities in zip(laws, expected, strict=True):
                assert law.token_ids[0] == int(probabilities.argmax())
                errors.append(np.log(law.probabilities) - probabilities[list(law.token_ids)].log().numpy())
            largest.append(np.abs(errors).max())
            drafter.close()
        assert np.mean(largest) < 0.05, (name, largest)


def test_four_bits_cost_little(checkpoint: MtpCheckpoint) -> None:
    """What is served natively: most guesses are those of the checkpoint's own weights."""
    drafter = open_drafter(checkpoint)
    drafter._min_reach = drafter.min_confidence = 0.0
    hits = 0
    for seed in range(20):
        states, next_ids = rows(6, seed)
        request_id = RequestId(f"r{seed}")
        drafter.sampled(request_id, 0, next_ids, states[:, None].numpy())
        guess = drafter.propose(request_id, 1).token_ids[0]
        hits += guess in checkpoint.logits(states, next_ids, 1)[0].topk(2).indices.tolist()
        drafter.forget(request_id)
    assert hits >= 15
    drafter.close()


class Recording:
    """A drafter's guesses behind every context that it was asked for; a `draft.Drafter`, by delegation."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.name, self.tap_layers, self.min_confidence = drafter.name, drafter.tap_layers, drafter.min_confidence
        self.guesses: list[tuple[list[int], Draft]] = []
        self.states: list[np.ndarray] = []
        self._drafter = drafter
        self._known: dict[RequestId, list[int]] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._known[request_id] = list(token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._known[request_id] += token_ids

    def sampled(self, request_id: RequestId, position: int, token_ids: Sequence[int], taps: np.ndarray) -> None:
        self.states.append(taps[:, 0].copy())
        self._drafter.sampled(request_id, position, token_ids, taps)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        draft = self._drafter.propose(request_id, num_drafts)
        self.guesses.append((list(self._known[request_id]), draft))
        return draft

    def forget(self, request_id: RequestId) -> None:
        self._drafter.forget(request_id)


def test_in_the_engine_it_reads_the_targets_own_states_and_changes_no_token(
    checkpoint: MtpCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and answer through transformers give the states that it was handed, and with them its guesses."""
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    built = build_runner(settings_for(checkpoint.directory, backend="torch"))
    prompt = [3, 14, 15, 92, 65, 35, 89]
    drafter = open_drafter(checkpoint)
    drafter._min_reach = drafter.min_confidence = 0.0
    recording = Recording(drafter)

    def tokens_with(speculator: DraftingSpeculator | None) -> list[int]:
        limits = EngineLimits(max_model_len=256, max_sequences=4, max_batch_tokens=64)
        taps = () if speculator is None else speculator.tap_layers
        executor = ModelExecutor(built.runner, limits, 16, built.memory, tap_layers=taps)
        pool = BlockPool(built.memory.num_blocks, 16, built.config.fingerprint)
        engine = Engine(executor, pool, limits, speculator=speculator)
        sink = Collector()
        engine.start(sink)
        try:
            engine.submit(make_request("r", prompt, sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)))
            sink.end("r")
        finally:
            engine.stop(DEADLINE_S)
        return sink.tokens("r")

    plain = tokens_with(None)
    assert tokens_with(DraftingSpeculator({"mtp": recording}, ("mtp",), 4, None)) == plain
    states = checkpoint.states([*prompt, *plain])[len(prompt) - 1 :]
    handed = np.concatenate(recording.states)
    assert np.abs(handed - states[: len(handed)].numpy()).max() < 1e-3
    assert len(recording.guesses) > 5
    for known, draft in recording.guesses:
        next_ids = known[len(prompt) :]
        chain = draft.first_chain()
        expected = checkpoint.logits(states[: len(next_ids)], next_ids, max(1, len(chain)))
        assert chain.token_ids == tuple(expected.argmax(1).tolist())
    drafter.close()
    built.memory.close()


def test_a_worker_opens_it_by_name_and_auto_takes_it_beside_the_look_up(
    checkpoint: MtpCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    for mode, names in (("mtp", {"mtp"}), ("auto", {"ngram", "suffix", "mtp"})):
        settings = settings_for(checkpoint.directory, speculation=mode)
        built = build_runner(settings)
        speculator = open_speculator(settings, built)
        assert speculator is not None
        assert {
            name for name in ("ngram", "suffix", "eagle", "mtp") if f"speculation_{name}_steps" in speculator.counters()
        } == names
        speculator.check(SamplingParams(max_tokens=1, speculation="mtp"))
        assert speculator.tap_layers == (built.config.num_layers - 1,)
        built.memory.close()


@pytest.mark.parametrize(
    ("mode", "dtype", "verifies_trees"),
    [("auto", "bfloat16", False), ("auto", "float32", True), ("mtp", "bfloat16", True)],
)
def test_auto_verifies_chains_in_16_bits(mode: str, dtype: str, verifies_trees: bool, tmp_path: Path) -> None:
    checkpoint = save_mtp_checkpoint("mimo", tmp_path / "model")
    settings = settings_for(checkpoint.directory, speculation=mode, backend="torch").model_copy(update={"dtype": dtype})
    built = build_runner(settings)
    speculator = open_speculator(settings, built)
    assert speculator is not None
    assert speculator._verifies_trees == verifies_trees
    built.memory.close()


def test_the_target_does_not_know_the_block(checkpoint: MtpCheckpoint, tmp_path: Path) -> None:
    """Same names, same fingerprint: its KV may be shared with that of the checkpoint without the block."""
    weights = open_weights(checkpoint.directory)
    (checkpoint.directory / EXTRA_FILE).unlink()
    without = open_weights(checkpoint.directory)
    assert weights.names() == without.names()
    assert weights.config == without.config
    assert isinstance(weights, SafetensorsWeights)
    assert isinstance(without, SafetensorsWeights)
    assert set(weights.mtp_shapes) == set(checkpoint.tensors)
    assert not without.mtp_shapes
    with pytest.raises(StartupError, match=r"no layers for multi-token prediction.*MiMo, Qwen3-Next, DeepSeek-V3"):
        open_drafter(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.mtp_layers.0.mlp.up_proj.weight"), "lacks tensor .*up_proj.*MiMo"),
        (
            lambda tensors: tensors.update({"model.mtp_layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}),
            "has tensor .*experts.0.*does not compute.*MiMo, Qwen3-Next, DeepSeek-V3",
        ),
        (
            lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.ones(HIDDEN, HIDDEN)}),
            r"input_proj.* is \[64, 64\], must be \[64, 128\]",
        ),
    ],
)
def test_a_block_with_other_parts_is_refused_and_the_target_serves_on(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    checkpoint = save_mtp_checkpoint("mimo", tmp_path / "model")
    tensors = load_file(checkpoint.directory / EXTRA_FILE)
    change(tensors)
    save_file(tensors, checkpoint.directory / EXTRA_FILE)
    with pytest.raises(StartupError, match=message):
        open_drafter(checkpoint)
    weights = open_weights(checkpoint.directory)
    assert weights.names()


def test_layers_behind_the_models_own_need_a_config_that_states_them(tmp_path: Path) -> None:
    """Else a config that counts too few layers would serve half a model."""
    checkpoint = save_mtp_checkpoint("deepseek", tmp_path / "model")
    config = checkpoint.directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": None}))
    with pytest.raises(StartupError, match=r"model\.layers\.3\..*has no place for"):
        open_weights(checkpoint.directory)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": "one"}))
    with pytest.raises(StartupError, match="num_nextn_predict_layers"):
        open_weights(checkpoint.directory)


def test_of_several_blocks_the_first_one_guesses(tmp_path: Path) -> None:
    checkpoint = save_mtp_checkpoint("mimo", tmp_path / "model")
    second = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in checkpoint.tensors.items()}
    save_file(second, checkpoint.directory / "model-more.safetensors")
    weights = open_weights(checkpoint.directory)
    assert isinstance(weights, SafetensorsWeights)
    assert len(weights.mtp_shapes) == 2 * len(checkpoint.tensors)
    block = find_mtp_block("here", weights.config, weights.mtp_shapes)
    assert {*block.layer.values(), block.projection} <= checkpoint.tensors.keys()
    open_drafter(checkpoint).close()


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    path = save_gguf(random_model("qwen2"), tmp_path / "model.gguf")
    weights = open_weights(path)
    with pytest.raises(StartupError, match=r"GGUF file.*safetensors directory"):
        open_mtp(settings_for(path), weights.config)


def test_a_mixtures_block_has_experts_and_is_computed_in_torch(tmp_path: Path) -> None:
    """Each expert by itself, as files have them."""
    directory = save_safetensors(random_model("qwen3_moe"), tmp_path / "model")
    target = open_weights(directory)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        f"mtp.layers.0.{name.removeprefix('model.layers.0.')}": torch.rand(target.tensor(name).shape, generator=draw)
        - 0.3
        for name in target.names()
        if name.startswith("model.layers.0.")
    }
    tensors |= {
        f"mtp.{name}.weight": torch.ones(HIDDEN) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    tensors["mtp.fc.weight"] = torch.rand(HIDDEN, 2 * HIDDEN, generator=draw) - 0.5
    save_file(tensors, directory / EXTRA_FILE)
    drafter = open_mtp(settings_for(directory), target.config)
    drafter._min_reach = drafter.min_confidence = 0.0
    states, next_ids = rows(5, 1)
    drafter.sampled(R1, 0, next_ids, states[:, None].numpy())
    assert len(drafter.propose(R1, 4)) == 4
    drafter.close()
