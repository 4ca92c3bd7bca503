"""Whether a trained drafter's tensors are as large as its header and its target say.

What computes with them takes addresses and sizes from both: a file that disagrees with itself would be read beyond its
end, or guess nonsense for ever.
"""

from __future__ import annotations

from cluster.errors import StartupError
from decode_worker.speculation.drafter_file import DrafterFile
from engine.model_config import ModelConfig


def check_drafter(file: DrafterFile, target: ModelConfig) -> None:
    """Raises `StartupError` that names what does not fit."""
    taps, ids = file.tap_layers, file.vocabulary
    if not taps or list(taps) != sorted({*taps}) or not 0 <= taps[0] <= taps[-1] < target.num_layers:
        raise _unfit(file, f"reads the layers {list(taps)} of a model that has {target.num_layers}")
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise _unfit(file, f"has token ids outside of the target's {target.vocab_size}")
    for name, shape in _expected(file, target).items():
        tensor = file.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise _unfit(file, f"{name} {found}, {len(taps)} layers that it reads ask for {list(shape)}")


def _expected(file: DrafterFile, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = target.hidden_size, target.intermediate_size
    if file.kind == "medusa":
        num_heads = max(1, sum(name.startswith("linears.") for name in file.tensors))
        return {
            name: shape
            for head in range(num_heads)
            for name, shape in (
                (f"linears.{head}.weight", (hidden, hidden)),
                (f"blocks.{head}.weight", (hidden, hidden)),
                (f"blocks.{head}.bias", (hidden,)),
                (f"norms.{head}", (hidden,)),
            )
        }
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    return {
        "fuse_first.weight": (hidden, (len(file.tap_layers) + 1) * hidden),
        "fuse_next.weight": (hidden, 2 * hidden),
        "attention_norm": (hidden,),
        "qkv.weight": (queries + 2 * keys, hidden),
        "attention_output.weight": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate_up.weight": (2 * inner, hidden),
        "down.weight": (hidden, inner),
        "final_norm": (hidden,),
    }


def _unfit(file: DrafterFile, what: str) -> StartupError:
    return StartupError(
        f"the {file.kind} drafter {what}: train one with `tandem drafter train --kind {file.kind}`",
        param="speculation",
    )
