"""Spans of generations, read back from OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from longturn.config import EngineConfig, ServerConfig
from longturn.errors import ConfigError
from tests.server.served import Start

pytest.importorskip("opentelemetry.sdk", reason="traces are an extra")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from longturn.server import tracing

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a server with traces exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "otlp_tracer", lambda endpoint: tracing.GenerationTracer(provider))
    return exporter


def config() -> EngineConfig:
    return EngineConfig(server=ServerConfig(traces_endpoint="http://localhost:1/v1/traces"))


def message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_a_generation_is_a_span_of_the_clients_trace(start: Start, exported: InMemorySpanExporter) -> None:
    served = await start(config=config(), cached_tokens=3)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "abc"}
    body = {**message("a secret"), "max_tokens": 4, "temperature": 0.5, "session_id": "s"}
    async with served.http() as http:
        assert (await http.post(CHAT, json=body, headers=headers)).status_code == 200
    (span,) = exported.get_finished_spans()
    assert span.name == "chat mock" and span.status.is_ok is True
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    attributes = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "mock",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.conversation.id": "s",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "longturn.http_request_id": "abc",
        "longturn.queue_seconds": 0.001,
    }
    assert {name: attributes[name] for name in expected} == expected
    assert 0 < attributes["gen_ai.server.time_to_first_token"] < 10  # type: ignore[operator]
    assert "secret" not in str(attributes) + str(span.events), "texts are in no trace"


async def test_choices_failures_and_leaving_clients_have_spans(start: Start, exported: InMemorySpanExporter) -> None:
    served = await start(config=config())
    async with served.http() as http:
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 2, "stream": True})
        await http.post(CHAT, json=message("@crash"))
        task = asyncio.create_task(http.post(CHAT, json={**message("x"), "max_tokens": 1_000_000}))
        while served.engine.stats().running == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        async with asyncio.timeout(5):
            while len(exported.get_finished_spans()) < 4:
                await asyncio.sleep(0.005)
    spans = exported.get_finished_spans()
    assert [span.name for span in spans] == ["text_completion mock"] * 2 + ["chat mock"] * 2
    assert [dict(span.attributes or {}).get("error.type") for span in spans] == [
        None,
        None,
        "ZeroDivisionError",
        "cancelled",
    ]
    assert not spans[2].status.is_ok
    assert len({span.context.trace_id for span in spans if span.context}) == 4, "without a parent each is its own"


def test_without_the_packages_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'longturn\[otel\]'"):
        tracing.otlp_tracer("http://localhost:4318/v1/traces")


def test_without_an_endpoint_nothing_is_imported() -> None:
    import subprocess

    code = "import sys, longturn.server.run; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
