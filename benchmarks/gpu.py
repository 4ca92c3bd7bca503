"""Each Triton operation on this machine's GPU as a fraction of what the GPU can do, both measured in one run.

    python -m benchmarks.gpu [--dtype bfloat16] [--json]

An operation's floor is the larger of its bytes over the copy rate and its operations over the rate of a large matrix
product of the same type. Shapes are those of an 8-billion-parameter Llama. Without a GPU it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from cluster.kv_layout import SCALE_BYTES
from engine.decode_graphs import Capture, capture_cuda_graph
from engine.device_kv_memory import DeviceKvMemory
from engine.kernels.fp8_kv import quantize, split_pool
from engine.kernels.triton import fused_layers, kv_cells
from engine.kernels.triton.operations import num_splits
from engine.kernels.triton.paged_attention import paged_attention
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.kernels.triton.quantized_linear import GROUP_SIZE, quantize_int4
from engine.kernels.triton.quantized_matmul import matmul_w4a16, matmul_w8a8, quantize_rows
from engine.kv_memory import layout_of
from engine.model_config import ModelConfig
from engine.step import StepInput
from engine.triton_runner import triton_runner
from engine.weights.expected_shapes import expected_shapes
from engine.weights.weight_source import RawBlocks

COPY_BYTES = 1 << 30
MATRIX_SIZE = 8192
STEP_LAYERS = 4  # a whole model's step is as many times longer as it has more layers
EXIT_CANNOT_RUN = 2

# Seconds of one call.
Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the operations of a model's step are made of."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 14336
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One operation with what it must move (bytes) and compute (operations, of one of `Rates.matrix`)."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    num_operations: float = 0.0
    kind: str = "half"


@dataclass(frozen=True, slots=True)
class Rates:
    """What the GPU does at best: bytes copied a second (read and written), operations a second by type."""

    copy_bytes_per_s: float
    matrix: dict[str, float]

    def floor_s(self, case: Case) -> float:
        compute_s = case.num_operations / self.matrix[case.kind] if case.num_operations else 0.0
        return max(case.num_bytes / self.copy_bytes_per_s, compute_s)


@dataclass(frozen=True, slots=True)
class Result:
    """One operation's time beside its floor."""

    name: str
    microseconds: float
    floor_us: float

    @property
    def share_of_floor(self) -> float:
        return self.floor_us / self.microseconds


def measure(cases: Iterator[Case], rates: Rates, seconds_of: Timer) -> Iterator[Result]:
    """A case's tensors live only while it is timed: the generator makes one at a time."""
    for case in cases:
        yield Result(case.name, 1e6 * seconds_of(case.call), 1e6 * rates.floor_s(case))


