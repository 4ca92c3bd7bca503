"""How many prefill workers for each decode worker do published traces want: `python -m benchmarks.trace_ratios FILE...`

One device and one objective for all of them, so that only the traffic differs. A table in Markdown goes to standard
output; it stands in docs/planning.md. The files are the user's: none is part of this project.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan_command import PlanOptions, make_plan
from benchmarks.planner import PdPlan

MODEL, DEVICE = "Llama-3.1-8B", "H100"
TTFT_MS, TPOT_MS = 4_000.0, 50.0
MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class TraceRatio:
    """One trace and the plan for its traffic."""

    name: str
    plan: PdPlan


def trace_ratio(path: Path) -> TraceRatio:
    """The plan for a Mooncake `.jsonl` or an Azure `.csv` trace. Raises `TraceError` for a file that is neither."""
    options = PlanOptions(
        directory=None, model=MODEL, device=DEVICE, num_devices=1, quantisation="bf16", input_tokens=0, output_tokens=0,
        hit_rate=-1, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS, trace=path, max_workers=MAX_WORKERS, out=None,
    )  # fmt: skip
    made, _ = make_plan(options)
    return TraceRatio(path.stem, made)


def ratios_markdown(found: Sequence[TraceRatio]) -> str:
    lines = [
        "| trace | mean input | mean output | hit rate | prefill for each decode | best split |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        traffic, split = one.plan.traffic, one.plan.split
        lines.append(
            f"| {one.name} | {traffic.input_tokens:,.0f} | {traffic.output_tokens:,.0f} | {traffic.hit_rate:.2f} | "
            f"{one.plan.ratio:.1f} | {'none' if split is None else f'{split.prefill}P{split.decode}D'} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stderr.write("give the traces' files: python -m benchmarks.trace_ratios conversation.jsonl code.csv\n")
        return 2
    sys.stdout.write(ratios_markdown([trace_ratio(Path(argument)) for argument in arguments]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
