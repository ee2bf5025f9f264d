"""The OpenAI API's endpoints, and the few that its users expect beside them."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from longturn.errors import RequestError
from longturn.frontend.records import Prompt, TextChunk, TextPrompt, TextRequest, TokenPrompt, ToolChoice
from longturn.server import openai_requests as requests
from longturn.server.errors import CLIENT_GONE, error_body, error_response
from longturn.server.generation import Indexed, collect, run_choices, time_limit, unless_disconnected
from longturn.server.metrics import ServerMetrics
from longturn.server.openai_responses import Answer, EventWriter, best_choices, whole_answer, without_answer
from longturn.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from longturn.server.ports import EngineMonitor, ServedModel, TextService
from longturn.server.sessions import session_of
from longturn.server.sse import EventStream, grace_of
from longturn.server.structured import grammar_of

SEED_BITS = 63
NO_TOOLS = ToolChoice("none")


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
    page_tokens: int
    """Tokens of a cached page; 0 if prompts are not kept."""
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
            choice=requests.chat_tool_choice(body),
        )

    async def completions(self, http: Request) -> Response | ASGIApp:
        """POST /v1/completions."""
        body = requests.decode_body(await http.body(), self._completion)
        prompts = requests.completion_prompts(body)
        max_tokens = requests.completion_max_tokens(body)
        candidates = requests.candidates_of(body)
        return await self._generate(
            http,
            body,
            prompts,
            "text_completion",
            max_tokens,
            body.logprobs,
            "cmpl",
            candidates=candidates,
            echo=tuple(map(self._echoed, prompts)) if body.echo else (),
        )

    def _echoed(self, prompt: Prompt) -> str:
        if isinstance(prompt, TokenPrompt):
            return self.service.detokenize(prompt.token_ids)
        assert isinstance(prompt, TextPrompt)
        return prompt.text

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        model = self._model_object()
        # As OpenAI's clients and as Anthropic's read a list.
        return _json(
            {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        )

    async def one_model(self, http: Request) -> Response:
        """GET /v1/models/{model}."""
        requests.check_model(http.path_params["model"], self.model.name, self.model.aliases)
        return _json(self._model_object())

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize."""
        body = requests.decode_body(await http.body(), self._tokenize)
        requests.check_model(body.model, self.model.name, self.model.aliases)
        special = body.add_special_tokens is not False
        tokens = await self.service.tokenize(
            requests.tokenize_prompt(body),
            add_special_tokens=special,
            tenant=http.scope["state"]["tenant"],
            cache_salt=body.cache_salt,
        )
        return _json({"count": len(tokens), "max_model_len": self.model.max_context_tokens, "tokens": list(tokens)})

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize."""
        body = requests.decode_body(await http.body(), self._detokenize)
        requests.check_model(body.model, self.model.name, self.model.aliases)
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
        choice: ToolChoice = NO_TOOLS,
        candidates: int | None = None,
        echo: tuple[str, ...] = (),
    ) -> Response | ASGIApp:
        requests.check_model(body.model, self.model.name, self.model.aliases)
        requests.check_common(body)
        choices = requests.choices_of(body)
        candidates = candidates or choices
        answer = Answer(
            id=f"{prefix}-{uuid.uuid4().hex}",
            object=kind,
            created_s=int(time.time()),
            model=self.model.name,
            prompts=len(prompts),
            choices=len(prompts) * choices,
            echo=echo,
            page_tokens=self.page_tokens,
            prompt_logprobs=body.prompt_logprobs is not None,
            logprobs=logprobs is not None,
            token_ids=bool(body.return_token_ids),
            stream_usage=bool(body.stream_options and body.stream_options.include_usage),
            running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        )
        seed = self._seed(body.seed)
        if candidates > choices and logprobs is None:
            # The best are those with the likeliest tokens, so somebody must know how likely they are.
            logprobs = 0
        silent = max_tokens == 0 and bool(echo)
        sampling = requests.sampling_params(body, max_tokens=max_tokens or int(silent), logprobs=logprobs, seed=seed)
        prompt_logprobs = requests.prompt_logprobs_of(body)
        first = TextRequest(
            request_id=answer.id,
            prompt=prompts[0],
            sampling=sampling,
            stop=requests.stop_strings(body),
            ignore_eos=bool(body.ignore_eos),
            include_stop_text=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            split_reasoning=answer.chat,
            grammar=grammar_of(body),
            allowed_token_ids=requests.allowed_ids(body),
            parse_tools=choice.mode != "none",
            tool_choice=choice,
            session_id=session_of(http.headers, body.session_id, body.prompt_cache_key),
            cache_salt=body.cache_salt,
            tenant=http.scope["state"]["tenant"],
            priority=body.priority or 0,
        )
        grouped = [
            [
                replace(
                    first,
                    request_id=f"{answer.id}-{i * candidates + j}",
                    prompt=prompt,
                    sampling=replace(
                        sampling,
                        # Choices of one prompt must differ; each is repeatable by itself.
                        seed=(seed + j) & ((1 << SEED_BITS) - 1),
                        prompt_logprobs=prompt_logprobs if j == 0 else None,
                    ),
                )
                for j in range(candidates)
            ]
            for i, prompt in enumerate(prompts)
        ]
        events = run_choices(partial(self._watched, echo=bool(echo), silent=silent), grouped)
        if body.stream:
            return EventStream(
                events,
                EventWriter(answer),
                timeout_s=self.timeout_s,
                request_id=http.scope["state"]["request_id"],
                grace_s=grace_of(first),
            )
        chunks = await unless_disconnected(http.receive, self._collect(events, len(prompts) * candidates))
        if chunks is None:
            return Response(status_code=CLIENT_GONE)
        best = chunks if candidates == choices else best_choices(chunks, candidates, choices)
        leaders = chunks[::candidates] if prompt_logprobs is not None else ()
        scores = [next((c.prompt_logprobs for c in leader if c.prompt_logprobs), None) for leader in leaders]
        return Response(whole_answer(answer, best, chunks, scores), media_type="application/json")

    async def _watched(self, request: TextRequest, *, echo: bool, silent: bool) -> AsyncGenerator[TextChunk, None]:
        try:
            async with aclosing(self.metrics.watch(self.service.generate(request))) as chunks:
                async for chunk in chunks:
                    yield without_answer(chunk) if silent else chunk
        except RequestError as error:
            if echo and error.param == "prompt_logprobs":
                error.param = "echo"
            raise

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
            # The same in Anthropic's dialect.
            "type": "model",
            "display_name": self.model.name,
            "created_at": datetime.fromtimestamp(self.model.created_s, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": self.model.max_context_tokens,
            "max_model_len": self.model.max_context_tokens,
            # What a measurement must say of itself to be compared, so that nobody has to know it by heart.
            "longturn": {
                "version": installed_version(),
                "quantisation": self.model.quantisation,
                "weights": self.model.weights,
                "kv_cache": self.model.kv_cache,
                "device": self.model.device,
            },
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
