"""What fits and what pays on a device that nobody has measured yet: a roofline over the catalogue and a model's shape.

    step time     max(bytes read / bandwidth, arithmetic / flops) + KV read + all-reduces between a replica's devices
    what fits     weights, then KV blocks in the memory that is left
    what pays     which quantisation and which drafter at which batch

The shares of the peaks that real engines reach are assumptions, named below; a sweep replaces all of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.hardware_catalogue import Device
from benchmarks.model_arithmetic import ModelShape
from deploy.autoscaler.capacity import CapacityModel

# Shares of the data sheet that well-made kernels reach. Assumptions: large products run at about half of the dense
# peak, streaming reads at about four fifths of the bandwidth.
PREFILL_FLOPS_SHARE = 0.5
DECODE_BANDWIDTH_SHARE = 0.8
# Of the memory: what an engine may plan with, and what activations and workspaces take of that.
USABLE_MEMORY_SHARE = 0.9
WORKSPACE_SHARE = 0.05
# A step's fixed cost: launches, scheduling, sampling. An assumption.
STEP_OVERHEAD_MS = 1.0
MAX_PLANNED_BATCH = 1024
# Of one all-reduce of a few kilobytes, however fast the link. An assumption.
ALL_REDUCE_LATENCY_MS = 0.01
ALL_REDUCES_PER_LAYER = 2  # behind attention and behind the feed-forward
ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights are stored and in which precision they are multiplied."""

    name: str
    weight_bytes: float  # of one parameter, scales included
    precision: str


QUANTISATIONS: tuple[Quantisation, ...] = (
    Quantisation("bf16", 2.0, "bf16"),
    Quantisation("fp8", 1.0, "fp8"),
    Quantisation("int8", 1.0, "int8"),
    # 4 bits and a bf16 scale for each 128 weights; multiplied in bf16 after unpacking.
    Quantisation("int4", 0.5 + 2 / 128, "bf16"),
)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter by its cost and its luck. `cost_share`: time of one draft token over the target's step at batch 1."""

    name: str
    cost_share: float
    acceptance: float
    num_drafts: int = 5


