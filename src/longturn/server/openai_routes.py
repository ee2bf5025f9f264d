"""The OpenAI API's endpoints, and the few that its users expect beside them."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from longturn.frontend.records import Prompt, TextChunk, TextRequest
from longturn.server import openai_requests as requests
from longturn.server.errors import CLIENT_GONE, error_body, error_response
from longturn.server.generation import Indexed, collect, run_choices, time_limit, unless_disconnected
from longturn.server.metrics import ServerMetrics
from longturn.server.openai_responses import Answer, EventWriter, whole_answer
from longturn.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from longturn.server.ports import EngineMonitor, ServedModel, TextService
from longturn.server.sse import EventStream

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class OpenAIRoutes:
    """Handlers of one server."""

    service: TextService
    engine: EngineMonitor
    model: ServedModel
    metrics: ServerMetrics
    seed: int
    """Requests without a seed get one derived from this and their number, so that a run can be repeated."""
    timeout_s: float
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _chat: msgspec.json.Decoder[ChatRequest] = field(default_factory=lambda: msgspec.json.Decoder(ChatRequest))
    _completion: msgspec.json.Decoder[CompletionRequest] = field(
        default_factory=lambda: msgspec.json.Decoder(CompletionRequest)
    )
    _tokenize: msgspec.json.Decoder[TokenizeRequest] = field(
        default_factory=lambda: msgspec.json.Decoder(TokenizeRequest)
    )
    _detokenize: msgspec.json.Decoder[DetokenizeRequest] = field(
        default_factory=lambda: msgspec.json.Decoder(DetokenizeRequest)
    )

    def routes(self) -> list[BaseRoute]:
        """For Starlette."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.one_model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/metrics", self.prometheus, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def chat_completions(self, http: Request) -> Response | ASGIApp:
        """POST /v1/chat/completions."""
        body = requests.decode_body(await http.body(), self._chat)
        logprobs = requests.chat_logprobs(body)
        prompt = requests.chat_prompt(body)
        return await self._generate(
            http,
            body,
            [prompt],
            "chat.completion",
            requests.chat_max_tokens(body),
            logprobs,
            "chatcmpl",
            parse_tools=requests.parses_tools(body),
        )

    async def completions(self, http: Request) -> Response | ASGIApp:
        """POST /v1/completions."""
        body = requests.decode_body(await http.body(), self._completion)
        prompts = requests.completion_prompts(body)
        max_tokens = requests.completion_max_tokens(body)
        return await self._generate(http, body, prompts, "text_completion", max_tokens, body.logprobs, "cmpl")

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model_object()]})

    async def one_model(self, http: Request) -> Response:
        """GET /v1/models/{model}."""
        requests.check_model(http.path_params["model"], self.model.name)
        return _json(self._model_object())

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize."""
        body = requests.decode_body(await http.body(), self._tokenize)
        requests.check_model(body.model, self.model.name)
        special = body.add_special_tokens is not False
        tokens = await self.service.tokenize(requests.tokenize_prompt(body), add_special_tokens=special)
        return _json({"count": len(tokens), "max_model_len": self.model.max_context_tokens, "tokens": list(tokens)})

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize."""
        body = requests.decode_body(await http.body(), self._detokenize)
        requests.check_model(body.model, self.model.name)
        return _json({"prompt": self.service.detokenize(body.tokens)})

    async def health(self, http: Request) -> Response:
        """GET /health."""
        if self.engine.alive:
            return _json({"status": "ok"})
        return error_response(503, error_body(503, self.engine.health()))

    async def prometheus(self, http: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, http: Request) -> Response:
        """GET /version."""
        return _json({"version": installed_version()})

    async def _generate(
        self,
        http: Request,
        body: SamplingFields,
        prompts: Sequence[Prompt],
        kind: str,
        max_tokens: int,
        logprobs: int | None,
        prefix: str,
        *,
        parse_tools: bool = False,
    ) -> Response | ASGIApp:
        requests.check_model(body.model, self.model.name)
        requests.check_common(body)
        choices = requests.choices_of(body)
        answer = Answer(
            id=f"{prefix}-{uuid.uuid4().hex}",
            object=kind,
            created_s=int(time.time()),
            model=self.model.name,
            prompts=len(prompts),
            choices=len(prompts) * choices,
            logprobs=logprobs is not None,
            token_ids=bool(body.return_token_ids),
            stream_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        seed = self._seed(body.seed)
        sampling = requests.sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, seed=seed)
        first = TextRequest(
            request_id=answer.id,
            prompt=prompts[0],
            sampling=sampling,
            stop=requests.stop_strings(body),
            ignore_eos=bool(body.ignore_eos),
            include_stop_text=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            split_reasoning=answer.chat,
            parse_tools=parse_tools,
            session_id=body.session_id or http.headers.get("x-session-id"),
            cache_salt=body.cache_salt,
            tenant=http.scope["state"]["tenant"],
            priority=body.priority or 0,
        )
        grouped = [
            [
                replace(
                    first,
                    request_id=f"{answer.id}-{i * choices + j}",
                    prompt=prompt,
                    # Choices of one prompt must differ; each is repeatable by itself.
                    sampling=replace(sampling, seed=(seed + j) & ((1 << SEED_BITS) - 1)),
                )
                for j in range(choices)
            ]
            for i, prompt in enumerate(prompts)
        ]
        events = run_choices(self._watched, grouped)
        if body.stream:
            return EventStream(
                events,
                EventWriter(answer),
                timeout_s=self.timeout_s,
                request_id=http.scope["state"]["request_id"],
            )
        chunks = await unless_disconnected(http.receive, self._collect(events, answer.choices))
        if chunks is None:
            return Response(status_code=CLIENT_GONE)
        return Response(whole_answer(answer, chunks), media_type="application/json")

    def _watched(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        return self.metrics.watch(self.service.generate(request))

    async def _collect(self, events: AsyncGenerator[Indexed, None], choices: int) -> list[list[TextChunk]]:
        async with time_limit(self.timeout_s):
            return await collect(events, choices)

    def _seed(self, asked: int | None) -> int:
        if asked is not None:
            return asked & ((1 << SEED_BITS) - 1)
        return mix64(self.seed, next(self._numbers)) & ((1 << SEED_BITS) - 1)

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created_s,
            "owned_by": "longturn",
            "root": self.model.root or self.model.name,
            "parent": None,
            "max_model_len": self.model.max_context_tokens,
        }


def mix64(seed: int, number: int) -> int:
    """A well-spread 64-bit value of both (SplitMix64's output function, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def installed_version() -> str:
    """Longturn's version, or `unknown` when it runs from a source tree that was never installed."""
    try:
        return metadata.version("longturn")
    except metadata.PackageNotFoundError:
        return "unknown"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
