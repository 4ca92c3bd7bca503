"""Drafter files with random weights for a small target."""

from __future__ import annotations

import torch

from decode_worker.speculation.drafter_file import DrafterFile
from drafter_training.eagle_model import EagleModel
from drafter_training.medusa_model import MedusaModel
from engine.model_config import ModelConfig

MAX_POSITIONS = 512


def random_eagle(config: ModelConfig, tap_layers: tuple[int, ...], seed: int = 0) -> EagleModel:
    torch.manual_seed(seed)
    model = EagleModel(config, len(tap_layers), MAX_POSITIONS)
    with torch.no_grad():
        for parameter in model.parameters():  # as they come back from the file
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def eagle_file(model: EagleModel, tap_layers: tuple[int, ...], draft_vocab: int) -> DrafterFile:
    config = model.config
    vocabulary = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))[:draft_vocab]
    return DrafterFile("eagle", config.fingerprint, tap_layers, vocabulary, dict(model.state_dict()))


def medusa_file(config: ModelConfig, draft_vocab: int, num_heads: int = 3, seed: int = 0) -> DrafterFile:
    torch.manual_seed(seed)
    model = MedusaModel(config, num_heads)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    vocabulary = torch.arange(draft_vocab) * 2 % config.vocab_size
    return DrafterFile("medusa", config.fingerprint, (config.num_layers - 1,), vocabulary, dict(model.state_dict()))
