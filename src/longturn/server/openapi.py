"""The API described as an OpenAPI document, made from the types that decode its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from longturn.server.messages_types import MessagesRequest
from longturn.server.openai_types import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from longturn.server.responses_types import ResponsesRequest

VERSION = "3.1.0"
_REF = "#/components/schemas/{name}"
_ERRORS: Mapping[str, str] = {
    "400": "The request is malformed or asks for what cannot be done; `error.param` names the field.",
    "401": "No accepted API key.",
    "404": "The model does not exist.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests wait; Retry-After says when to try again.",
    "503": "There is no engine, or the server is stopping.",
    "504": "The request took too long.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    """With `stream` true in the body it answers with server-sent events."""
    media_type: str = "application/json"
    parameter: str | None = None
    """A part of the path."""


def operations() -> tuple[Operation, ...]:
    """Everything that may be asked."""
    return (
        Operation("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, streams=True),
        Operation("post", "/v1/completions", "Continue a text", CompletionRequest, streams=True),
        Operation(
            "post", "/v1/responses", "Answer a conversation, as OpenAI's Responses", ResponsesRequest, streams=True
        ),
        Operation("get", "/v1/responses/{response_id}", "A stored response", parameter="response_id"),
        Operation("delete", "/v1/responses/{response_id}", "Forget a stored response", parameter="response_id"),
        Operation("get", "/v1/responses/{response_id}/input_items", "Its input", parameter="response_id"),
        Operation("post", "/v1/responses/{response_id}/cancel", "End it in the background", parameter="response_id"),
        Operation(
            "post", "/v1/messages", "Answer a conversation, as Anthropic's Messages", MessagesRequest, streams=True
        ),
        Operation("post", "/v1/messages/count_tokens", "Count a conversation's tokens", MessagesRequest),
        Operation("get", "/v1/models", "The served model, in a list"),
        Operation("get", "/v1/models/{model}", "The served model", parameter="model"),
        Operation("post", "/tokenize", "Token ids of a text or conversation", TokenizeRequest),
        Operation("post", "/detokenize", "Text of token ids", DetokenizeRequest),
        Operation("post", "/abort_requests", "End generations by their ids", AbortRequest),
        Operation("post", "/reset_prefix_cache", "Forget all cached pages"),
        Operation("get", "/server_info", "Configuration, model and versions"),
        Operation("get", "/version", "Version of the server"),
        Operation("get", "/health", "Whether there is an engine"),
        Operation("get", "/ping", "The same as /health"),
        Operation("get", "/metrics", "Figures in Prometheus' format", media_type="text/plain"),
    )


@cache
def openapi_document() -> dict[str, Any]:
    """The whole document."""
    described = operations()
    types = [operation.body for operation in described if operation.body is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    body_schemas = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for operation in described:
        schema = None if operation.body is None else next(body_schemas)
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema)
    components["Error"] = _error_schema()
    return {
        "openapi": VERSION,
        "info": {"title": "Longturn", "version": "1", "description": "Serves a large language model to agents."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _described(operation: Operation, schema: dict[str, Any] | None) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {}}
    if operation.streams:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    responses |= {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.translate(str.maketrans("/{}", "___")),
        "responses": responses,
    }
    if schema is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.parameter is not None:
        where = {"name": operation.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [where]
    return described


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    maybe = {"type": ["string", "null"]}
    members = {"message": text, "type": text, "param": maybe, "code": maybe}
    error = {"type": "object", "properties": members, "required": list(members)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
