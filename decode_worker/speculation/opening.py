"""From a worker's settings to its speculator."""

from __future__ import annotations

import logging

from cluster.errors import StartupError
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.draft_model import open_draft_model
from decode_worker.speculation.eagle import EagleDrafter
from decode_worker.speculation.medusa import MedusaDrafter
from decode_worker.speculation.mtp import NAME as MTP
from decode_worker.speculation.mtp import open_mtp
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import OFF, DraftingSpeculator
from decode_worker.speculation.step_costs import measure_step_costs, step_of_rows
from decode_worker.speculation.suffix import SuffixDrafter
from decode_worker.speculation.trained import measure_guess_ms, open_trained
from engine.runner_factory import BuiltRunner

logger = logging.getLogger(__name__)

AUTO = "auto"
AUTO_LOOK_UP = "ngram"


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
    drafters, draft_ms, default_way = _open_drafters(settings, built)
    costs = measure_step_costs(built.runner, built.memory.num_blocks, settings.block_tokens)
    measured = {"rows": costs.rows, "step_ms": costs.step_ms, "guess_ms": draft_ms}
    logger.info("step costs measured", extra=measured)
    return DraftingSpeculator(
        drafters, default_way, settings.num_drafts, costs, draft_ms, verifies_trees=_verifies_trees(settings, built)
    )


def _verifies_trees(settings: WorkerSettings, built: BuiltRunner) -> bool:
    """`auto` changes no bit of what is computed: rows of a chain have the sums that decoding one by one has. Behind a
    sibling a row sums its keys in another order, which 16 bits show at near ties; whoever names a drafter gets trees.
    """
    is_wide = built.memory.layout.dtype == "float32"
    return built.runner.verifies_trees and (is_wide or settings.speculation != AUTO)


def _open_drafters(
    settings: WorkerSettings, built: BuiltRunner
) -> tuple[dict[str, Drafter], dict[str, float], tuple[str, ...]]:
    """Drafters by name, what a guess of them takes, and whom a request asks that names none."""
    name = settings.speculation
    look_ups: dict[str, Drafter] = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
    if name in look_ups:
        return {name: look_ups[name]}, {}, (name,)
    if name == "draft":
        drafter, own = open_draft_model(settings, built.config)
        costs = measure_step_costs(own.runner, own.memory.num_blocks, settings.block_tokens)
        return {name: drafter}, {name: costs.step_ms[0]}, (name,)
    if name == "eagle" or name == "medusa":
        trained = open_trained(name, settings, built.config)
        return {name: trained}, {name: _guess_ms(trained, settings, built)}, (name,)
    if name == MTP:
        mtp = open_mtp(settings, built.config)
        return {name: mtp}, {name: _guess_ms(mtp, settings, built)}, (name,)
    reader = _open_reader_if_there(settings, built)
    if reader is None:
        return look_ups, {}, (AUTO_LOOK_UP,)
    return (
        look_ups | {reader.name: reader},
        {reader.name: _guess_ms(reader, settings, built)},
        (AUTO_LOOK_UP, reader.name),
    )


def _guess_ms(drafter: EagleDrafter | MedusaDrafter, settings: WorkerSettings, built: BuiltRunner) -> float:
    step = step_of_rows(1, settings.block_tokens)
    return measure_guess_ms(drafter, built.config.hidden_size, lambda: built.runner.forward(step, None))


def _open_reader_if_there(settings: WorkerSettings, built: BuiltRunner) -> EagleDrafter | MedusaDrafter | None:
    """What `auto` asks beside the look-up: an EAGLE file, which somebody trained for this model, before the layer that
    came with it. It does without either."""
    try:
        return open_trained("eagle", settings, built.config)
    except StartupError as no_file:
        try:
            return open_mtp(settings, built.config)
        except StartupError as no_layer:
            reasons = {"no_eagle": no_file.message, "no_mtp": no_layer.message}
            logger.info("speculation auto looks up only", extra=reasons)
            return None
