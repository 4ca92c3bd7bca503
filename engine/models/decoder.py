"""A Llama-family decoder over paged KV: Llama, Mistral, Qwen2, Qwen3 differ by a bias and a norm.

    embed ─> [ norm ─> qkv ─> rope ─> KV into pool ─> attention ─> out ─> norm ─> MLP ] x layers ─> norm ─> logits

An MLP is gate, up and down, or of Mixtral and Qwen3-MoE a router and the experts that it chooses.

All tokens of all sequences lie end to end; only the attention plan knows where a sequence ends. Which code runs an
operation is the table's business, where weights come from the source's.

Of a sharded model (`engine.tensor_parallel`) each rank runs this on its part of the weights: `out`, `down` and the
embedding are sums over the ranks, so that hidden states are whole everywhere, and rank 0 gathers the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.experts import route
from engine.kernels.linear import Linear, make_linear
from engine.kernels.reference_attention import AttentionShape
from engine.kernels.table import AttentionPlan, OperationTable
from engine.model_config import ModelConfig
from engine.models.rope import query_factor, rope_table
from engine.step import LayerCallback, StepInput, StepOutput
from engine.tensor_parallel.ranks import Ranks
from engine.tensor_parallel.shard import Shard
from engine.weights.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; q, k, v are one matrix, and gate and up are one, so that each input is read once."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    mlp: Linear


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's arrays on the device, as the layers read them; `engine.step.StepInput` says what each one is."""

    token_ids: torch.Tensor
    inputs: torch.Tensor | None
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    plan: AttentionPlan
    tap_layers: tuple[int, ...] = ()


