"""Tells the listeners of a step's prompts how their KV comes along. A listener that raises fails its request alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Chunks

from engine.request import KvListener
from engine.sequence import Sequence
from engine.step_plan import ScheduledChunk

logger = logging.getLogger(__name__)


class KvProgress:
    """One step's listeners: those whose prompt has a chunk in it. `failed` are the sequences whose listener raised."""

    def __init__(self, admitted: Iterable[Sequence], chunks: Chunks[ScheduledChunk]) -> None:
        self.failed: set[Sequence] = set()
        self._chunks = [
            (chunk, listener)
            for chunk in chunks
            if not chunk.sequence.has_output and (listener := chunk.sequence.request.kv_listener) is not None
        ]
        for sequence in admitted:
            if (listener := sequence.request.kv_listener) is not None:
                self._tell(sequence, listener.blocks_allocated, sequence.blocks, sequence.num_computed)

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def started(self) -> None:
        for chunk, listener in self._chunks:
            self._tell(chunk.sequence, listener.chunk_started, chunk.first_token, chunk.num_tokens)

    def layer_written(self, layer: int) -> None:
        self._tell_all(lambda listener: listener.layer_written(layer))

    def finished(self) -> None:
        self._tell_all(lambda listener: listener.chunk_finished())

    def _tell_all(self, call: Callable[[KvListener], None]) -> None:
        for chunk, listener in self._chunks:
            self._tell(chunk.sequence, call, listener)

    def _tell(self, sequence: Sequence, call: Callable[..., None], *arguments: object) -> None:
        if sequence in self.failed:
            return
        try:
            call(*arguments)
        except Exception:
            logger.exception("kv listener failed", extra={"request_id": sequence.request.request_id})
            self.failed.add(sequence)
