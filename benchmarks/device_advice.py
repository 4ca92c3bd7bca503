"""What a fleet's owner asks before a device is rented: what fits where, which quantisation, which drafter, how much.

Tables of text over `hardware_prior`'s arithmetic: estimates from data sheets until a sweep on the device replaces them.
Does not know prices: figures are of one device, so that whoever knows them can divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.hardware_catalogue import DEVICES, Device
from benchmarks.hardware_prior import (
    DRAFTERS,
    QUANTISATIONS,
    Fit,
    Quantisation,
    capacity_prior,
    drafter_choices,
    fit,
    step_ms,
    tokens_per_pass,
    tokens_per_pass_linear,
    transfer_ms,
)
from benchmarks.model_arithmetic import ModelShape
from benchmarks.pool_capacity import TrafficShape
from deploy.autoscaler.capacity import largest_batch

BATCHES = (1, 8, 64, 256)
REPLICA_SIZES = (1, 2, 4, 8)
BLOCK_TOKENS = 16
# A replica that holds fewer sequences than this at once is taken up by one user.
MIN_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a model: so many devices, its weights stored so."""

    model: ModelShape
    device: Device
    num_devices: int
    quantisation: Quantisation

    @property
    def name(self) -> str:
        return f"{self.num_devices} x {self.device.name}"

    @property
    def room(self) -> Fit:
        return fit(self.model, self.device, self.quantisation, self.num_devices, BLOCK_TOKENS)

    def token_ms(self, batch: int, context_tokens: int) -> float:
        """Time of a decode step, which gives each sequence one token."""
        return step_ms(self.model, self.device, self.quantisation, batch, context_tokens, 1, self.num_devices)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a replica gives within an objective; rates are of one of its devices."""

    replica: Replica
    num_sequences: int  # whose KV it holds at once
    alone_ms: float  # a token of one sequence
    batch: int  # the largest within the objective and the pool; 0: not even one sequence
    output_tokens_per_s: float
    prompt_tokens_per_s: float


def advice_lines(replica: Replica, traffic: TrafficShape, itl_ms: float) -> list[str]:
    """Everything about one replica under one workload, and what other devices would give."""
    context = _context(traffic)
    chosen = replica.quantisation.name
    return [
        *_what_fits(replica, traffic, context),
        "",
        f"a decode step on {replica.name} in ms, by batch of sequences of {context} tokens; * is the fastest",
        *_aligned(quantisation_rows(replica, context)),
        "",
        f"drafters in {chosen}: times as fast as without, by batch; a pass gives (1 - a^(k+1)) / (1 - a) tokens",
        *_aligned(drafter_rows(replica, context)),
        "",
        f"each device: the smallest replica that keeps {itl_ms:g} ms a token, in the quantisation that gives the most;",
        "rates are of one of its devices: output as if it only decoded, prompts as if it only prefilled",
        *_aligned(fleet_rows(replica.model, traffic, itl_ms)),
    ]


def throughput(replica: Replica, traffic: TrafficShape, itl_ms: float) -> Throughput:
    """Raises `ValueError` when the weights do not fit."""
    model = capacity_prior(replica.model, replica.device, replica.quantisation, replica.num_devices)
    context = _context(traffic)
    held = replica.room.num_sequences(context)
    is_in_time = model.tpot_ms(1, context) <= itl_ms
    batch = min(largest_batch(context, model, itl_ms), held) if is_in_time else 0
    uncached = max(1.0, traffic.input_tokens * (1 - traffic.hit_rate))
    prompt_ms = model.prefill_ms(uncached, traffic.input_tokens - uncached)
    return Throughput(
        replica=replica,
        num_sequences=held,
        alone_ms=replica.token_ms(1, context),
        batch=batch,
        output_tokens_per_s=1e3 * batch / model.tpot_ms(batch, context) / replica.num_devices if batch else 0.0,
        prompt_tokens_per_s=1e3 * traffic.input_tokens / prompt_ms / replica.num_devices,
    )


def smallest_replica(
    model: ModelShape, device: Device, quantisation: Quantisation, traffic: TrafficShape, itl_ms: float
) -> Throughput | None:
    """The fewest devices that hold a few sequences and keep the objective; None: eight do not."""
    for num_devices in REPLICA_SIZES:
        replica = Replica(model, device, num_devices, quantisation)
        if replica.room.num_sequences(_context(traffic)) < MIN_SEQUENCES:
            continue
        found = throughput(replica, traffic, itl_ms)
        if found.batch >= 1:
            return found
    return None


def best_replicas(model: ModelShape, traffic: TrafficShape, itl_ms: float) -> dict[str, Throughput | None]:
    """By device: the smallest replica in the quantisation with which one device gives the most tokens."""
    best: dict[str, Throughput | None] = {}
    for device in DEVICES.values():
        found = [smallest_replica(model, device, quantisation, traffic, itl_ms) for quantisation in QUANTISATIONS]
        best[device.name] = max(
            (one for one in found if one is not None), key=lambda one: one.output_tokens_per_s, default=None
        )
    return best


# --- tables -----------------------------------------------------------------------------------------------------------


def quantisation_rows(replica: Replica, context_tokens: int) -> list[tuple[str, ...]]:
    """A quantisation a row, a batch a column."""
    others = [replace(replica, quantisation=quantisation) for quantisation in QUANTISATIONS]
    columns = []
    for batch in BATCHES:
        times = [
            one.token_ms(batch, context_tokens) if one.room.num_sequences(context_tokens) >= batch else None
            for one in others
        ]
        fastest = min((time for time in times if time is not None), default=None)
        columns.append([_time(time, is_fastest=time == fastest) for time in times])
    head = ("", "weights GB", f"sequences of {context_tokens}", *(str(batch) for batch in BATCHES))
    rows = [
        (one.quantisation.name, f"{one.room.weights_bytes / 1e9:.1f}", str(one.room.num_sequences(context_tokens)))
        for one in others
    ]
    return [head, *((*row, *cells) for row, *cells in zip(rows, *columns, strict=True))]


def drafter_rows(replica: Replica, context_tokens: int) -> list[tuple[str, ...]]:
    """A drafter a row, a batch a column: above 1 it pays."""
    columns = [
        [
            f"{choice.speedup:.2f}"
            for choice in drafter_choices(
                replica.model, replica.device, replica.quantisation, batch, context_tokens, replica.num_devices
            )
        ]
        for batch in BATCHES
    ]
    head = ("", "drafts k", "acceptance a", "tokens a pass", "by 1 + k a", *(str(batch) for batch in BATCHES))
    rows = [
        (
            drafter.name,
            str(drafter.num_drafts),
            f"{drafter.acceptance:.2f}",
            f"{tokens_per_pass(drafter.acceptance, drafter.num_drafts):.2f}",
            f"{tokens_per_pass_linear(drafter.acceptance, drafter.num_drafts):.2f}",
        )
        for drafter in DRAFTERS
    ]
    return [head, *((*row, *cells) for row, *cells in zip(rows, *columns, strict=True))]


def fleet_rows(model: ModelShape, traffic: TrafficShape, itl_ms: float) -> list[tuple[str, ...]]:
    """A device a row; rates are of one device of the replica."""
    head = ("replica", "weights", "sequences", "ms alone", "batch", "output tokens/s", "prompt tokens/s")
    rows: list[tuple[str, ...]] = [head]
    for name, found in best_replicas(model, traffic, itl_ms).items():
        if found is None:
            rows.append((f"{REPLICA_SIZES[-1]} x {name}", "none", "-", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                found.replica.name,
                found.replica.quantisation.name,
                str(found.num_sequences),
                f"{found.alone_ms:.1f}",
                str(found.batch),
                f"{found.output_tokens_per_s:,.0f}",
                f"{found.prompt_tokens_per_s:,.0f}",
            )
        )
    return rows


def _what_fits(replica: Replica, traffic: TrafficShape, context: int) -> list[str]:
    model, device, room = replica.model, replica.device, replica.room
    kv_bytes = traffic.input_tokens * model.kv_bytes_per_token()
    links = (("beside it", device.link_bytes_per_s), ("over the network", device.nic_bytes_per_s))
    told = ", ".join(f"{transfer_ms(kv_bytes, rate):.1f} ms {where}" for where, rate in links)
    experts = f", {model.num_active_parameters / 1e9:.1f} of them for a token" if model.num_experts > 1 else ""
    return [
        f"estimates from data sheets, nothing measured ({device.source})",
        f"{model.name}: {model.num_parameters / 1e9:.1f} billion parameters{experts}, "
        f"{model.kv_bytes_per_token() / 1024:.0f} KiB of KV a token",
        f"{replica.name} in {replica.quantisation.name}: weights {room.weights_bytes / 1e9:.1f} GB, left "
        f"{room.kv_bytes / 1e9:.1f} GB: {room.kv_blocks:,} KV blocks of {BLOCK_TOKENS} tokens, "
        f"{room.num_sequences(context)} sequences of {context} tokens",
        f"KV of a prompt {kv_bytes / 1e9:.2f} GB: to another worker {told}, most of it hidden behind prefill",
    ]


def _context(traffic: TrafficShape) -> int:
    """Tokens of a sequence at its end: what its KV must have room for."""
    return max(1, int(traffic.input_tokens + traffic.output_tokens))


def _time(time_ms: float | None, *, is_fastest: bool) -> str:
    if time_ms is None:
        return "-"
    return f"{time_ms:.1f}{'*' if is_fastest else ' '}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(["", f"{first:<{widths[0]}}", *cells]).rstrip()