def measure_rates(device: torch.device, dtype: torch.dtype, seconds_of: Timer, *, has_fp8: bool) -> Rates:
    """A large copy, and a large product in each type that the kernels multiply."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source))
    operations = 2.0 * MATRIX_SIZE**3
    half = torch.randn((MATRIX_SIZE, MATRIX_SIZE), dtype=dtype, device=device)
    matrix = {"half": operations / seconds_of(lambda: half @ half)}
    whole = half.to(torch.int8)
    matrix["int8"] = operations / seconds_of(lambda: torch._int_mm(whole, whole.t()))
    if has_fp8:
        small, one = half.to(torch.float8_e4m3fn), torch.ones((), device=device)
        matrix["fp8"] = operations / seconds_of(
            lambda: torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=dtype)
        )
    return Rates(2 * COPY_BYTES / copy_s, matrix)


def attention_cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, decode: Sequence[tuple[int, int, int]],
    prefill: Sequence[tuple[int, int]], multiprocessors: int, *, has_fp8: bool,
) -> Iterator[Case]:  # fmt: skip
    """`decode`: (sequences, context, new tokens of each); `prefill`: (sequences, tokens)."""
    scale = shape.head_dim**-0.5
    for batch, context, new in decode:
        pool, query, tables, lens, starts = _paged(shape, device, dtype, batch, context, new)
        splits = num_splits(batch, shape.num_kv_heads, context, multiprocessors)
        for kind, blocks in (("", pool), *((", FP8 KV", _as_fp8(pool)) for _ in range(has_fp8))):
            yield Case(
                f"decode attention, {batch} x {context}, {new} new{kind}",
                lambda p=blocks, q=query, t=tables, c=lens, s=starts, n=new, k=splits: paged_attention(  # type: ignore[misc]
                    q, p, 0, t, c, s, scale, n, k
                ),
                num_bytes=batch * context * blocks.stride(1) * blocks.element_size() / shape.block_tokens,
                num_operations=4.0 * batch * new * context * shape.num_heads * shape.head_dim,
            )
    for batch, tokens in prefill:
        pool, query, tables, lens, starts = _paged(shape, device, dtype, batch, tokens, tokens)
        yield Case(
            f"prefill attention, {batch} x {tokens}",
            lambda p=pool, q=query, t=tables, c=lens, s=starts, n=tokens: prefill_attention(  # type: ignore[misc]
                q, p, 0, t, c, s, scale, n
            ),
            num_bytes=batch * tokens * _kv_bytes(shape, dtype),
            # Half of the square is masked.
            num_operations=2.0 * batch * tokens * tokens * shape.num_heads * shape.head_dim,
        )


def layer_cases(shape: ModelShape, device: torch.device, dtype: torch.dtype, tokens: int) -> Iterator[Case]:
    """What stands between the products, and the moves of KV, for `tokens` rows."""
    size = torch.finfo(dtype).bits // 8
    hidden = torch.randn((tokens, shape.hidden), dtype=dtype, device=device)
    residual, weight = hidden.clone(), torch.ones(shape.hidden, dtype=dtype, device=device)
    yield Case(
        f"add + RMSNorm, {tokens} rows",
        lambda: fused_layers.add_rms_norm(hidden, residual, weight, 1e-5),
        num_bytes=4 * tokens * shape.hidden * size,
    )
    heads = torch.randn((tokens, shape.num_heads + shape.num_kv_heads, shape.head_dim), dtype=dtype, device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    cos = torch.ones((tokens, shape.head_dim // 2), device=device)
    yield Case(
        f"rotary, {tokens} rows",
        lambda: fused_layers.rotary(heads, positions, cos, cos),
        num_bytes=2 * heads.numel() * size,
    )
    gate_up = torch.randn((tokens, 2 * shape.intermediate), dtype=dtype, device=device)
    yield Case(
        f"SiLU x up, {tokens} rows",
        lambda: fused_layers.silu_multiply(gate_up),
        num_bytes=3 * tokens * shape.intermediate * size,
    )
    pool, key, _, _, _ = _paged(shape, device, dtype, 1, tokens, tokens)
    key = key[:, : shape.num_kv_heads].contiguous()
    slots = torch.arange(tokens, device=device)
    yield Case(
        f"KV write, {tokens} rows",
        lambda: kv_cells.kv_write(key, key, pool, 0, slots),
        num_bytes=4 * key.numel() * size,
    )
    blocks = torch.arange(pool.shape[0], dtype=torch.int32, device=device)
    yield Case(
        f"gather of {pool.shape[0]} blocks",
        lambda: kv_cells.gather_cells(pool, blocks, 0, 1),
        num_bytes=2 * pool.numel() * size,
    )


def step_cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, batches: Sequence[tuple[int, int]], capture: Capture
) -> Iterator[Case]:
    """A decode step of `STEP_LAYERS` layers, launched by Python and as a graph. `batches`: (sequences, context)."""
    config = ModelConfig(
        "llama", "random", 1024, shape.hidden, shape.intermediate, STEP_LAYERS, shape.num_heads, shape.num_kv_heads,
        shape.head_dim, 10000.0, 1e-5, max(context for _, context in batches), tie_embeddings=True,
    )  # fmt: skip
    kinds = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    for batch, context in batches:
        width = -(-context // shape.block_tokens)
        memory = DeviceKvMemory(layout_of(config, kinds[dtype], shape.block_tokens), batch * width, device)
        runner = triton_runner(_RandomWeights(config), memory, quantization="none", max_model_len=0)
        step = _decode_step(batch, context, width, shape.block_tokens)
        weights = STEP_LAYERS * shape.hidden * (2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim)
        weights += (3 * STEP_LAYERS * shape.intermediate + config.vocab_size) * shape.hidden
        num_bytes = weights * torch.finfo(dtype).bits / 8 + batch * context * STEP_LAYERS * _kv_bytes(shape, dtype)
        for kind in ("launched by Python", "replayed graph"):
            if kind == "replayed graph":
                runner.capture_decode_steps(capture, max_sequences=batch, max_model_len=0)
            yield Case(
                f"decode step of {STEP_LAYERS} layers, {batch} x {context}, {kind}",
                lambda r=runner, s=step: r.forward(s, None),  # type: ignore[misc]
                num_bytes=num_bytes,
            )


class _RandomWeights:
    """A `WeightSource` of any size."""

    blocks_are_exact = False

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def names(self) -> Sequence[str]:
        return sorted(expected_shapes(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        shape = expected_shapes(self.config)[name]
        return torch.randn(shape, dtype=torch.bfloat16).div_(shape[-1] ** 0.5)

    def raw_blocks(self, name: str) -> RawBlocks | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


def _decode_step(batch: int, context: int, width: int, block_tokens: int) -> StepInput:
    """The last token of each of so many sequences."""
    tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    last = context - 1
    return StepInput(
        token_ids=np.arange(batch, dtype=np.int32),
        positions=np.full(batch, last, np.int32),
        slots=tables[:, last // block_tokens].astype(np.int64) * block_tokens + last % block_tokens,
        query_starts=np.arange(batch + 1, dtype=np.int32),
        context_lens=np.full(batch, context, np.int32),
        block_tables=tables,
        logit_rows=np.arange(batch, dtype=np.int32),
    )


def matrix_cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, row_counts: Sequence[int], *, has_fp8: bool
) -> Iterator[Case]:
    """Products with quantised weights, in the shape of gate and up."""
    outputs, inputs = 2 * shape.intermediate, shape.hidden
    size = torch.finfo(dtype).bits // 8
    weight = torch.randn((outputs, inputs), dtype=dtype, device=device)
    packed, scales, zeros = quantize_int4(weight)
    eights = {"int8": torch.int8, **({"fp8": torch.float8_e4m3fn} if has_fp8 else {})}
    quantized = {kind: quantize_rows(weight, eight) for kind, eight in eights.items()}
    for rows in row_counts:
        x = torch.randn((rows, inputs), dtype=dtype, device=device)
        operations = 2.0 * rows * outputs * inputs
        yield Case(
            f"W4A16, {rows} rows",
            lambda x=x: matmul_w4a16(x, packed, scales, zeros, GROUP_SIZE),  # type: ignore[misc]
            num_bytes=outputs * inputs * (0.5 + 2 * size / GROUP_SIZE) + rows * (inputs + outputs) * size,
            num_operations=operations,
        )
        for kind, (values, value_scales) in quantized.items():
            narrow, row_scales = quantize_rows(x, eights[kind])
            yield Case(
                f"W8A8 {kind}, {rows} rows",
                lambda n=narrow, r=row_scales, v=values, s=value_scales: matmul_w8a8(n, r, v, s, dtype),  # type: ignore[misc]
                num_bytes=outputs * inputs + rows * (inputs + outputs * size),
                num_operations=operations,
                kind=kind,
            )


def _paged(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, batch: int, context: int, new: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pool of one layer, query, block tables (in shuffled order), context lengths, query starts."""
    width = -(-context // shape.block_tokens)
    cell = (1, 2, shape.num_kv_heads, shape.block_tokens, shape.head_dim)
    pool = torch.randn((batch * width, *cell), dtype=dtype, device=device)
    query = torch.randn((batch * new, shape.num_heads, shape.head_dim), dtype=dtype, device=device)
    order = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0))
    tables = order.to(torch.int32).view(batch, width).to(device)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * new
    return pool, query, tables, lens, starts


