"""Puts the HTTP application together."""

from __future__ import annotations

import dataclasses

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from longturn.config import PAGE_TOKENS, EngineConfig
from longturn.errors import LongturnError
from longturn.server import reuse_headers
from longturn.server.drain import Drain
from longturn.server.errors import (
    on_client_gone,
    on_http_exception,
    on_longturn_error,
    on_too_deep,
    on_unexpected,
)
from longturn.server.gate import Gate, GateRules
from longturn.server.generations import Generations
from longturn.server.keys import accepted_keys
from longturn.server.messages_routes import MessagesRoutes
from longturn.server.metrics import ServerMetrics
from longturn.server.one_answer import OneAnswer
from longturn.server.openai_routes import OpenAIRoutes
from longturn.server.operations import OperationsRoutes
from longturn.server.ports import EngineMonitor, ServedModel, TextService
from longturn.server.response_store import ResponseStore
from longturn.server.responses_background import Background
from longturn.server.responses_routes import ResponsesRoutes


def create_app(
    service: TextService,
    config: EngineConfig,
    *,
    engine: EngineMonitor,
    model: ServedModel,
    drain: Drain | None = None,
) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        service: turns text requests into text.
        engine: asked for health and figures, told to abort requests and to forget cached pages.
        model: what is shown of the model.
        drain: what the server's owner begins when the server is to end.

    Raises:
        ConfigError: the API keys cannot be read, or traces were asked for and cannot be sent.
    """
    metrics = ServerMetrics(engine, model.name)
    tracer = None
    if config.server.traces_endpoint is not None:
        from longturn.server.tracing import otlp_tracer

        tracer = otlp_tracer(config.server.traces_endpoint)
    service = generations = Generations(service, engine.abort, model.name, tracer)
    model = dataclasses.replace(model, aliases=config.server.model_aliases)
    page_tokens = PAGE_TOKENS if config.cache.prefix_caching else 0
    openai = OpenAIRoutes(
        service=service,
        engine=engine,
        model=model,
        metrics=metrics,
        seed=config.seed,
        timeout_s=config.server.request_timeout_s,
        page_tokens=page_tokens,
    )
    answers = OneAnswer(service, model, metrics, config.seed, config.server.request_timeout_s)
    store = ResponseStore(config.server.response_store_bytes, config.server.response_store_ttl_s)
    drain = drain or Drain()
    background = Background(drain)
    responses = ResponsesRoutes(answers, store, background, page_tokens, config.server.unsupported_tools)
    messages = MessagesRoutes(answers, page_tokens, config.server.unsupported_tools)
    operations = OperationsRoutes(engine=engine, model=model, generations=generations, config=config)
    starlette = Starlette(
        routes=[*openai.routes(), *responses.routes(), *messages.routes(), *operations.routes()],
        exception_handlers={
            LongturnError: on_longturn_error,
            ClientDisconnect: on_client_gone,
            HTTPException: on_http_exception,
            RecursionError: on_too_deep,
            Exception: on_unexpected,
        },
    )
    rules = GateRules(
        api_keys=accepted_keys(config.server),
        max_body_bytes=config.server.max_body_bytes,
        drain=drain,
        on_response=metrics.on_response,
        retry_after_s=lambda: metrics.pace.retry_after_s(engine.stats().waiting),
    )
    app: ASGIApp = Gate(starlette, rules)
    if config.server.cors_origins:
        # Outside the gate: a browser's preflight request carries no key.
        app = CORSMiddleware(
            app,
            allow_origins=list(config.server.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *reuse_headers.NAMES],
        )
    return app
