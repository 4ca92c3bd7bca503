"""Writes `greedy_reference.json`: what Hugging Face transformers answers, greedily, in float32, on the default model.

    python tests/exactness/make_greedy_reference.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

32 prompts of 1 to 2,000 tokens (around every block edge), 64 tokens each; at each step the gap between the two most
likely logits is kept, so that a difference can be told from a near tie. It takes some minutes, so the file is
committed; `test_greedy_reference_is_live` recomputes a part of it at each run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PROMPT_LENGTHS = (
    *(1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65),
    *(100, 127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513, 767, 1000, 1500, 2000),
)
NUM_NEW_TOKENS = 64
REFERENCE_FILE = Path(__file__).with_name("greedy_reference.json")
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "List three uses of a paper clip.",
    "Explain how a bicycle stays upright.",
)


def load_reference_model(model_path: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, read by transformers itself from the same GGUF file."""
    folder, name = str(model_path.parent), model_path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval(), tokenizer


def make_prompts(tokenizer: Any) -> list[list[int]]:
    """Prompts of the lengths above: licence text in front, a chat question at the end where there is room."""
    text_ids = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"]
    prompts = []
    for index, length in enumerate(PROMPT_LENGTHS):
        question = QUESTIONS[index % len(QUESTIONS)]
        tail = tokenizer(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        offset = 13 * index
        body = (text_ids[offset:] + text_ids)[: max(0, length - len(tail))]
        prompts.append((body + tail)[-length:] if length >= len(tail) else text_ids[offset : offset + length])
    return prompts


@torch.inference_mode()
def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The most likely token at each step, end-of-sequence included and passed over, and its lead over the second."""
    cache, tokens, gaps = DynamicCache(config=model.config), [], []
    inputs = torch.tensor([prompt])
    for _ in range(num_tokens):
        output = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1)
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        inputs = best.indices[:1].view(1, 1)
    return tokens, gaps


def main() -> None:
    model, tokenizer = load_reference_model(Path(sys.argv[1]))
    rows = []
    for prompt in make_prompts(tokenizer):
        tokens, gaps = greedy_tokens(model, prompt, NUM_NEW_TOKENS)
        rows.append({"prompt": prompt, "tokens": tokens, "gaps": gaps})
        sys.stderr.write(f"{len(prompt)} tokens: smallest lead {min(gaps)}\n")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    REFERENCE_FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
