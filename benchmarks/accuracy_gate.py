"""`tandem eval`: whether a quantised model may replace the one it was made from. Limits, verdict, table.

The models run in this process, one after the other on the same tokens; no cluster is started.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy import (
    AnswerLoss,
    Progress,
    SequenceReader,
    TextLoss,
    compare_answers,
    compare_texts,
)
from benchmarks.accuracy_texts import CHAT_PROMPTS, JSON_PROMPTS, read_texts
from cluster.chat_template import ChatTemplate
from cluster.model_files import resolve_model
from cluster.tokenizer import Tokenizer, load_tokenizer
from cluster.worker_settings import WorkerSettings
from engine.runner_factory import build_runner

SCHEMA_VERSION = 1
BLOCK_TOKENS = 16
PROMPT_TOKENS = 256  # room for a prompt before its answer


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What is still good enough."""

    max_perplexity_ratio: float = 1.03
    min_top1_agreement: float = 0.85
    max_json_loss: float = 0.25  # share of answers that stop being JSON


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What is compared. `against` and `dtype` are dtypes; quantization and kv_dtype are the candidate's alone."""

    model: str
    quantization: str
    kv_dtype: str = "auto"
    backend: str = "auto"
    dtype: str = "auto"
    against: str = "auto"
    lengths: tuple[int, ...] = (128, 512, 2048)
    pieces: int = 4
    answer_tokens: int = 64
    text: Path | None = None
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class GateReport:
    """What was measured, and why it is not good enough: no reasons is a pass."""

    options: GateOptions
    reference: str
    candidate: str
    texts: tuple[TextLoss, ...]
    answers: AnswerLoss
    reasons: tuple[str, ...]


def total_tokens(options: GateOptions) -> int:
    """What `progress` will have counted at the end."""
    num_answers = len(CHAT_PROMPTS) + len(JSON_PROMPTS)
    return 2 * (options.pieces * sum(options.lengths) + num_answers * options.answer_tokens)


def run_gate(options: GateOptions, limits: GateLimits, progress: Progress) -> GateReport:
    """Loads both models and compares them. Raises `StartupError` for what cannot run, `ValueError` for short text."""
    path = resolve_model(options.model)
    tokenizer = load_tokenizer(path)
    longest = max(options.lengths)
    pieces = read_texts(options.text, tokenizer.encode, options.pieces, longest)
    num_blocks = -(-max(longest, PROMPT_TOKENS + options.answer_tokens) // BLOCK_TOKENS)
    with (
        _opened(options, path, options.against, "none", "auto", num_blocks) as (reference_name, reference),
        _opened(options, path, options.dtype, options.quantization, options.kv_dtype, num_blocks) as (
            candidate_name,
            candidate,
        ),
    ):
        texts = tuple(compare_texts(reference, candidate, pieces, length, progress) for length in options.lengths)
        chats, questions = (
            [_as_chat(tokenizer, prompt) for prompt in prompts] for prompts in (CHAT_PROMPTS, JSON_PROMPTS)
        )
        answers = compare_answers(
            reference, candidate, chats, questions, tokenizer.decode, frozenset(tokenizer.end_ids),
            options.answer_tokens, progress,
        )  # fmt: skip
    reasons = tuple(why_not(texts, answers, limits))
    return GateReport(options, reference_name, candidate_name, texts, answers, reasons)


def why_not(texts: Sequence[TextLoss], answers: AnswerLoss, limits: GateLimits) -> Iterator[str]:
    """A line for each limit that is broken."""
    for text in texts:
        where = f"at {text.context_tokens} tokens of context"
        if not text.perplexity_ratio <= limits.max_perplexity_ratio:  # a NaN is broken too
            yield f"perplexity is {text.perplexity_ratio:.3f} times the reference's {where}"
        if text.top1_agreement < limits.min_top1_agreement:
            yield f"only {text.top1_agreement:.1%} of the most likely tokens agree {where}"
    if answers.reference_json_validity - answers.candidate_json_validity > limits.max_json_loss:
        yield (
            f"{answers.candidate_json_validity:.0%} of the JSON answers parse, "
            f"{answers.reference_json_validity:.0%} of the reference's do"
        )


def markdown(report: GateReport) -> str:
    lines = [
        f"{report.candidate} against {report.reference}: {'not good enough' if report.reasons else 'passes'}",
        "",
        "| context | positions | perplexity, reference | candidate | ratio | top-1 agreement | divergence, nats |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {text.context_tokens} | {text.num_positions} | {text.reference_perplexity:.3f} "
        f"| {text.candidate_perplexity:.3f} | {text.perplexity_ratio:.4f} | {text.top1_agreement:.1%} "
        f"| {text.mean_divergence:.4f} |"
        for text in report.texts
    ]
    answers = report.answers
    lines += [
        "",
        f"{answers.num_prompts} greedy answers: the same for {answers.greedy_agreement:.0%} of their length; "
        f"JSON valid {answers.reference_json_validity:.0%} -> {answers.candidate_json_validity:.0%}.",
        *(f"Broken: {reason}." for reason in report.reasons),
    ]
    return "\n".join(lines) + "\n"


def write_report(path: Path, report: GateReport) -> None:
    """The report as JSON."""
    document = {"schema": "tandem.eval", "version": SCHEMA_VERSION, **asdict(report)}
    document["texts"] = [asdict(text) | {"perplexity_ratio": text.perplexity_ratio} for text in report.texts]
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def _as_chat(tokenizer: Tokenizer, prompt: str) -> list[int]:
    source = tokenizer.vocabulary.chat_template
    if source is None:
        return tokenizer.encode(prompt)
    template = ChatTemplate(source, tokenizer.vocabulary.special_tokens)
    return tokenizer.encode(template.render([{"role": "user", "content": prompt}]), add_special_tokens=False)


@contextmanager
def _opened(
    options: GateOptions, path: Path, dtype: str, quantization: str, kv_dtype: str, num_blocks: int
) -> Iterator[tuple[str, SequenceReader]]:
    """A model's name for the report, and the model, closed afterwards."""
    with tempfile.TemporaryDirectory() as runtime:
        settings = WorkerSettings.model_validate(
            {
                "worker_id": "eval",
                "role": "aggregated",
                "model": str(path),
                "dtype": dtype,
                "backend": options.backend,
                "quantization": quantization,
                "kv_dtype": kv_dtype,
                "listen": "127.0.0.1:0",
                "runtime_dir": runtime,
                "block_tokens": BLOCK_TOKENS,
                "num_kv_blocks": num_blocks,
                "num_threads": options.num_threads,
            }
        )
        built = build_runner(settings)
    try:
        name = f"{path.name} (KV {built.memory.layout.dtype}, weights {quantization}, {built.runner.backend})"
        yield name, SequenceReader(built.runner, BLOCK_TOKENS, num_blocks)
    finally:
        built.memory.close()
