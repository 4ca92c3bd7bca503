"""A checked request as the router works with it, whichever front it came through (HTTP or gRPC)."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cluster.sampling_params import NO_LOGPROBS, TOP_K_OFF

WHAT_FITS = -1  # of truncate_prompt_tokens


class ApiKind(enum.Enum):
    """Which shape the answer has. The value begins the request's id, as at OpenAI."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    RESPONSE = "resp"
    MESSAGE = "msg"  # Anthropic's shape


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Mapping[str, Any], ...]  # role, content as text, name, tool calls with their arguments as objects
    tools: tuple[Tool, ...] = ()
    enables_thinking: bool | None = None  # None: as the template has it
    is_continued: bool = False  # the answer goes on where the last message, the assistant's, ends
    has_generation_prompt: bool = True  # what begins the assistant's turn stands at the end


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Guide:
    """What constrains an answer: the kind as in `SamplingParams`, its text, and the parameter that asked for it."""

    kind: str
    text: str
    param: str


class ToolMode(enum.Enum):
    AUTO = "auto"  # the model decides
    NONE = "none"
    REQUIRED = "required"  # at least one call, and nothing else


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client offers. `parameters` is a JSON schema as text."""

    name: str
    description: str
    parameters: str
    is_strict: bool
    param: str  # where it stands in the request
    schema_field: str = "parameters"  # what the request calls its schema

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters)}
        return {"type": "function", "function": function}

    def check(self, *, is_followed: bool) -> Guide:
        """What must be compilable: the schema itself, or of one that only describes, what is known of its keywords."""
        text = self.parameters
        if not is_followed:
            text = json.dumps({**json.loads(text), "x-guidance": {"lenient": True}})
        return Guide("json_schema", text, f"{self.param}.{self.schema_field}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model may call, whether it must, and whether several times."""

    tools: tuple[Tool, ...]
    mode: ToolMode
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Every value is checked; absent fields have their defaults. `max_tokens` None: what fits."""

    kind: ApiKind
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    num_choices: int = 1  # of each prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    guide: Guide | None = None
    described: tuple[Guide, ...] = ()  # schemas of tools: checked, whether they guide or only describe
    tool_use: ToolUse | None = None
    logprobs: int = NO_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS
    echo: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int = 0  # 0: whole; WHAT_FITS: what leaves room for the answer
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    is_streamed: bool = False
    includes_usage: bool = False
    has_continuous_usage: bool = False
    user: str = ""
    cache_salt: str = ""
    priority: int = 0
    speculation: str = ""  # empty: the worker's default
    num_drafts: int = 0  # 0: the worker's default
    wants_token_ids: bool = False  # the gRPC front shows them
    wants_timeline: bool = False
    timeout_s: float | None = None  # asked for by the client
    traceparent: str = ""  # the client's trace, as its header says
    client_request_id: str = ""  # the client's own name for it, for logs and `tandem explain`

    @property
    def keeps_tokens(self) -> bool:
        """Whether single tokens are shown, not only text."""
        return self.wants_token_ids or self.logprobs != NO_LOGPROBS
