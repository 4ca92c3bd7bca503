"""From a worker's settings to its speculator."""

from __future__ import annotations

import logging

from cluster.errors import StartupError
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import OFF, ChainSpeculator
from decode_worker.speculation.step_costs import measure_step_costs
from decode_worker.speculation.suffix import SuffixDrafter
from engine.runner_factory import BuiltRunner

logger = logging.getLogger(__name__)

AUTO_DRAFTER = "suffix"


def open_speculator(settings: WorkerSettings, built: BuiltRunner) -> ChainSpeculator | None:
    """None when speculation is off. Measures steps on the runner; raises `StartupError` for drafters not there."""
    if settings.speculation == OFF:
        return None
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
    default = AUTO_DRAFTER
    if settings.speculation != "auto":
        default = settings.speculation
        if default not in drafters:
            raise StartupError(
                f"speculation {default} is not there yet, this version has off, auto, {', '.join(drafters)}",
                param="speculation",
            )
        drafters = {default: drafters[default]}
    costs = measure_step_costs(built.runner, built.memory.num_blocks, settings.block_tokens)
    logger.info("step costs measured", extra={"rows": costs.rows, "step_ms": costs.step_ms})
    return ChainSpeculator(drafters, default, settings.num_drafts, costs)
