"""What a decoder weighs and costs, from its shape alone: parameters, KV bytes, arithmetic; dense or mixture of experts.

KV bytes a token     2 layers kv_heads head_dim element_bytes
arithmetic a token   2 (parameters used by it)  +  4 layers heads head_dim for each key it attends to
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like decoder with a gated feed-forward of three matrices."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of one expert where there are several
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool = False
    num_experts: int = 1
    experts_per_token: int = 1

    @property
    def num_parameters(self) -> int:
        return self._parameters(self.num_experts) + self._embedding_parameters

    @property
    def num_active_parameters(self) -> int:
        """That one token is multiplied with. The input embedding is looked up, not multiplied."""
        return self._parameters(self.experts_per_token) + self.vocab_size * self.hidden_size

    def num_touched_parameters(self, num_tokens: int) -> float:
        """That a step over `num_tokens` tokens reads: with experts, those that at least one token was sent to.

        With tokens spread evenly, E experts and k a token, E (1 - (1 - k / E)^n) of them.
        """
        if self.num_experts == 1:
            return float(self.num_active_parameters)
        share_missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        touched = self.num_experts * (1 - share_missed)
        return self._parameters(0) + touched * self._expert_parameters + self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    def kv_block_bytes(self, block_tokens: int, element_bytes: float = 2.0) -> float:
        return block_tokens * self.kv_bytes_per_token(element_bytes)

    @property
    def attention_flops_per_pair(self) -> int:
        """For one query token and one key token over all layers: scores and weighted values."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def _expert_parameters(self) -> int:
        """One expert in every layer."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def _embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    def _parameters(self, num_experts: int) -> int:
        """Of the layers and the last norm, with that many experts in each layer."""
        hidden, heads = self.hidden_size, self.num_heads + self.num_kv_heads
        attention = 2 * hidden * heads * self.head_dim
        router = hidden * self.num_experts if self.num_experts > 1 else 0
        norms = 2 * hidden
        layers = self.num_layers * (attention + router + norms) + hidden
        return layers + num_experts * self._expert_parameters


# From the models' published config.json files.
MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, tie_embeddings=True),
        ModelShape("Mistral-7B", 32, 4096, 14_336, 32, 8, 128, 32_000),
        ModelShape("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
        ModelShape("Llama-3-70B", 80, 8192, 28_672, 64, 8, 128, 128_256),
        ModelShape("Qwen2.5-7B", 28, 3584, 18_944, 28, 4, 128, 152_064),
        ModelShape("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936),
        ModelShape("Mixtral-8x7B", 32, 4096, 14_336, 32, 8, 128, 32_000, num_experts=8, experts_per_token=2),
        ModelShape("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 128, 151_936, num_experts=128, experts_per_token=8),
    )
}