# Shares and acceptance of a 70B target at 42 ms: a standalone draft takes 4 ms, EAGLE .5 ms; Medusa's heads ride along.
# N-gram's acceptance is the workload's: half a chance in text that repeats itself, none elsewhere.
DRAFTERS: tuple[Drafter, ...] = (
    Drafter("standalone", 4 / 42, 0.80),
    Drafter("eagle", 0.5 / 42, 0.72),
    Drafter("medusa", 0.0, 0.50),
    Drafter("ngram", 0.0, 0.25),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model leaves of a device."""

    weights_bytes: float
    kv_bytes: float  # 0: the weights do not fit
    kv_blocks: int
    kv_tokens: int

    def num_sequences(self, context_tokens: int) -> int:
        """That many sequences of that length hold their KV at once."""
        return self.kv_tokens // context_tokens


def fit(
    model: ModelShape, device: Device, quantisation: Quantisation, num_devices: int = 1, block_tokens: int = 16
) -> Fit:
    """Weights and KV of one replica over `num_devices` devices (tensor parallel)."""
    usable = num_devices * device.memory_bytes * USABLE_MEMORY_SHARE * (1 - WORKSPACE_SHARE)
    weights = model.num_parameters * quantisation.weight_bytes
    left = max(0.0, usable - weights)
    blocks = int(left // model.kv_block_bytes(block_tokens))
    return Fit(weights, left, blocks, blocks * block_tokens)


def num_blocks_in(kv_bytes: float, model: ModelShape, block_tokens: int = 16) -> int:
    """KV blocks that a pool of that size holds."""
    return int(kv_bytes // model.kv_block_bytes(block_tokens))


def transfer_ms(kv_bytes: float, bytes_per_s: float) -> float:
    return kv_bytes / bytes_per_s * 1e3


def step_ms(
    model: ModelShape,
    device: Device,
    quantisation: Quantisation,
    batch: int,
    context_tokens: int,
    tokens_per_sequence: int = 1,
    num_devices: int = 1,
) -> float:
    """One decode (or verification) step: weights are read once, or multiplied with every token, whichever is slower."""
    num_tokens = batch * tokens_per_sequence
    bandwidth = num_devices * device.bandwidth_bytes_per_s * DECODE_BANDWIDTH_SHARE
    arithmetic = num_devices * device.flops_of(quantisation.precision) * PREFILL_FLOPS_SHARE
    read_s = model.num_touched_parameters(num_tokens) * quantisation.weight_bytes / bandwidth
    compute_s = 2 * model.num_active_parameters * num_tokens / arithmetic
    kv_s = batch * context_tokens * model.kv_bytes_per_token() / bandwidth
    together_ms = all_reduce_ms(model, device, num_tokens, num_devices)
    return (max(read_s, compute_s) + kv_s) * 1e3 + STEP_OVERHEAD_MS + together_ms


def all_reduce_ms(model: ModelShape, device: Device, num_tokens: float, num_devices: int) -> float:
    """What tensor parallelism adds to a step: 2 (n - 1) / n of the activations over the link, twice a layer.

    Source: the ring all-reduce, Patarasuk and Yuan 2009."""
    if num_devices == 1:
        return 0.0
    num_bytes = 2 * (num_devices - 1) / num_devices * num_tokens * model.hidden_size * ACTIVATION_BYTES
    return (
        ALL_REDUCES_PER_LAYER * model.num_layers * (ALL_REDUCE_LATENCY_MS + num_bytes / device.link_bytes_per_s * 1e3)
    )


def tokens_per_pass(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of one verification: (1 - a^(k+1)) / (1 - a). Source: Leviathan et al. 2023, equation 1."""
    if acceptance >= 1.0:
        return num_drafts + 1.0
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def tokens_per_pass_linear(acceptance: float, num_drafts: int) -> float:
    """The rule of thumb 1 + k a: as if each draft were accepted alone. Always above the exact one for 0 < a < 1."""
    return 1 + num_drafts * acceptance


def speculative_token_ms(target_ms: float, draft_ms: float, num_drafts: int, tokens: float) -> float:
    """Time of one token: a pass of the target and `num_drafts` of the drafter, over the tokens that they give."""
    return (target_ms + num_drafts * draft_ms) / tokens


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter at one batch against decoding without; `speedup` below 1 does not pay."""

    drafter: str  # "off" where none pays
    token_ms: float
    speedup: float


def drafter_choices(
    model: ModelShape,
    device: Device,
    quantisation: Quantisation,
    batch: int,
    context_tokens: int,
    num_devices: int = 1,
) -> list[DrafterChoice]:
    """Every drafter at that batch: verification of a large batch is arithmetic."""
    plain_ms = step_ms(model, device, quantisation, batch, context_tokens, 1, num_devices)
    choices = []
    for drafter in DRAFTERS:
        verify_ms = step_ms(model, device, quantisation, batch, context_tokens, drafter.num_drafts + 1, num_devices)
        # A drafter is a small model: it slows down with the batch as the target does.
        draft_ms = drafter.cost_share * plain_ms
        tokens = tokens_per_pass(drafter.acceptance, drafter.num_drafts)
        token_ms = speculative_token_ms(verify_ms, draft_ms, drafter.num_drafts, tokens)
        choices.append(DrafterChoice(drafter.name, token_ms, plain_ms / token_ms))
    return choices


def best_drafter(
    model: ModelShape,
    device: Device,
    quantisation: Quantisation,
    batch: int,
    context_tokens: int,
    num_devices: int = 1,
) -> DrafterChoice:
    """The drafter with the shortest token time at that batch, or `off` where none is faster than no drafter."""
    plain_ms = step_ms(model, device, quantisation, batch, context_tokens, 1, num_devices)
    choices = drafter_choices(model, device, quantisation, batch, context_tokens, num_devices)
    return min([DrafterChoice("off", plain_ms, 1.0), *choices], key=lambda choice: choice.token_ms)


def best_quantisation(
    model: ModelShape, device: Device, batch: int, context_tokens: int, num_devices: int = 1
) -> Quantisation:
    """The fastest at that batch of those whose weights and KV fit; the first of equals, so bf16 unless one is faster.

    Raises `ValueError` when none fits."""
    fitting = [
        one
        for one in QUANTISATIONS
        if fit(model, device, one, num_devices).num_sequences(max(1, context_tokens)) >= batch
    ]
    if not fitting:
        raise ValueError(
            f"{batch} sequences of {context_tokens} tokens of {model.name} do not fit on {num_devices} x {device.name} "
            f"in any of {', '.join(one.name for one in QUANTISATIONS)}"
        )
    return min(fitting, key=lambda one: step_ms(model, device, one, batch, context_tokens, 1, num_devices))


def capacity_prior(
    model: ModelShape, device: Device, quantisation: Quantisation, num_devices: int = 1
) -> CapacityModel:
    """The timing models of `deploy.autoscaler.capacity` from the data sheet.

    Experts: a decode step is taken to read what a batch of 64 reads. Raises `ValueError` when the weights do not fit.
    """
    room = fit(model, device, quantisation, num_devices)
    if room.kv_blocks == 0:
        raise ValueError(
            f"{model.name} in {quantisation.name} takes {room.weights_bytes / 1e9:.1f} GB: "
            f"it does not fit on {num_devices} x {device.name}; add devices or quantise further"
        )
    arithmetic = num_devices * device.flops_of(quantisation.precision) * PREFILL_FLOPS_SHARE / 1e3  # per ms
    bandwidth = num_devices * device.bandwidth_bytes_per_s * DECODE_BANDWIDTH_SHARE / 1e3  # per ms
    fixed_ms = STEP_OVERHEAD_MS + all_reduce_ms(model, device, 0, num_devices)
    token_ms = all_reduce_ms(model, device, 1, num_devices) - all_reduce_ms(model, device, 0, num_devices)
    token_ms += 2 * model.num_active_parameters / arithmetic
    return CapacityModel(
        c0_ms=fixed_ms + model.num_touched_parameters(512) * quantisation.weight_bytes / bandwidth,
        c1_ms=token_ms,
        c2_ms=model.attention_flops_per_pair / arithmetic,
        alpha_ms=fixed_ms + model.num_touched_parameters(64) * quantisation.weight_bytes / bandwidth,
        beta_ms=token_ms,
        gamma_ms=model.kv_bytes_per_token() / bandwidth,
        kv_tokens=room.kv_tokens,
        max_batch=MAX_PLANNED_BATCH,
    )
