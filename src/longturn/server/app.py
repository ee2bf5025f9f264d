"""Puts the HTTP application together."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from longturn.config import EngineConfig
from longturn.errors import LongturnError
from longturn.server.errors import on_client_gone, on_http_exception, on_longturn_error, on_unexpected
from longturn.server.gate import Gate
from longturn.server.metrics import ServerMetrics
from longturn.server.openai_routes import OpenAIRoutes
from longturn.server.ports import EngineMonitor, ServedModel, TextService


def create_app(service: TextService, config: EngineConfig, *, engine: EngineMonitor, model: ServedModel) -> ASGIApp:
    """The server as an ASGI application.

    `service` turns text requests into text, `engine` is asked for health and figures only, `model` is what is shown.
    """
    metrics = ServerMetrics(engine, model.name)
    openai = OpenAIRoutes(
        service=service,
        engine=engine,
        model=model,
        metrics=metrics,
        seed=config.seed,
        timeout_s=config.server.request_timeout_s,
    )
    starlette = Starlette(
        routes=openai.routes(),
        exception_handlers={
            LongturnError: on_longturn_error,
            ClientDisconnect: on_client_gone,
            HTTPException: on_http_exception,
            Exception: on_unexpected,
        },
    )
    app: ASGIApp = Gate(starlette, config.server.api_keys, metrics.on_response)
    if config.server.cors_origins:
        # Outside the gate: a browser's preflight request carries no key.
        app = CORSMiddleware(
            app,
            allow_origins=list(config.server.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app
