"""Constraints to compiled grammars, beside the engine: one thread, one bounded cache for all requests of a worker.

The engine asks when a request arrives and schedules it once the grammar is there, so no step ever waits for one. The
router has compiled the same text before, with a time limit, in a process of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from cluster.errors import ServerOverloaded
from cluster.guided_grammar import compile_guide
from cluster.sampling_params import SamplingParams
from cluster.tokenizer import Tokenizer
from engine.grammar import CompiledGrammar

MAX_ENTRIES = 64
MAX_BYTES = 1024 * 1024  # of constraint texts; what is compiled from them takes about ten times as much
MAX_WAITING = 256
OVERLOAD_RETRY_AFTER_S = 1.0

GuideKey = tuple[str, str]  # kind, text


class GrammarCompiler:
    """Owned by a worker's engine; `close` ends its thread. `compile` is safe from any thread."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`load_tokenizer` is called with the first constraint: most workers never see one."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: tuple[llguidance.LLTokenizer, frozenset[int]] | None = None  # the thread's own
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()
        self._cache: OrderedDict[GuideKey, Future[CompiledGrammar]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def num_cached_bytes(self) -> int:
        return self._num_bytes

    def compile(self, params: SamplingParams) -> Future[CompiledGrammar] | None:
        """The grammar of a request's constraint, perhaps still being compiled; None when it has none.

        The future raises `InvalidRequest` for what cannot be compiled. Raises `ServerOverloaded`.
        """
        key = params.guide
        if key is None:
            return None
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            if sum(not future.done() for future in self._cache.values()) >= MAX_WAITING:
                raise ServerOverloaded(
                    f"{MAX_WAITING} constraints wait to be compiled", retry_after_s=OVERLOAD_RETRY_AFTER_S
                )
            future = self._thread.submit(self._compile, key)
            self._cache[key] = future
            self._num_bytes += _size(key)
            self._evict()
            return future

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _evict(self) -> None:
        """The least recently used first; whoever holds a grammar keeps it."""
        while len(self._cache) > MAX_ENTRIES or (self._num_bytes > MAX_BYTES and len(self._cache) > 1):
            oldest, _ = self._cache.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def _compile(self, key: GuideKey) -> CompiledGrammar:
        kind, text = key
        tokenizer, end_ids = self._tokenizer or self._open_tokenizer()
        return CompiledGrammar(compile_guide(tokenizer, kind, text), end_ids, self._vocab_size)

    def _open_tokenizer(self) -> tuple[llguidance.LLTokenizer, frozenset[int]]:
        tokenizer = self._load_tokenizer()
        wrapped = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenizerView(tokenizer)),
            n_vocab=self._vocab_size,
            eos_token=sorted(tokenizer.end_ids),
        )
        self._tokenizer = (wrapped, tokenizer.end_ids)
        return self._tokenizer


class _TokenizerView:
    """A tokenizer with the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.vocabulary.bos_id
        self.tokens = list(tokenizer.token_bytes)
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.end_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _size(key: GuideKey) -> int:
    return len(key[1].encode())
