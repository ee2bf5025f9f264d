"""Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens.

The headers `anthropic-version` and `anthropic-beta` are accepted whatever they say.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from longturn.server import messages_requests as requests
from longturn.server import openai_requests
from longturn.server.messages_errors import PATH
from longturn.server.messages_types import MessagesRequest
from longturn.server.messages_writer import MessageShape, MessagesWriter
from longturn.server.one_answer import OneAnswer
from longturn.server.responses_tools import Unsupported
from longturn.server.sessions import session_in_user_id

_NAMES = {"stop": "stop_sequences"}


@dataclass(frozen=True, slots=True)
class MessagesRoutes:
    """Handlers of one server."""

    answers: OneAnswer
    page_tokens: int
    """Tokens of a cached page; 0 if prompts are not kept."""
    unsupported_tools: Unsupported = "refuse"
    """What becomes of tools that would have to run on the server."""
    _body: msgspec.json.Decoder[MessagesRequest] = field(default_factory=lambda: msgspec.json.Decoder(MessagesRequest))

    def routes(self) -> list[BaseRoute]:
        """For Starlette."""
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(f"{PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, http: Request) -> Response | ASGIApp:
        """POST /v1/messages."""
        body = await self._decoded(http)
        prompt = requests.chat_prompt(body, self.unsupported_tools)
        shape = MessageShape(
            id=f"msg_{uuid.uuid4().hex}",
            model=self.answers.model.name,
            max_tokens=requests.max_tokens(body),
            thinking=requests.thinks(body),
            page_tokens=self.page_tokens,
            request_id=http.scope["state"]["request_id"],
        )
        writer = MessagesWriter(shape)
        request = self.answers.request(
            http,
            body,
            prompt,
            request_id=shape.id,
            max_tokens=shape.max_tokens,
            choice=requests.choice_of(body, prompt.callable_tools),
            stop=(*openai_requests.stop_strings(body), *(body.stop_sequences or ())),
            grammar=requests.answer_grammar(body),
            session_id=session_in_user_id(body.metadata.user_id) if body.metadata is not None else None,
        )
        return await self.answers.respond(
            http, request, writer, stream=bool(body.stream), on_error=writer.failure, names=_NAMES
        )

    async def count_tokens(self, http: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await self._decoded(http)
        tokens = await self.answers.service.tokenize(
            requests.chat_prompt(body, self.unsupported_tools),
            add_special_tokens=False,
            tenant=http.scope["state"]["tenant"],
            cache_salt=body.cache_salt,
        )
        return Response(msgspec.json.encode({"input_tokens": len(tokens)}), media_type="application/json")

    async def _decoded(self, http: Request) -> MessagesRequest:
        body = openai_requests.decode_body(await http.body(), self._body)
        model = self.answers.model
        openai_requests.check_model(body.model, model.name, model.aliases)
        requests.check_supported(body)
        return body
