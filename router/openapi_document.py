"""The OpenAPI document, made from the same rules that check the requests: the two cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.chat_messages import ROLES
from router.field_rules import Rule
from router.limits import MAX_SEQUENCES_PER_REQUEST, ServingLimits, chat_fields, completion_fields
from router.messages_body import messages_fields, turns_schema
from router.responses_body import input_schema, responses_fields

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ERROR_STATUSES = ("400", "401", "403", "404", "405", "408", "413", "415", "429", "431", "500", "502", "503", "504")


def openapi_document(limits: ServingLimits) -> dict[str, Any]:
    """OpenAPI 3.1 of the public routes."""
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": "1", "description": "OpenAI's API for one model on two worker pools."},
        "paths": {
            "/v1/chat/completions": {
                "post": _operation(_object(chat_fields(limits), {"messages": _messages()}, limits), is_stream=True)
            },
            "/v1/completions": {
                "post": _operation(
                    _object(completion_fields(limits), {"prompt": _prompt(token_id)}, limits), is_stream=True
                )
            },
            "/v1/responses": {
                "post": _operation(_object(responses_fields(limits), {"input": input_schema()}, limits), is_stream=True)
            },
            "/v1/messages": {"post": _operation(_messages_body(limits), is_stream=True)},
            "/tokenize": {"post": _operation(_token_body("prompt", {"type": "string", "minLength": 1}))},
            "/detokenize": {"post": _operation(_token_body("tokens", {"type": "array", "items": token_id}))},
            **{path: {"get": _operation(None)} for path in ("/v1/models", "/version", "/livez", "/readyz", "/statusz")},
        },
        "components": {"schemas": {"Error": _ERROR}},
    }


def _object(rules: Mapping[str, Rule], unchecked: Mapping[str, Any], limits: ServingLimits) -> dict[str, Any]:
    nullable = {name: {"anyOf": [rule.schema(), {"type": "null"}]} for name, rule in rules.items() if name != "model"}
    return {
        "type": "object",
        "required": ["model", *unchecked],
        "properties": {"model": {"enum": list(limits.names)}, **nullable, **unchecked},
        "additionalProperties": False,
    }


def _messages_body(limits: ServingLimits) -> dict[str, Any]:
    body = _object(messages_fields(limits), {"messages": turns_schema()}, limits)
    body["properties"] |= {"max_tokens": messages_fields(limits)["max_tokens"].schema(), "system": {"type": "string"}}
    return {**body, "required": [*body["required"], "max_tokens"]}


def _token_body(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [name],
        "properties": {"model": {"type": "string", "minLength": 1}, name: schema},
        "additionalProperties": False,
    }


def _messages() -> dict[str, Any]:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
        "additionalProperties": False,
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}]}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": list(ROLES)}, "content": content, "name": {"type": "string", "maxLength": 256}},
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def _prompt(token_id: dict[str, Any]) -> dict[str, Any]:
    token_ids = {"type": "array", "items": token_id, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_SEQUENCES_PER_REQUEST}
    return {"anyOf": [text, token_ids, {**several, "items": text}, {**several, "items": token_ids}]}


def _operation(body: dict[str, Any] | None, *, is_stream: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {
        "description": "refused or failed",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "responses": {"200": {"description": "answered", "content": content}, **dict.fromkeys(_ERROR_STATUSES, error)}
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
