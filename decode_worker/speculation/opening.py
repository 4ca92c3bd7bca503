"""From a worker's settings to its speculator."""

from __future__ import annotations

import logging

from cluster.errors import StartupError
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.draft_model import open_draft_model
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import OFF, DraftingSpeculator
from decode_worker.speculation.step_costs import measure_step_costs
from decode_worker.speculation.suffix import SuffixDrafter
from decode_worker.speculation.trained import measure_guess_ms, open_trained
from engine.runner_factory import BuiltRunner

logger = logging.getLogger(__name__)

AUTO_DRAFTER = "suffix"


def open_speculator(settings: WorkerSettings, built: BuiltRunner) -> DraftingSpeculator | None:
    """None when speculation is off. Measures steps on the runner. Raises `StartupError` for one that cannot run."""
    if settings.verification == "rejection" and settings.speculation != "draft":
        raise StartupError(
            f"verification rejection is for guesses that are drawn, and {settings.speculation!r} draws none: "
            "take match, which keeps its guesses exactly as often, or speculation draft",
            param="verification",
        )
    if settings.speculation == OFF:
        return None
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
    draft_ms: dict[str, float] = {}
    default = AUTO_DRAFTER if settings.speculation == "auto" else settings.speculation
    if settings.speculation == "eagle" or settings.speculation == "medusa":
        trained = open_trained(settings.speculation, settings, built.config)
        drafters, draft_ms = {default: trained}, {default: measure_guess_ms(trained, built.config.hidden_size)}
    elif settings.speculation == "draft":
        drafter, own = open_draft_model(settings, built.config)
        drafters = {default: drafter}
        draft_ms = {default: measure_step_costs(own.runner, own.memory.num_blocks, settings.block_tokens).step_ms[0]}
    elif settings.speculation != "auto":
        drafters = {default: drafters[default]}
    costs = measure_step_costs(built.runner, built.memory.num_blocks, settings.block_tokens)
    measured = {"rows": costs.rows, "step_ms": costs.step_ms, "guess_ms": draft_ms}
    logger.info("step costs measured", extra=measured)
    return DraftingSpeculator(
        drafters, default, settings.num_drafts, costs, draft_ms, verifies_trees=built.runner.verifies_trees
    )
