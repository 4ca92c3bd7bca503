"""From a model to its drafter: the whole of `tandem drafter train`, in stages that each go on where they stopped.

<work dir>/features/           shards of written turns (`feature_store`); shard 0 is held out in part
<work dir>/<kind>/             checkpoint, plan, metrics (`trainer`)
<out>/<model>.<kind>.safetensors and .json   the drafter, and how it was made beside it
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cluster.model_files import served_name
from cluster.tokenizer import load_tokenizer
from decode_worker.speculation.drafter_file import DrafterFile, DrafterKind
from drafter_training.conversations import ChatFormat, hold_conversations, write_user_turns
from drafter_training.draft_vocabulary import choose_vocabulary, count_tokens, coverage
from drafter_training.feature_store import FeatureStore
from drafter_training.instructions import instructions
from drafter_training.objectives import make_objective, trained_tensors
from drafter_training.target_parts import TargetParts, read_target_parts
from drafter_training.trainer import Trainer, TrainingPlan
from drafter_training.turn_writer import TurnWriter
from engine.dtype import cpu_features, resolve_dtype

HELD_OUT_TURNS = 16
MIN_ROWS = 8  # of a turn that is worth training on
USER_TURNS_PER_SHARD, INSTRUCTIONS_PER_SHARD = 96, 128
MAX_ANSWER_TOKENS = 256
MAX_CONTEXT_TOKENS = 640
SEED_STRIDE = 1_000_003  # between shards
TURNS_PER_BATCH, DEFAULT_PASSES = 8, 4

# stage, done, total
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """`num_tokens`: of conversation to write; `num_steps`: of training, 0 for a few passes."""

    kind: DrafterKind
    model: Path
    work_dir: Path
    out: Path
    num_tokens: int = 300_000
    num_steps: int = 0
    learning_rate: float = 0.02
    vocabulary_size: int = 8192
    batch_size: int = 32
    seed: int = 0
    num_threads: int = 1


def train_drafter(options: TrainingOptions, progress: Progress) -> Path:
    """Gives the drafter's file. Everything that is finished in `work_dir` is used again."""
    torch.set_num_threads(options.num_threads)
    store = FeatureStore(options.work_dir / "features")
    target = read_target_parts(options.model)
    write_conversations(options, tap_layers(target.config.num_layers), store, progress)

    turns = [turn for shard in store.shards() for turn in store.load(shard) if len(turn.taps) >= MIN_ROWS]
    held_out, turns = turns[:HELD_OUT_TURNS], turns[HELD_OUT_TURNS:]
    counts = count_tokens([turn.token_ids for turn in turns], target.config.vocab_size)
    vocabulary = choose_vocabulary(counts, options.vocabulary_size)
    objective, set_start = make_objective(options.kind, target, vocabulary, turns, options.seed)
    num_steps = options.num_steps or DEFAULT_PASSES * len(turns) // TURNS_PER_BATCH
    plan = TrainingPlan(num_steps, TURNS_PER_BATCH, options.learning_rate, options.seed)
    trainer = Trainer(objective, plan, options.work_dir / options.kind)
    if not trainer.resume():
        set_start()
    for _ in trainer.run(turns, held_out):
        progress("training", trainer.step, plan.num_steps)
    held_counts = count_tokens([turn.token_ids for turn in held_out], target.config.vocab_size)
    report = {
        "kind": options.kind,
        "target": served_name(options.model),
        "options": {name: str(value) for name, value in asdict(options).items() if not isinstance(value, Path)},
        "plan": asdict(plan),
        "rows": sum(len(turn.taps) for turn in turns),
        "coverage": {
            "training": coverage(vocabulary, counts),
            "held_out": coverage(vocabulary, held_counts),
        },
        "held_out": trainer.evaluate(held_out),
    }
    return _save(options, target, vocabulary, trained_tensors(objective), report)


def discard_work(options: TrainingOptions) -> None:
    """Forgets the checkpoint of this kind and the conversations; what else lies there stays."""
    FeatureStore(options.work_dir / "features").discard()
    for name in ("checkpoint.safetensors", "metrics.jsonl", "plan.json"):
        (options.work_dir / options.kind / name).unlink(missing_ok=True)


def tap_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    return (num_layers // 3 - 1, 2 * num_layers // 3 - 1, num_layers - 1)


def write_conversations(
    options: TrainingOptions, taps: tuple[int, ...], store: FeatureStore, progress: Progress
) -> None:
    """Shards until there are `num_tokens` rows; each depends on its number and the seed alone."""
    done = sum(store.count_rows(shard) for shard in store.shards())
    if done >= options.num_tokens:
        return
    tokenizer = load_tokenizer(options.model)
    chat = ChatFormat(tokenizer)
    writer = TurnWriter(
        options.model,
        tokenizer.end_ids,
        dtype=resolve_dtype("auto", torch.device("cpu"), cpu_features()),
        batch_size=options.batch_size,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        tap_layers=taps,
        num_threads=options.num_threads,
    )
    try:
        for shard in itertools.count():
            if done >= options.num_tokens:
                return
            if store.has(shard):
                continue
            seed = SEED_STRIDE * shard + 17 + options.seed
            asked = list(write_user_turns(writer, chat, USER_TURNS_PER_SHARD, seed))
            asked += itertools.islice(instructions(seed), INSTRUCTIONS_PER_SHARD)
            random.Random(seed).shuffle(asked)  # noqa: S311
            written = []
            for turn in hold_conversations(writer, chat, asked, seed, MAX_ANSWER_TOKENS):
                written.append(turn)
                progress("writing conversations", done + sum(len(one.token_ids) for one in written), options.num_tokens)
            done += store.save(shard, written)
    finally:
        writer.close()


def _save(
    options: TrainingOptions,
    target: TargetParts,
    vocabulary: torch.Tensor,
    tensors: object,
    report: dict[str, object],
) -> Path:
    num_layers = target.config.num_layers
    file = DrafterFile(
        kind=options.kind,
        target_fingerprint=target.config.fingerprint,
        tap_layers=tap_layers(num_layers) if options.kind == "eagle" else (num_layers - 1,),
        vocabulary=vocabulary,
        tensors=tensors,  # type: ignore[arg-type]
        notes=json.dumps(report),
    )
    path = options.out / f"{served_name(options.model)}.{options.kind}.safetensors"
    file.save(path)
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return path
