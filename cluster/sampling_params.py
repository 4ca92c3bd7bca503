"""How one sequence is sampled, as every process holds it; `common.proto` has the same fields on the wire.

The router fills in defaults and checks limits (`router/limits.py`); a worker calls `checked` again and refuses what is
out of range, so that no path into an engine skips the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tandem.v1 import common_pb2

from cluster.errors import InvalidRequest, shown

MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_BAD_WORDS = 64  # as token ids: a word may be written in two ways
MAX_BAD_WORD_TOKENS = 256
MAX_LOGPROBS = 20
MAX_GUIDE_BYTES = 64 * 1024
MAX_NUM_DRAFTS = 15
SPECULATION_MODES = ("auto", "off", "ngram", "suffix", "draft", "medusa", "eagle", "mtp")
NO_LOGPROBS = -1
TOP_K_OFF = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One sequence's sampling. The noise for a token is a function of (seed, choice_index, position) alone."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0  # unsigned 64 bit
    choice_index: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # holds the model's end-of-sequence tokens unless ignore_eos
    ignore_eos: bool = False
    logprobs: int = NO_LOGPROBS  # 0: the chosen token only; k: the k most likely as well
    prompt_logprobs: int = NO_LOGPROBS
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is not chosen behind the others
    speculation: str = ""  # one of SPECULATION_MODES; empty: the worker's default
    num_drafts: int = 0  # guesses in one step, at most; 0: the worker's default

    @property
    def guide(self) -> tuple[str, str] | None:
        """What constrains the output, as (kind, text); None when nothing does."""
        for kind in ("json_schema", "regex", "grammar"):
            if text := getattr(self, kind):
                return kind, text
        return None

    def guided_by(self, kind: str, text: str) -> SamplingParams:
        """The same under a constraint, which replaces any other."""
        return replace(
            self,
            json_schema=text if kind == "json_schema" else "",
            regex=text if kind == "regex" else "",
            grammar=text if kind == "grammar" else "",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def checked(self, vocab_size: int) -> SamplingParams:
        """Itself. Raises `InvalidRequest` naming the first parameter that is out of range."""
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0)
        if self.top_k != TOP_K_OFF:
            _in_range("top_k", self.top_k, 1, vocab_size)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, math.nextafter(0.0, 1.0), 2.0)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("choice_index", self.choice_index, 0, 127)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("logprobs", self.logprobs, NO_LOGPROBS, MAX_LOGPROBS)
        _in_range("prompt_logprobs", self.prompt_logprobs, NO_LOGPROBS, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES}", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _token_id("logit_bias", token_id, vocab_size)
            _in_range("logit_bias", bias, -100.0, 100.0)
        # The model's own end tokens come on top of the client's.
        if len(self.stop_token_ids) > 2 * MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("stop_token_ids has too many entries", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            _token_id("stop_token_ids", token_id, vocab_size)
        self._check_limited_tokens(vocab_size)
        if sum(map(bool, (self.json_schema, self.regex, self.grammar))) > 1:
            raise InvalidRequest("only one of json_schema, regex, grammar may be set", param="response_format")
        if self.speculation and self.speculation not in SPECULATION_MODES:
            raise InvalidRequest(
                f"speculation is {shown(self.speculation)}, must be one of {', '.join(SPECULATION_MODES)}",
                param="speculation",
            )
        _in_range("num_drafts", self.num_drafts, 0, MAX_NUM_DRAFTS)
        if self.guide is not None:
            self._check_guide(*self.guide)
        return self

    def _check_limited_tokens(self, vocab_size: int) -> None:
        """What may be chosen must leave something to choose."""
        allowed, bad_words = set(self.allowed_token_ids), self.bad_words
        if len(self.allowed_token_ids) > vocab_size:
            raise InvalidRequest("allowed_token_ids has too many entries", param="allowed_token_ids")
        for token_id in allowed:
            _token_id("allowed_token_ids", token_id, vocab_size)
        if len(bad_words) > MAX_BAD_WORDS or not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in bad_words):
            raise InvalidRequest(
                f"bad_words has too many entries, an empty one, or one of more than {MAX_BAD_WORD_TOKENS} tokens",
                param="bad_words",
            )
        for word in bad_words:
            for token_id in word:
                _token_id("bad_words", token_id, vocab_size)
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name) and self.guide is not None:
                raise InvalidRequest(f"{name} contradicts {self.guide[0]}: both say which tokens may come", param=name)
        # Words of several tokens are left out here: what they forbid depends on what came before.
        refused = {word[0] for word in bad_words if len(word) == 1}
        refused |= set(self.stop_token_ids) if self.min_tokens else set()
        if allowed and allowed <= refused:
            raise InvalidRequest(
                "allowed_token_ids leaves no token: bad_words, or min_tokens and what ends the answer, forbid them",
                param="allowed_token_ids",
            )

    def _check_guide(self, kind: str, text: str) -> None:
        """A fulfilled constraint must be able to end: nothing else may follow it."""
        if len(text.encode()) > MAX_GUIDE_BYTES:
            raise InvalidRequest(f"{kind} has {len(text.encode())} bytes, at most {MAX_GUIDE_BYTES}", param=kind)
        if self.ignore_eos:
            raise InvalidRequest(f"ignore_eos contradicts {kind}: a complete answer ends", param="ignore_eos")
        if self.min_tokens:
            raise InvalidRequest(f"min_tokens contradicts {kind}: a complete answer ends", param="min_tokens")

    def to_proto(self) -> common_pb2.SamplingParams:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["bad_words"] = [common_pb2.TokenSequence(ids=word) for word in self.bad_words]
        return common_pb2.SamplingParams(**values)

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        values = {name: getattr(message, name) for name in cls.__slots__}
        values["logit_bias"] = dict(message.logit_bias)
        values["stop_token_ids"] = tuple(message.stop_token_ids)
        values["allowed_token_ids"] = tuple(message.allowed_token_ids)
        values["bad_words"] = tuple(tuple(word.ids) for word in message.bad_words)
        return cls(**values)


def _in_range(param: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{param} is {shown(value)}, must be in [{low}, {high}]", param=param)


def _token_id(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{param} has token id {shown(token_id)}, must be in [0, {vocab_size})",
            param=param,
            code="invalid_token_id",
        )
