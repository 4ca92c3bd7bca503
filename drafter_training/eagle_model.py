"""The EAGLE drafter as it is trained: one decoder layer that learns to say what the target will say next.

    first guess  taps of the row that chose token t+1, embedding of t+1 ─ fuse_first ─┐
    later guess  own state behind the last guess, embedding of it ─────── fuse_next ──┴─> layer ─> state ─> norm, head

The output head is the target's own rows for a reduced vocabulary, frozen, so it is not part of the file. Training
unrolls the guesses (EAGLE-3's training-time test, Li et al. 2025): from the second one on the layer reads its own
states, as it will when serving. `decode_worker.speculation.eagle` computes the same with native kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

from engine.model_config import ModelConfig
from engine.models.rope import rope_table


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm without a weight: the matrix behind it learns that."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)


class EagleModel(nn.Module):
    """`config` is the target's: the layer has its sizes. Names of parameters are those of the drafter file."""

    def __init__(self, config: ModelConfig, num_taps: int, max_positions: int) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        kv, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
        self.fuse_first = nn.Linear((num_taps + 1) * hidden, hidden, bias=False)
        self.fuse_next = nn.Linear(2 * hidden, hidden, bias=False)
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, heads + 2 * kv, bias=False)
        self.attention_output = nn.Linear(heads, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self._cos, self._sin = rope_table(config, max_positions, torch.device("cpu"))

    def unrolled(self, taps: torch.Tensor, embeddings: torch.Tensor, num_guesses: int) -> list[torch.Tensor]:
        """States of each guess: `normed` makes them ready for the head.

        `taps` [B, T, num_taps, hidden] of the rows that chose tokens 1 to T; `embeddings` [B, T, hidden] of those
        tokens. Guess g of row t, for the token at t + g + 1, is in entry g - 1 at row t + g - 1, [B, T, hidden]; the
        first g - 1 rows of an entry have no meaning.
        """
        eps = self.config.rms_norm_eps
        embedded = unit_rms(embeddings, eps)
        fused = torch.cat((unit_rms(taps, eps).flatten(2), embedded), dim=-1)
        attention = _UnrolledAttention(self.config, self._cos, self._sin)
        state = self._layer(self.fuse_first(fused), attention)
        states = [state]
        for _ in range(num_guesses - 1):
            before = functional.pad(state, (0, 0, 1, 0))[:, :-1]
            state = self._layer(self.fuse_next(torch.cat((unit_rms(before, eps), embedded), dim=-1)), attention)
            states.append(state)
        return states

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        return self._norm(state, self.final_norm)

    def _layer(self, x: torch.Tensor, attention: _UnrolledAttention) -> torch.Tensor:
        x = x + self.attention_output(attention.attend(self.qkv(self._norm(x, self.attention_norm))))
        gate, up = self.gate_up(self._norm(x, self.mlp_norm)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return out

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, self.config.rms_norm_eps)


class _UnrolledAttention:
    """Causal attention whose g-th call sees the first call's keys up to g - 1 positions back, then its own chain's.

    Row p of call g belongs to the chain that left the true features at p - g + 1: behind those it sees the keys of
    calls 2 to g at positions p - g + 2 to p.
    """

    def __init__(self, config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._config = config
        self._cos, self._sin = cos, sin
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        config, (batch, length, _) = self._config, qkv.shape
        heads = qkv.view(batch, length, -1, config.head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        group = config.num_heads // config.num_kv_heads
        query = self._rotate(query) * config.head_dim**-0.5
        self._keys.append(self._rotate(key).repeat_interleave(group, dim=1))
        self._values.append(value.repeat_interleave(group, dim=1))
        call = len(self._keys)
        seen = torch.ones(length, length, dtype=torch.bool).tril(1 - call)
        scores = [(query @ self._keys[0].transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
        values = [shifted(other, call - 1 - index) for index, other in enumerate(self._values)]
        for index in range(1, call):
            own = shifted(self._keys[index], call - 1 - index)
            scores.append((query * own).sum(-1, keepdim=True))
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(query.dtype)
        out = weights[..., :length] @ self._values[0]
        for index in range(1, call):
            out = out + weights[..., length + index - 1, None] * values[index]
        return out.transpose(1, 2).reshape(batch, length, -1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[: x.shape[-2], : x.shape[-1] // 2].to(x.dtype) for table in (self._cos, self._sin))
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row p of the result is row p - by of `x` [..., T, width]; zeros before the start."""
    return functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x
