"""OpenAI's Responses API: POST /v1/responses, what can be asked of stored ones, and those in the background."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from longturn.errors import NotFoundError, RequestError
from longturn.frontend.records import ChatPrompt
from longturn.server import openai_requests
from longturn.server import responses_requests as requests
from longturn.server.blocks import AnswerBlocks
from longturn.server.one_answer import OneAnswer
from longturn.server.response_store import Part, ResponseStore, StoredResponse
from longturn.server.responses_background import Background, BackgroundWork
from longturn.server.responses_items import input_items, page_of
from longturn.server.responses_references import item_ids, resolved
from longturn.server.responses_tools import Unsupported, choice_of, client_tools
from longturn.server.responses_types import ResponsesRequest
from longturn.server.responses_writer import ResponseShape, ResponsesWriter

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class ResponsesRoutes:
    """Handlers of one server."""

    answers: OneAnswer
    store: ResponseStore
    background: Background
    page_tokens: int
    """Tokens of a cached page; 0 if prompts are not kept."""
    unsupported_tools: Unsupported = "refuse"
    """What becomes of tools that would have to run on the server."""
    _body: msgspec.json.Decoder[ResponsesRequest] = field(
        default_factory=lambda: msgspec.json.Decoder(ResponsesRequest)
    )

    def routes(self) -> list[BaseRoute]:
        """For Starlette."""
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", self.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, http: Request) -> Response | ASGIApp:
        """POST /v1/responses."""
        body = openai_requests.decode_body(await http.body(), self._body)
        model = self.answers.model
        openai_requests.check_model(body.model, model.name, model.aliases)
        requests.check_supported(body)
        if body.background and (body.store is False or not self.store.keeps):
            raise RequestError(
                "'background' needs responses that are stored ('store' and --server-response-store-bytes)",
                param="background",
                code="invalid_value",
            )
        tenant: str | None = http.scope["state"]["tenant"]
        if isinstance(body.input, list):
            body.input = resolved(body.input, self.store, tenant)
        new = requests.input_messages(body)
        before = self._before(tenant, body.previous_response_id)
        known = [] if before is None else before.conversation()
        tools = client_tools(requests.all_tools(body), self.unsupported_tools)
        choice = choice_of(body.tool_choice, tools, body.parallel_tool_calls)
        shape = ResponseShape(
            id=f"resp_{uuid.uuid4().hex}",
            model=model.name,
            created_s=int(time.time()),
            echo=self._echo(body),
            tools=tools.by_name,
            page_tokens=self.page_tokens,
        )

        def keep(finished: bytes, answer: AnswerBlocks) -> None:
            if body.store is not False and self.store.keeps:
                self.store.put(tenant, shape.id, finished, (*new, _message(answer)), before, item_ids(finished))

        writer = ResponsesWriter(shape, keep)
        request = self.answers.request(
            http,
            body,
            ChatPrompt(
                messages=tuple(requests.with_instructions(body.instructions, (*known, *new))),
                tools=tools.chat,
                template_kwargs=requests.template_kwargs(body),
            ),
            request_id=shape.id,
            max_tokens=requests.max_tokens(body),
            choice=choice,
            stop=openai_requests.stop_strings(body),
            grammar=requests.answer_grammar(body),
        )
        if body.background:
            work = BackgroundWork(lambda: self.answers.write(request, writer, _NAMES), writer.snapshot, writer.end)
            self.background.start(tenant, shape.id, work)
            return Response(writer.snapshot(), media_type="application/json")
        return await self.answers.respond(
            http, request, writer, stream=bool(body.stream), on_error=writer.failure, names=_NAMES
        )

    async def retrieve(self, http: Request) -> Response:
        """GET /v1/responses/{response_id}."""
        if http.query_params.get("stream") == "true":
            raise RequestError(
                "'stream': a stored response cannot be streamed again", param="stream", code="unsupported_value"
            )
        running = self.background.snapshot(http.scope["state"]["tenant"], http.path_params["response_id"])
        return Response(running or self._stored(http).body, media_type="application/json")

    async def delete(self, http: Request) -> Response:
        """DELETE /v1/responses/{response_id}."""
        response_id = http.path_params["response_id"]
        await self.background.cancel(http.scope["state"]["tenant"], response_id)
        if not self.store.delete(http.scope["state"]["tenant"], response_id):
            raise _unknown(response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def input_items(self, http: Request) -> Response:
        """GET /v1/responses/{response_id}/input_items."""
        stored = self._stored(http)
        items = input_items(http.path_params["response_id"], stored.part.messages[:-1])
        return Response(msgspec.json.encode(page_of(items, http.query_params)), media_type="application/json")

    async def cancel(self, http: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel."""
        tenant, response_id = http.scope["state"]["tenant"], http.path_params["response_id"]
        await self.background.cancel(tenant, response_id)
        stored = self._stored(http)
        if not msgspec.json.decode(stored.body)["background"]:
            raise RequestError(
                f"'{response_id}' was not generated in the background: it ends when its connection is closed",
                param="response_id",
                code="invalid_value",
            )
        return Response(stored.body, media_type="application/json")

    def _stored(self, http: Request) -> StoredResponse:
        response_id = http.path_params["response_id"]
        stored = self.store.get(http.scope["state"]["tenant"], response_id)
        if stored is None:
            raise _unknown(response_id)
        return stored

    def _before(self, tenant: str | None, response_id: str | None) -> Part | None:
        if response_id is None:
            return None
        stored = self.store.get(tenant, response_id)
        if stored is None and self.background.snapshot(tenant, response_id) is not None:
            raise RequestError(
                f"response '{response_id}' is being generated still",
                param="previous_response_id",
                code="invalid_value",
            )
        if stored is None:
            raise RequestError(
                f"there is no stored response '{response_id}' (it was never stored, or it was deleted or forgotten); "
                "send the whole conversation as 'input' instead",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.part

    def _echo(self, body: ResponsesRequest) -> dict[str, Any]:
        """What the response repeats of the request."""
        form = body.text.format if body.text is not None else None
        return {
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False and self.store.keeps,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }


def _message(answer: AnswerBlocks) -> Mapping[str, Any]:
    """An answer as the message that a client would send back."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: Sequence[dict[str, Any]] = []
    for block in answer.blocks:
        if block.kind == "text":
            message["content"] += block.text
        elif block.kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + block.text
        else:
            function = {"name": block.name, "arguments": block.text}
            calls = [*calls, {"id": block.call_id, "type": "function", "function": function}]
    if calls:
        message["tool_calls"] = calls
    return message


def _unknown(response_id: str) -> NotFoundError:
    return NotFoundError(f"there is no stored response '{response_id}'", param="response_id", code="response_not_found")
