"""Which path speaks which API: the two of OpenAI's chats and completions, its Responses, and Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.answer import Answer
from router.api_types import GenerationRequest
from router.generation_service import GenerationService
from router.http_generation import ApiShape
from router.messages_body import MessagesParser
from router.messages_format import MessagesWriter, messages_error_body
from router.openai_format import OpenAiWriter
from router.request_parser import RequestParser
from router.responses_body import ResponsesParser
from router.responses_format import ResponsesWriter


def generation_apis(service: GenerationService, parser: RequestParser) -> dict[str, ApiShape]:
    """Path -> shape. All of them are checked by the same rules and run the same way."""
    model, tools = service.limits.model_name, service.tool_format

    def completions(_: Mapping[str, Any], request: GenerationRequest, answer: Answer) -> OpenAiWriter:
        return OpenAiWriter(request, answer, service.tokenizer, model, tools)

    def responses(body: Mapping[str, Any], request: GenerationRequest, answer: Answer) -> ResponsesWriter:
        return ResponsesWriter(body, request, answer, model, tools)

    def messages(_: Mapping[str, Any], request: GenerationRequest, answer: Answer) -> MessagesWriter:
        return MessagesWriter(request, answer, model, tools)

    return {
        "/v1/chat/completions": ApiShape(parser.parse_chat, completions),
        "/v1/completions": ApiShape(parser.parse_completion, completions),
        "/v1/responses": ApiShape(ResponsesParser(parser).parse, responses),
        "/v1/messages": ApiShape(MessagesParser(parser).parse, messages, messages_error_body),
    }