class Decoder:
    """One model's weights and its forward pass. Holds no state of any sequence."""

    def __init__(
        self,
        weights: WeightSource,
        operations: OperationTable,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Reads every tensor of `weights` into `dtype` on `device`; the source may be closed afterwards.

        With `ranks`, `weights` are this rank's part and `pool` has its KV heads alone.
        """
        self.config: ModelConfig = weights.config
        self._operations = operations
        self._ranks = ranks
        self.attention_shape = AttentionShape(
            self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.config.sliding_window
        )
        self._cos, self._sin = rope_table(self.config, max_positions, device)
        self._query_factor = query_factor(self.config.rope_scaling)
        loader = _Loader(weights, operations, dtype, device, ranks)
        self._embedding = loader.tensor("model.embed_tokens.weight")
        self._layers = [loader.layer(index) for index in range(self.config.num_layers)]
        self._final_norm = loader.tensor("model.norm.weight")
        head = self._embedding if self.config.tie_embeddings else loader.tensor("lm_head.weight")
        self._logits = operations.make_linear(head, None)

    def forward(self, step: StepInput, pool: torch.Tensor, layer_done: LayerCallback | None) -> StepOutput:
        """One step over a pool `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`."""
        device = pool.device
        tensors = StepTensors(
            token_ids=torch.from_numpy(step.token_ids).to(device),
            inputs=None if step.inputs is None else torch.from_numpy(step.inputs).to(device),
            positions=torch.from_numpy(step.positions).to(device),
            slots=torch.from_numpy(step.slots).to(device),
            logit_rows=torch.from_numpy(step.logit_rows).to(device),
            plan=self._operations.plan_attention(step, self.attention_shape, pool),
            tap_layers=step.tap_layers,
        )
        return self.compute(tensors, pool, layer_done)

    def compute(self, step: StepTensors, pool: torch.Tensor, layer_done: LayerCallback | None) -> StepOutput:
        """The same of a step that is on the device already: launches alone, nothing is read by the host."""
        operations, eps, rows = self._operations, self.config.rms_norm_eps, step.logit_rows
        residual = self._embed(step)
        taps: list[torch.Tensor] = []
        hidden = operations.add_rms_norm(residual, None, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, step.positions)
            operations.kv_write(key, value, pool, index, step.slots)
            if layer_done is not None and self._ranks is None:
                layer_done(index)
            hidden = layer.attention_output(step.plan.attend(query, index))
            if layer_done is not None and self._ranks is not None:
                # A rank gives its part of this sum after it has written its KV: now every head's is there.
                layer_done(index)
            hidden = operations.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.mlp(hidden)
            if index + 1 < len(self._layers):
                hidden = operations.add_rms_norm(hidden, residual, self._layers[index + 1].attention_norm, eps)
            else:
                hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
                hidden = operations.add_rms_norm(hidden, residual, self._final_norm, eps)
            if index in step.tap_layers:  # the norm has just added the layer's output to the residual
                is_last = index + 1 == len(self._layers)
                taps.append(residual if is_last else residual.index_select(0, rows))
        return StepOutput(self._vocabulary_logits(hidden), hidden, torch.stack(taps, dim=1) if taps else None)

    def _embed(self, step: StepTensors) -> torch.Tensor:
        if step.inputs is not None:
            return step.inputs.to(self._embedding.dtype, copy=True)
        if self._ranks is None:
            return self._embedding.index_select(0, step.token_ids)
        own = Shard(self._ranks.rank, self._ranks.size).vocabulary(self.config.vocab_size)
        is_own = (step.token_ids >= own.start) & (step.token_ids < own.stop)
        rows = self._embedding.index_select(0, torch.where(is_own, step.token_ids - own.start, 0))
        return self._ranks.sum(rows.masked_fill_(~is_own[:, None], 0))

    def _vocabulary_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[rows, vocab_size]`; of a sharded model at rank 0, and elsewhere its own part."""
        logits = self._logits(hidden)
        if self._ranks is not None:
            logits = self._ranks.gather(logits)[:, : self.config.vocab_size]
        return logits.float()

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated query and key, and value, each `[num_tokens, heads, head_dim]`, views of one product."""
        config, operations = self.config, self._operations
        qkv = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        query, key, value = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query.copy_(operations.add_rms_norm(query, None, layer.query_norm, config.rms_norm_eps))
            key.copy_(operations.add_rms_norm(key, None, layer.key_norm, config.rms_norm_eps))
        # Query and key heads lie side by side: one rotation for both.
        operations.rotary(qkv[:, : num_heads + num_kv_heads], positions, self._cos, self._sin)
        if self._query_factor != 1.0:
            query.mul_(self._query_factor)
        return query, key, value


class _Loader:
    """Brings tensors into the model's dtype and device."""

    def __init__(
        self,
        weights: WeightSource,
        operations: OperationTable,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._dtype = dtype
        self._device = device
        self._ranks = ranks

    def tensor(self, name: str) -> torch.Tensor:
        # Copied even where nothing changes: a mapped file that is replaced on disk must not pull memory from under us.
        return self._weights.tensor(name).to(self._device, self._dtype, copy=True)

    def layer(self, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        has_qk_norm = self._weights.config.qk_norm
        return _Layer(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(
                [f"{attention}.{name}_proj" for name in "qkv"], has_bias=self._weights.config.attention_bias
            ),
            query_norm=self.tensor(f"{attention}.q_norm.weight") if has_qk_norm else None,
            key_norm=self.tensor(f"{attention}.k_norm.weight") if has_qk_norm else None,
            attention_output=self._summed_linear(f"{attention}.o_proj"),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._dense_mlp(mlp) if self._weights.config.mixture is None else self._mixture(mlp),
        )

    def _dense_mlp(self, prefix: str) -> Linear:
        gate_up = self._linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        down, silu_multiply = self._summed_linear(f"{prefix}.down_proj"), self._operations.silu_multiply
        return lambda hidden: down(silu_multiply(gate_up(hidden)))

    def _mixture(self, prefix: str) -> Linear:
        """Experts, and the router that every rank computes alike."""
        mixture, ranks = self._weights.config.mixture, self._ranks
        if mixture is None:
            raise ValueError(f"{prefix} is dense")
        experts = [f"{prefix}.experts.{index}" for index in range(mixture.num_experts)]
        compute = self._operations.make_experts(
            [self._matrix([f"{expert}.gate_proj", f"{expert}.up_proj"]) for expert in experts],
            [self._matrix([f"{expert}.down_proj"]) for expert in experts],
        )
        # Never quantised: a token that goes to other experts is another token.
        router = make_linear(self.tensor(f"{prefix}.gate.weight"))

        def mlp(hidden: torch.Tensor) -> torch.Tensor:
            expert_ids, weights = route(
                router(hidden), mixture.experts_per_token, normalizes=mixture.normalizes_weights
            )
            output = compute(hidden, expert_ids, weights)
            return output if ranks is None else ranks.sum(output)

        return mlp

    def _linear(self, modules: list[str], *, has_bias: bool = False) -> Linear:
        """The modules' matrices, one below the other, as one linear layer."""
        weight = self._matrix(modules)
        bias = torch.cat([self.tensor(f"{module}.bias") for module in modules]) if has_bias else None
        return self._operations.make_linear(weight, bias)

    def _matrix(self, modules: list[str]) -> torch.Tensor:
        return torch.cat([self.tensor(f"{module}.weight") for module in modules])

    def _summed_linear(self, module: str) -> Linear:
        """A layer that each rank has some input columns of."""
        linear, ranks = self._linear([module]), self._ranks
        return linear if ranks is None else lambda x: ranks.sum(linear(x))
