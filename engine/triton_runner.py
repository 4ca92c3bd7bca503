"""The Triton backend: where it can run, and what its runner is made of."""

from __future__ import annotations

import importlib.util

import torch

from cluster.errors import StartupError
from engine.decode_graphs import Capture, DecodeGraphs
from engine.interpreter_turn import interpreter_turn, is_interpreting
from engine.step import LayerCallback, StepInput, StepOutput
from engine.tensor_parallel.ranks import Ranks
from engine.torch_runner import PoolTensor, TorchRunner
from engine.weights.weight_source import WeightSource

QUANTIZATIONS = ("none", "int4", "int8", "fp8")
FP8_CAPABILITY = (8, 9)


def triton_device(quantization: str, kv_dtype: str = "auto") -> torch.device:
    """The GPU, or the CPU under Triton's interpreter (`TRITON_INTERPRET=1`: slow, for tests).

    Raises `StartupError` where neither is there, or where the GPU cannot do what is asked.
    """
    if importlib.util.find_spec("triton") is None:
        raise StartupError("backend triton needs the package triton: pip install 'tandem-serve[gpu]'", param="backend")
    if quantization not in QUANTIZATIONS:
        raise StartupError(
            f"backend triton keeps weights as {', '.join(QUANTIZATIONS)}, not {quantization}", param="quantization"
        )
    if is_interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError("backend triton needs a GPU: use auto, native or torch", param="backend")
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        for setting, value in (("quantization", quantization), ("kv_dtype", kv_dtype)):
            if value == "fp8":
                raise StartupError(f"{setting} fp8 needs a GPU of compute capability 8.9 or later", param=setting)
    return torch.device("cuda")


class TritonRunner(TorchRunner):
    """A decoder whose operations are Triton kernels; keeps `engine.step.ModelRunner`'s promise.

    The tensors of a `StepOutput` are good until the next step.
    """

    _graphs: DecodeGraphs | None = None

    def capture_decode_steps(self, capture: Capture, *, max_sequences: int, max_model_len: int) -> None:
        """From now on plain decode steps of so many sequences replay what `capture` makes. Nobody owns a block yet.

        Raises `StartupError` when the GPU does not capture.
        """
        try:
            with interpreter_turn(), torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._decoder,
                    self._pool,
                    capture,
                    max_sequences=max_sequences,
                    max_model_len=max_model_len or self.config.max_model_len,
                )
        except RuntimeError as error:
            raise StartupError(
                f"decode steps cannot be captured as CUDA graphs ({error}): set cuda_graphs to off", param="cuda_graphs"
            ) from error

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        with interpreter_turn():
            if self._graphs is not None and layer_done is None:
                with torch.inference_mode():
                    output = self._graphs.run(step)
                if output is not None:
                    return output
            return super().forward(step, layer_done)


def triton_runner(
    weights: WeightSource,
    memory: PoolTensor,
    *,
    quantization: str,
    max_model_len: int,
    dtype: str = "",
    ranks: Ranks | None = None,
) -> TritonRunner:
    """Call `triton_device` first: it says what is missing. Raises `StartupError` for experts to be quantised."""
    if weights.config.mixture is not None and quantization != "none":
        raise StartupError(
            f"{weights.config.name} is a mixture of experts, whose matrices stay in the model's dtype: "
            "set quantization to none",
            param="quantization",
        )
    # Not at the top: triton need not be installed where nobody asks for it.
    from engine.kernels.triton.operations import triton_operations

    operations = triton_operations(quantization)
    return TritonRunner(
        weights, memory, dtype=dtype, max_model_len=max_model_len, operations=operations, backend="triton", ranks=ranks
    )
