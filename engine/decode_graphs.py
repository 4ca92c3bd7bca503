"""Decode steps replayed as CUDA graphs: one launch for a whole step instead of several hundred from Python.

A graph is captured once for each bucket of batch sizes and reads its arguments where they were at capture. So a step is
copied into its bucket's arrays and padded: padded rows write no KV (slot -1), see none (context 0), and are cut off
behind the logits. Whatever is no plain decode step runs without a graph.

The capture itself has never run on a GPU; everything around it is tested with a capture that computes again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from engine.models.decoder import Decoder, StepTensors
from engine.step import StepInput, StepOutput

PADDING_SLOT = -1
# From here on buckets are this far apart: at most so many rows are padding.
BUCKET_STEP = 8

Compute = Callable[[], StepOutput]
# Makes of a computation one that does the same again, with what its tensors hold by then.
Capture = Callable[[Compute], Compute]


def bucket_sizes(max_sequences: int) -> tuple[int, ...]:
    """Batch sizes that have a graph, ascending: 1, 2, 4, then every eighth, and the largest there is."""
    sizes = {size for size in (1, 2, 4, *range(BUCKET_STEP, max_sequences, BUCKET_STEP)) if size < max_sequences}
    return (*sorted(sizes), max_sequences)


def bucket_for(num_sequences: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of `sizes` that holds the batch; None when it is larger than all."""
    place = bisect.bisect_left(sizes, num_sequences)
    return sizes[place] if place < len(sizes) else None


def is_plain_decode(step: StepInput) -> bool:
    """Whether each sequence has one new token whose logits are wanted, and nothing else is asked for."""
    has_extras = step.tree_masks is not None or step.inputs is not None or bool(step.tap_layers)
    return not has_extras and step.num_tokens == step.num_sequences == len(step.logit_rows)


class PaddedStep:
    """One bucket's arguments: in host memory to be filled, and on the device at places that never change."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        shapes = {
            "token_ids": ((size,), torch.int32),
            "positions": ((size,), torch.int32),
            "slots": ((size,), torch.int64),
            "query_starts": ((size + 1,), torch.int32),
            "context_lens": ((size,), torch.int32),
            "block_tables": ((size, max_blocks), torch.int32),
        }
        is_gpu = device.type == "cuda"
        self._host = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=is_gpu) for name, (shape, dtype) in shapes.items()
        }
        self._host["slots"].fill_(PADDING_SLOT)
        self._host["query_starts"].copy_(torch.arange(size + 1))
        self.size = size
        self.device = {name: tensor.to(device, copy=True) for name, tensor in self._host.items()}

    def fill(self, step: StepInput) -> None:
        """Copies a plain decode step in. The copies of the step before have ended: its tokens were drawn since."""
        host, count = {name: tensor.numpy() for name, tensor in self._host.items()}, step.num_sequences
        for name in ("token_ids", "positions", "slots", "context_lens"):
            host[name][:count] = getattr(step, name)
        host["slots"][count:] = PADDING_SLOT
        host["token_ids"][count:] = host["positions"][count:] = host["context_lens"][count:] = 0
        # What is left of longer tables lies behind every context.
        host["block_tables"][:count, : step.block_tables.shape[1]] = step.block_tables
        for name, tensor in self._host.items():
            self.device[name].copy_(tensor, non_blocking=True)


class DecodeGraphs:
    """A graph for each bucket. Owned by the runner; used by its thread alone."""

    def __init__(
        self, decoder: Decoder, pool: torch.Tensor, capture: Capture, *, max_sequences: int, max_model_len: int
    ) -> None:
        """Captures every bucket, the largest first: the smaller ones fit into its memory."""
        self._sizes = bucket_sizes(max_sequences)
        max_blocks = -(-max_model_len // int(pool.shape[4]))
        self._steps: dict[int, PaddedStep] = {}
        self._replays: dict[int, Compute] = {}
        for size in reversed(self._sizes):
            step = self._steps[size] = PaddedStep(size, max_blocks, pool.device)
            tensors = _tensors_of(step, decoder, pool, max_model_len)
            self._replays[size] = capture(lambda tensors=tensors: decoder.compute(tensors, pool, None))  # type: ignore[misc]

    def run(self, step: StepInput) -> StepOutput | None:
        """The step's output, good until the next step; None for a step that has no graph."""
        size = bucket_for(step.num_sequences, self._sizes) if is_plain_decode(step) else None
        if size is None:
            return None
        self._steps[size].fill(step)
        output = self._replays[size]()
        return StepOutput(output.logits[: step.num_sequences], output.hidden[: step.num_sequences])


def capture_cuda_graph(compute: Compute) -> Compute:
    """Captures it, after it ran once beside the stream: kernels are compiled then, and libraries have their memory."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = compute()

    def replay() -> StepOutput:
        graph.replay()
        return output

    return replay


def _tensors_of(step: PaddedStep, decoder: Decoder, pool: torch.Tensor, max_model_len: int) -> StepTensors:
    # Not at the top: triton need not be installed where nobody captures.
    from engine.kernels.triton.operations import plan_fixed_decode

    at = step.device
    plan = plan_fixed_decode(
        at["query_starts"], at["context_lens"], at["block_tables"], decoder.attention_shape, pool, max_model_len
    )
    rows = torch.arange(step.size, device=pool.device)
    return StepTensors(at["token_ids"], None, at["positions"], at["slots"], rows, plan)
