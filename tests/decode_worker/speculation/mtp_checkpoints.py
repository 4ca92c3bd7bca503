"""Checkpoints that come with a layer for multi-token prediction, and what such a layer guesses, in plain torch.

The reference reads the checkpoint's tensors by the names that its family gives them, and computes every guess from the
first row on, without a cache: nothing of the engine is in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.tiny_models import random_model, save_safetensors

HIDDEN = 64
# Two heads of 32: sizes that native code takes.
_SIZES: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXTRA_FILE = "model-mtp.safetensors"


@dataclass(frozen=True)
class Family:
    """Names of a block's parts as its checkpoints have them, and how they belong together."""

    variant: str  # of `tiny_models`
    config: dict[str, Any]
    layer: str
    token_norm: str
    state_norm: str
    projection: str
    final_norm: str
    is_state_first: bool
    normed: tuple[bool, bool]  # whether the target's states, and its own, come behind the final norm
    head: str = ""
    embedding: str = ""


_LAST = "model.layers.3."
FAMILIES = {
    "mimo": Family(
        "qwen2", {"model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True},
        "model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm", True, (False, True),
    ),
    "deepseek": Family(
        "llama", {"num_nextn_predict_layers": 1}, _LAST, f"{_LAST}enorm", f"{_LAST}hnorm", f"{_LAST}eh_proj",
        f"{_LAST}shared_head.norm", False, (True, False), f"{_LAST}shared_head.head", f"{_LAST}embed_tokens",
    ),
    "qwen3_next": Family(
        "qwen3", {}, "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
        False, (True, True),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MtpCheckpoint:
    """`model` is the target as transformers has it, `tensors` all that the block's file holds."""

    directory: Path
    family: Family
    model: Any
    tensors: dict[str, torch.Tensor]

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden]: the target's last hidden states, before its final norm."""
        seen: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
        with torch.no_grad():
            self.model(torch.tensor([list(token_ids)]))
        hook.remove()
        return seen[0]

    def logits(self, states: torch.Tensor, next_ids: Sequence[int], num_guesses: int) -> torch.Tensor:
        """[guesses, vocab]: behind the last of the target's rows and the tokens that they chose, guess by guess."""
        family, weight = self.family, self._weight
        embedding = self._own(family.embedding, self.model.get_input_embeddings())
        head = self._own(family.head, self.model.get_output_embeddings())
        if family.normed[0]:
            states = self._norm(states, self.model.model.norm.weight)
        ids, found = list(next_ids), []
        for _ in range(num_guesses):
            tokens = self._norm(embedding[ids], weight(family.token_norm))
            rows = self._norm(states, weight(family.state_norm))
            halves = (rows, tokens) if family.is_state_first else (tokens, rows)
            raw = self._layer(torch.cat(halves, dim=1) @ weight(family.projection).T)[-1:]
            normed = self._norm(raw, weight(family.final_norm))
            found.append((normed @ head.T)[0])
            ids.append(int(found[-1].argmax()))
            states = torch.cat((states, normed if family.normed[1] else raw))
        return torch.stack(found)

    def _weight(self, module: str) -> torch.Tensor:
        return self.tensors[f"{module}.weight"]

    def _own(self, module: str, of_target: Any) -> torch.Tensor:
        weight: torch.Tensor = self.tensors[f"{module}.weight"] if module else of_target.weight.detach()
        return weight

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.detach()

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        """A decoder layer over rows at positions 0, 1, 2, ..."""
        count, config = len(x), self.model.config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, HIDDEN // 2
        angles = torch.outer(
            torch.arange(count), config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        )

        def module(name: str, rows: torch.Tensor) -> torch.Tensor:
            bias = self.tensors.get(f"{self.family.layer}{name}.bias")
            product = rows @ self._weight(self.family.layer + name).T
            return product if bias is None else product + bias

        def rotated(name: str, rows: torch.Tensor) -> torch.Tensor:
            if f"{self.family.layer}self_attn.{name}.weight" in self.tensors:
                rows = self._norm(rows, self._weight(f"{self.family.layer}self_attn.{name}"))
            low, high = rows.chunk(2, dim=-1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        inner = self._norm(x, self._weight(f"{self.family.layer}input_layernorm"))
        query = rotated("q_norm", module("self_attn.q_proj", inner).view(count, heads, size))
        key = rotated("k_norm", module("self_attn.k_proj", inner).view(count, kv_heads, size))
        value = module("self_attn.v_proj", inner).view(count, kv_heads, size)
        key, value = key.repeat_interleave(heads // kv_heads, 1), value.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + module("self_attn.o_proj", torch.einsum("hqk,khd->qhd", attention, value).reshape(count, -1))
        inner = self._norm(x, self._weight(f"{self.family.layer}post_attention_layernorm"))
        gated = torch.nn.functional.silu(module("mlp.gate_proj", inner)) * module("mlp.up_proj", inner)
        return x + module("mlp.down_proj", gated)


def save_mtp_checkpoint(name: str, directory: Path, **overrides: Any) -> MtpCheckpoint:
    """A target with random weights and a random block, named as that family's; `overrides` of the target's config."""
    family = FAMILIES[name]
    model = random_model(family.variant, **(_SIZES | overrides))
    save_safetensors(model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | family.config))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{family.layer}{part}": _like(part, parameter, generator)
        for part, parameter in model.model.layers[0].named_parameters()
    }
    for norm in (family.token_norm, family.state_norm, family.final_norm):
        tensors[f"{norm}.weight"] = _like("norm", torch.empty(HIDDEN), generator)
    tensors[f"{family.projection}.weight"] = _like("projection", torch.empty(HIDDEN, 2 * HIDDEN), generator)
    for part in filter(None, (family.head, family.embedding)):
        tensors[f"{part}.weight"] = _like("", torch.empty(model.config.vocab_size, HIDDEN), generator)
    save_file(tensors, directory / EXTRA_FILE)
    return MtpCheckpoint(directory, family, model, tensors)


def _like(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Wide norms: one that is left out, or applied to the other half, moves every logit."""
    drawn = torch.rand(parameter.shape, generator=generator)
    return 0.2 + 2.5 * drawn if "norm" in name else (drawn - 0.5) * 0.6
