"""Opens a trained drafter for a worker: its file, the target's parts that it shares, and what a guess of it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from cluster.identity import RequestId
from cluster.model_files import resolve_model, served_name
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.drafter_file import DrafterKind, find_drafter, read_drafter
from decode_worker.speculation.eagle import BLOCKS_PER_CONTEXT, EagleDrafter
from decode_worker.speculation.eagle_layer import open_eagle_layer
from decode_worker.speculation.medusa import MedusaDrafter
from engine.model_config import ModelConfig
from engine.model_loader import open_weights

NUM_REPEATS = 7
MEASURED_GUESSES = 3


def open_trained(kind: DrafterKind, settings: WorkerSettings, target: ModelConfig) -> EagleDrafter | MedusaDrafter:
    """Raises `StartupError` when there is no file of this kind for the model, or it was made for another one."""
    model = resolve_model(settings.model)
    file = read_drafter(find_drafter(kind, served_name(model)), kind, target.fingerprint)
    weights = open_weights(model)
    try:
        embedding = weights.tensor("model.embed_tokens.weight")
        head = embedding if target.tie_embeddings else weights.tensor("lm_head.weight")
        # A request that was preempted keeps its context for a while.
        max_contexts = 2 * settings.max_sequences
        if kind == "medusa":
            return MedusaDrafter(file, target, head, weights.tensor("model.norm.weight"), max_contexts)
        layer = open_eagle_layer(file, target, embedding, head, max_contexts * BLOCKS_PER_CONTEXT)
        return EagleDrafter(layer, max_contexts)
    finally:
        weights.close()


def measure_guess_ms(
    drafter: EagleDrafter | MedusaDrafter,
    hidden_size: int,
    target_step: Callable[[], object],
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Milliseconds of this thread's processor time that one guess takes, in a chain of a few behind a step of the
    target: that has read all its weights, so the drafter's come from memory again."""
    request_id = RequestId("measurement")
    taps = np.ones((1, len(drafter.tap_layers), hidden_size), np.float32)
    times_ms = []
    for position in range(NUM_REPEATS):
        target_step()
        drafter.sampled(request_id, position, (0,), taps)
        started_s = clock()
        with torch.inference_mode():
            drafter.propose(request_id, MEASURED_GUESSES)
        times_ms.append((clock() - started_s) * 1000 / MEASURED_GUESSES)
    drafter.forget(request_id)
    return statistics.median(times_ms)
