"""What operators ask of a server beside answers: abort, forget, show."""

from __future__ import annotations

import dataclasses
import platform
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from longturn.config import PAGE_TOKENS, EngineConfig
from longturn.server.generations import Generations
from longturn.server.openai_requests import decode_body
from longturn.server.openai_types import AbortRequest
from longturn.server.openapi import openapi_document
from longturn.server.ports import EngineMonitor, ServedModel

_SECRET = frozenset({"api_keys", "api_keys_file", "ssl_certfile", "ssl_keyfile"})
_PACKAGES = ("longturn", "torch", "tokenizers", "llguidance", "msgspec", "starlette", "uvicorn")


@dataclass(frozen=True, slots=True)
class OperationsRoutes:
    """Handlers of one server."""

    engine: EngineMonitor
    model: ServedModel
    generations: Generations
    config: EngineConfig
    started_s: float = field(default_factory=time.time)
    _abort: msgspec.json.Decoder[AbortRequest] = field(default_factory=lambda: msgspec.json.Decoder(AbortRequest))

    def routes(self) -> list[BaseRoute]:
        """For Starlette."""
        return [
            Route("/abort_requests", self.abort_requests, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def abort_requests(self, http: Request) -> Response:
        """POST /abort_requests: ends this key's generations, which answer with `finish_reason` "abort"."""
        body = decode_body(await http.body() or b"{}", self._abort)
        names = None if body.abort_all else body.request_ids or []
        aborted = self.generations.abort(names, http.scope["state"]["tenant"])
        return _json({"aborted": aborted})

    async def reset_prefix_cache(self, http: Request) -> Response:
        """POST /reset_prefix_cache: forgets every cached page, of all keys."""
        return _json({"pages": await self.engine.reset_prefix_cache()})

    async def server_info(self, http: Request) -> Response:
        """GET /server_info: what a report of a fault or of a measurement should say of the server."""
        model, stats = self.model, self.engine.stats()
        return _json(
            {
                "config": _shown(self.config),
                "model": {
                    "name": model.name,
                    "root": model.root or model.name,
                    "max_context_tokens": model.max_context_tokens,
                    "quantisation": model.quantisation,
                    "weights": model.weights,
                    "kv_cache": model.kv_cache,
                    "device": model.device,
                },
                "engine": {
                    "alive": self.engine.alive,
                    "health": self.engine.health(),
                    "restarts": self.engine.restarts,
                    "page_tokens": PAGE_TOKENS,
                    "pages": stats.pages_total,
                },
                "uptime_s": round(time.time() - self.started_s, 1),
                "versions": {"python": platform.python_version(), **_versions()},
            }
        )

    async def openapi(self, http: Request) -> Response:
        """GET /openapi.json: the API described for tools."""
        return _json(openapi_document())


def _shown(config: EngineConfig) -> dict[str, Any]:
    """The configuration without its secrets."""
    shown = dataclasses.asdict(config)
    for name in _SECRET:
        if shown["server"][name]:
            shown["server"][name] = "***"
    return shown


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
