"""OpenTelemetry traces: a span for each generation, with the attributes of the GenAI semantic conventions.

The packages are an extra (`pip install longturn[otel]`); nothing here is imported unless traces are asked for.
Prompts and answers are never in a span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from longturn.errors import ConfigError
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest
from longturn.server.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SYSTEM = "longturn"


def otlp_tracer(endpoint: str) -> GenerationTracer:
    """A tracer that sends its spans to `endpoint` (OTLP over HTTP), in the background.

    Raises:
        ConfigError: the packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"server.traces_endpoint needs the OpenTelemetry packages ({error.name} is missing): "
            "pip install 'longturn[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": SYSTEM}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return GenerationTracer(provider)


class GenerationTracer:
    """A `generations.Tracer` over a provider of OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer(SYSTEM)

    def start(self, request: TextRequest, model: str, context: RequestContext | None) -> GenerationSpan:
        """See `generations.Tracer.start`. The span is a child of the client's, if it sent a trace context."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        parent = TraceContextTextMapPropagator().extract(_carrier(context))
        sampling = request.sampling
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SYSTEM,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
        }
        if sampling.max_tokens:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if request.session_id is not None:
            attributes["gen_ai.conversation.id"] = request.session_id
        if context is not None:
            attributes["longturn.http_request_id"] = context.request_id
        span = self._tracer.start_span(
            f"{operation} {model}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        return GenerationSpan(span)


class GenerationSpan:
    """A `generations.Span`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._started_s = time.perf_counter()
        self._first = True

    def chunk(self, chunk: TextChunk) -> None:
        """See `generations.Span.chunk`."""
        span = self._span
        if self._first and chunk.token_ids:
            self._first = False
            span.set_attribute("gen_ai.server.time_to_first_token", time.perf_counter() - self._started_s)
            span.add_event("first token")
        if chunk.finish is None:
            return
        span.set_attribute("gen_ai.response.finish_reasons", (chunk.finish.value,))
        usage = chunk.usage
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
            span.set_attribute("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens)
        if chunk.times is not None:
            queue_s = (chunk.times.scheduled_ns - chunk.times.arrived_ns) / 1e9
            span.set_attribute("longturn.queue_seconds", queue_s)

    def end(self, error: BaseException | None) -> None:
        """See `generations.Span.end`."""
        from opentelemetry.trace import StatusCode

        if isinstance(error, Exception):
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error))
        elif error is not None:
            # Closed or cancelled: the client went away.
            self._span.set_attribute("error.type", "cancelled")
        self._span.end()


def _carrier(context: RequestContext | None) -> Mapping[str, str]:
    if context is None or context.traceparent is None:
        return {}
    carrier = {"traceparent": context.traceparent}
    if context.tracestate is not None:
        carrier["tracestate"] = context.tracestate
    return carrier
