"""From a checked request to a running answer: admission, tokens, sampling, scope, placement. Used by both fronts.

The order matters: everything that can be refused is refused before anything is placed, so nothing a client gets wrong
ever reaches a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from tandem.v1 import common_pb2

from cluster.errors import TandemError
from cluster.identity import BlockHash, RequestId, Tenant, new_request_id
from cluster.sampling_params import SamplingParams
from cluster.tokenizer import Tokenizer
from cluster.tracing import Tracing
from router.admission import Admission, Arrival
from router.answer import Answer, RequestTimes
from router.api_types import WHAT_FITS, ChatPrompt, GenerationRequest
from router.choice_text import ChoiceText
from router.decision_log import DecisionLog
from router.detokenizer import Detokenizer
from router.dispatcher import Dispatcher
from router.fair_queue import Waiting
from router.grammar_checker import GrammarChecker
from router.limits import ServingLimits, fit_max_tokens
from router.prompt_encoder import PromptEncoder
from router.request_log import RequestLog
from router.request_metrics import RequestMetrics
from router.request_trace import RequestTrace, traced
from router.sequence import Sequence, SequenceSpec
from router.tenants import scope_key
from router.tool_format import ToolFormat
from router.worker_registry import WorkerRegistry

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ServingPolicy:
    """What the operator decided for every request."""

    request_timeout_s: float
    seed: str  # of the seeds of requests that name none
    scope_secret: bytes


class GenerationService:
    """Owned by the router process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        limits: ServingLimits,
        policy: ServingPolicy,
        registry: WorkerRegistry,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: RequestMetrics,
        grammars: GrammarChecker,
        tool_format: ToolFormat,
        tracing: Tracing | None,
        log: RequestLog,
        decisions: DecisionLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.limits = limits
        self._policy = policy
        self._registry = registry
        self.admission = admission
        self._dispatcher = dispatcher
        self.metrics = metrics
        self._grammars = grammars
        self.tool_format = tool_format
        self._tracing = tracing
        self._log = log
        self._decisions = decisions
        self._clock = clock
        self._seeds = random.Random(policy.seed)  # noqa: S311  noise for sampling, no secret
        metrics.watch_requests(lambda: self.num_running, lambda: admission.num_waiting)

    @property
    def num_running(self) -> int:
        """Requests that are neither refused nor ended nor waiting for a worker."""
        return self.admission.num_requests - self.admission.num_waiting

    @property
    def is_draining(self) -> bool:
        return self.admission.is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        self.admission.is_draining = is_draining

    @property
    def policy_name(self) -> str:
        return self._dispatcher.policy.name

    @contextlib.asynccontextmanager
    async def answering(self, request: GenerationRequest, tenant: Tenant) -> AsyncIterator[Answer]:
        """An answer that runs, or waits for its turn; leaving the context ends it, however it is left.

        Raises what the request deserves.
        """
        times = RequestTimes(admitted_s=self._clock())
        request_id = new_request_id(request.kind.value)
        if request.client_request_id:
            self._decisions.known_as(request.client_request_id, request_id)
        self.metrics.demand.arrived(len(request.prompts))
        try:
            with (
                traced(self._tracing, request.traceparent, request_id, times, self._clock) as trace,
                self.admission.admitted(tenant),
            ):
                answer = await self._prepare(request, request_id, tenant, times, trace)
                with self._started(answer, request, tenant):
                    yield answer
        except TandemError as error:
            error.request_id = request_id
            self.metrics.failed(error, was_placed=times.placed_s > 0)
            self._log.failed(request, request_id, tenant, error, times)
            raise
        self._log.answered(request, answer, tenant)

    @contextlib.contextmanager
    def _started(self, answer: Answer, request: GenerationRequest, tenant: Tenant) -> Iterator[None]:
        """Inside, the answer runs or waits for its turn; afterwards nothing of it is left anywhere."""
        times, usage = answer.times, answer.usage
        waiting: Waiting | None = None
        self.admission.charge(tenant, usage.prompt_tokens)
        try:
            answer.open()
            waiting = self.admission.submit(
                Arrival(
                    request_id=RequestId(answer.request_id),
                    tenant=tenant,
                    priority=request.priority,
                    deadline_s=answer.deadline_s,
                    count_tokens=lambda: sum(map(self._dispatcher.uncached_tokens, answer.specs)),
                    begin=lambda: self._begin(answer),
                    fail=answer.cancel,
                )
            )
            yield
        finally:
            if waiting is not None:
                self.admission.withdraw(waiting)
            answer.close("the answer has ended")
            if times.placed_s:
                self.metrics.ended(answer)
            self.admission.charge(tenant, usage.completion_tokens)

    def _begin(self, answer: Answer) -> None:
        answer.place()
        self.metrics.demand.routed((answer.times.encoded_s - answer.times.admitted_s) * 1e3)

    async def _prepare(
        self,
        request: GenerationRequest,
        request_id: RequestId,
        tenant: Tenant,
        times: RequestTimes,
        trace: RequestTrace | None,
    ) -> Answer:
        """The answer with all its choices; nothing is placed."""
        for guide in (*request.described, *(() if request.guide is None else (request.guide,))):
            await self._grammars.check(guide.kind, guide.text, guide.param)
        key = scope_key(self._policy.scope_secret, tenant, request.cache_salt)
        prompts = [
            _truncated(await self.encoder.encode(prompt, key), request, self.limits) for prompt in request.prompts
        ]
        self.metrics.demand.encoded([len(token_ids) for token_ids in prompts])
        deadline_s = times.admitted_s + (request.timeout_s or self._policy.request_timeout_s)
        answer = Answer(
            request_id=request_id,
            times=times,
            deadline_s=deadline_s,
            clock=self._clock,
            submit=self._dispatcher.submit,
            prompt_lengths=[len(token_ids) for token_ids in prompts],
            num_choices=request.num_choices,
            on_step=self.metrics.step,
        )
        seed = (self._seeds.getrandbits(63) if request.seed is None else request.seed) & _SEED_MASK
        for token_ids in prompts:
            sampling = self._sampling(request, len(token_ids), seed)
            block_hashes = await self._block_hashes(token_ids, key)
            for choice_index in range(request.num_choices):
                index = answer.num_added
                spec = SequenceSpec(
                    submission_id=f"{request_id}-{index}",
                    index=index,
                    token_ids=token_ids,
                    sampling=dataclasses.replace(sampling, choice_index=choice_index) if choice_index else sampling,
                    scope=common_pb2.CacheScope(scope_key=key),
                    tenant=tenant,
                    priority=request.priority,
                    session_key=request.user,
                    block_hashes=block_hashes,
                    deadline_s=deadline_s,
                    traceparent="" if trace is None else trace.traceparent,
                )
                self._add_choice(answer, request, spec)
        times.encoded_s = self._clock()
        if trace is not None:
            trace.answer = answer
        return answer

    def _sampling(self, request: GenerationRequest, num_prompt_tokens: int, seed: int) -> SamplingParams:
        param = "messages" if isinstance(request.prompts[0], ChatPrompt) else "prompt"
        max_tokens = fit_max_tokens(
            request.max_tokens, num_prompt_tokens, self.limits, self._registry.max_capacity_tokens(), param
        )
        end_ids = () if request.ignore_eos else tuple(sorted(self.tokenizer.end_ids))
        prompt_logprobs = request.prompt_logprobs
        if request.echo:
            prompt_logprobs = max(prompt_logprobs, request.logprobs)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=dict(request.logit_bias),
            seed=seed,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *end_ids))),
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_token_ids=request.allowed_token_ids,
            bad_words=self._written_ways(request.bad_words),
            speculation=request.speculation,
            num_drafts=request.num_drafts,
        )
        if request.guide is not None:
            sampling = sampling.guided_by(request.guide.kind, request.guide.text)
        return sampling.checked(self.tokenizer.vocab_size)

    def _written_ways(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, as it begins a text and as it follows a space."""
        ways = (
            tuple(self.tokenizer.encode(text, add_special_tokens=False))
            for word in words
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        return tuple(dict.fromkeys(way for way in ways if way))

    async def _block_hashes(self, token_ids: list[int], key: bytes) -> list[BlockHash]:
        """Only for a policy that looks at caches."""
        scope = self._registry.hash_scope(key) if self._dispatcher.cache_view is not None else None
        return [] if scope is None else await self.encoder.hash(token_ids, scope)

    def _add_choice(self, answer: Answer, request: GenerationRequest, spec: SequenceSpec) -> None:
        text = ChoiceText(
            Detokenizer(self.tokenizer.token_bytes, self.tokenizer.special_ids if request.skip_special_tokens else ()),
            request.stop,
            min_tokens=request.min_tokens,
            keeps_tokens=request.keeps_tokens,
            shows_stop=request.include_stop_str_in_output,
        )
        sequence = Sequence(spec=spec, sink=answer.inbox, mover=self._dispatcher)
        answer.add_choice(
            sequence,
            text,
            self.tokenizer.end_ids,
            shows_stop=request.include_stop_str_in_output,
            lists_ids=request.return_token_ids,
        )


def _truncated(token_ids: list[int], request: GenerationRequest, limits: ServingLimits) -> list[int]:
    """The prompt's last tokens, as many as were asked for, or as leave room for the answer."""
    num_kept = request.truncate_prompt_tokens
    if num_kept == WHAT_FITS:
        num_kept = max(1, limits.max_model_len - (request.max_tokens or 1))
    return token_ids[-num_kept:] if num_kept else token_ids
