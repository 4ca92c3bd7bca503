"""Arrivals whose constraint is still being compiled, by threads of the grammar compiler: the engine does not wait."""

from __future__ import annotations

from collections.abc import Callable

from cluster.errors import TandemError
from engine.sequence import Sequence, SequenceState


class CompilingSequences:
    """Used by the engine's thread; `wake` is called from a compiler's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """One that has a grammar."""
        if sequence.grammar is not None:
            self._sequences.append(sequence)
            sequence.grammar.add_done_callback(lambda _: self._wake())

    def take_compiled(self) -> list[Sequence]:
        """Those whose constraint is compiled by now, or cannot be. Who was cancelled meanwhile is done with."""
        waiting = [sequence for sequence in self._sequences if sequence.state is SequenceState.WAITING]
        self._sequences = [sequence for sequence in waiting if not _is_compiled(sequence)]
        return [sequence for sequence in waiting if _is_compiled(sequence)]


def compile_error(sequence: Sequence) -> str | None:
    """Why a request's constraint could not be compiled."""
    if sequence.grammar is None or (error := sequence.grammar.exception(0)) is None:
        return None
    if isinstance(error, TandemError):
        return f"{error.error_code}: {error.message}"
    return f"the constraint could not be compiled: {type(error).__name__}"


def _is_compiled(sequence: Sequence) -> bool:
    return sequence.grammar is None or sequence.grammar.done()