def _as_fp8(pool: torch.Tensor) -> torch.Tensor:
    """Another pool of that shape, with FP8 KV in every slot."""
    blocks, layers, pair, heads, block_tokens, head_dim = pool.shape
    row = (blocks, layers, pair, heads, block_tokens, head_dim + SCALE_BYTES)
    narrow = torch.empty(row, dtype=torch.uint8, device=pool.device)
    values, scales = split_pool(narrow)
    quantized, row_scales = quantize(pool)
    values.copy_(quantized.view(torch.uint8))
    scales.copy_(row_scales)
    return narrow


def _kv_bytes(shape: ModelShape, dtype: torch.dtype) -> float:
    """Of one token in one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * torch.finfo(dtype).bits / 8


def markdown(device_name: str, rates: Rates, results: Sequence[Result]) -> str:
    matrix = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in rates.matrix.items())
    lines = [
        f"{device_name}: copy {rates.copy_bytes_per_s / 1e9:.0f} GB/s; products in TFLOP/s: {matrix}.",
        "",
        "| operation | us | floor, us | share of the floor |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.microseconds:.1f} | {one.floor_us:.1f} | {one.share_of_floor:.0%} |" for one in results
    ]
    return "\n".join(lines) + "\n"


def all_cases(shape: ModelShape, device: torch.device, dtype: torch.dtype, *, has_fp8: bool) -> Iterator[Case]:
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    decode = [(1, 8192, 1), (16, 2048, 1), (64, 2048, 1), (64, 8192, 1), (16, 2048, 5)]
    yield from attention_cases(shape, device, dtype, decode, [(1, 8192), (8, 2048)], multiprocessors, has_fp8=has_fp8)
    for tokens in (64, 4096):
        yield from layer_cases(shape, device, dtype, tokens)
    yield from matrix_cases(shape, device, dtype, (1, 16, 64, 2048), has_fp8=has_fp8)
    yield from step_cases(shape, device, dtype, [(1, 2048), (16, 2048)], capture_cuda_graph)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with the table, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu benchmark: torch sees no GPU on this machine", file=sys.stderr)
        return EXIT_CANNOT_RUN
    from triton.testing import do_bench

    device, dtype = torch.device("cuda"), getattr(torch, arguments.dtype)
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)

    def seconds_of(call: Callable[[], object]) -> float:
        return float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e3

    rates = measure_rates(device, dtype, seconds_of, has_fp8=has_fp8)
    results = list(measure(all_cases(ModelShape(), device, dtype, has_fp8=has_fp8), rates, seconds_of))
    name = torch.cuda.get_device_name(device)
    if arguments.json:
        rows = [asdict(one) | {"share_of_floor": one.share_of_floor} for one in results]
        print(json.dumps({"device": name, "rates": asdict(rates), "results": rows}, indent=1))
    else:
        print(markdown(name, rates, results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
