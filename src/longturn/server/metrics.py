"""Prometheus metrics: Longturn's own names (`longturn_`), and vLLM's for dashboards and routers that read those.

Engine figures are read from its latest snapshot when they are scraped; only what happens per request is counted here.
Every histogram is filled once and shown under both names.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longturn.config import PAGE_TOKENS
from longturn.engine.records import FinishReason, RequestTimes
from longturn.errors import RequestError
from longturn.frontend.records import ReuseReason, TextChunk, Usage
from longturn.server.overload import QueuePace
from longturn.server.ports import EngineMonitor

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 131072, 262144, 1048576)

_HISTOGRAMS: tuple[tuple[str, str | None, str, tuple[float, ...]], ...] = (
    ("ttft_seconds", "time_to_first_token_seconds", "From the request's arrival to its first token.", _LATENCY_S),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", "Between output tokens.", _TOKEN_S),
    ("time_per_output_token_seconds", "request_time_per_output_token_seconds", "Mean of one request.", _TOKEN_S),
    ("e2e_latency_seconds", "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_S),
    ("queue_seconds", "request_queue_time_seconds", "Waiting to be scheduled.", _LATENCY_S),
    ("prefill_seconds", "request_prefill_time_seconds", "From first scheduled to first token.", _LATENCY_S),
    ("decode_seconds", "request_decode_time_seconds", "From first token to last.", _LATENCY_S),
    ("inference_seconds", "request_inference_time_seconds", "From first scheduled to last token.", _LATENCY_S),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("request_cached_tokens", None, "Prompt tokens of a request from the prefix cache.", _TOKENS),
    ("request_generation_tokens", "request_generation_tokens", "Output tokens of a request.", _TOKENS),
)
"""Own name, vLLM's name, help, buckets."""


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of its own."""

    def __init__(
        self, engine: EngineMonitor, model_name: str, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name}
        self._monotonic_s = monotonic_s
        self.pace = QueuePace(monotonic_s=monotonic_s)
        self.histograms = {
            name: Histogram(name, text, registry=None, buckets=buckets) for name, _, text, buckets in _HISTOGRAMS
        }
        self._finished: Counter[str] = Counter()
        self._http: Counter[tuple[str, int]] = Counter()
        self._diverged = 0
        self._reuse: Counter[ReuseReason] = Counter()
        self._volatile = 0
        self._open = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def on_response(self, path: str, status: int) -> None:
        """Count one HTTP response."""
        self._http[path, status] += 1

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    async def watch(self, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[TextChunk, None]:
        """Pass on the chunks of one generation and measure them; closing it closes `chunks`.

        A request that is refused is no generation and is not counted as one.
        """
        observe = self.histograms
        started_s = self._monotonic_s()
        first_s = last_s = 0.0
        tokens = 0
        ended = "error"
        self._open += 1
        try:
            async with aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    self._volatile += chunk.reuse is not None and chunk.reuse.volatile is not None
                    count = len(chunk.token_ids)
                    if count:
                        now_s = self._monotonic_s()
                        if not tokens:
                            observe["ttft_seconds"].observe(now_s - started_s)
                            first_s = now_s
                        else:
                            # Tokens that come together share the wait for them.
                            latency_s = (now_s - last_s) / count
                            for _ in range(count):
                                observe["inter_token_latency_seconds"].observe(latency_s)
                        last_s = now_s
                        tokens += count
                    if chunk.finish is not None:
                        ended = chunk.finish.value
                        self._finish(chunk.usage, chunk.times)
                        observe["e2e_latency_seconds"].observe(self._monotonic_s() - started_s)
                        if tokens > 1:
                            observe["time_per_output_token_seconds"].observe((last_s - first_s) / (tokens - 1))
                    yield chunk
        except RequestError:
            ended = ""
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and ended == "error":
                # Closed or cancelled: the client went away.
                ended = FinishReason.ABORT.value
            raise
        finally:
            self._open -= 1
            if ended:
                self.pace.ended()
                self._finished[ended] += 1

    def _finish(self, usage: Usage | None, times: RequestTimes | None) -> None:
        observe = self.histograms
        if usage is not None:
            observe["request_prompt_tokens"].observe(usage.prompt_tokens)
            observe["request_cached_tokens"].observe(usage.cached_tokens)
            observe["request_generation_tokens"].observe(usage.completion_tokens)
            self._diverged += usage.diverged_at is not None
            if usage.reuse_reason is not None:
                self._reuse[usage.reuse_reason] += 1
        if times is not None:
            observe["queue_seconds"].observe((times.scheduled_ns - times.arrived_ns) / 1e9)
            observe["prefill_seconds"].observe((times.first_token_ns - times.scheduled_ns) / 1e9)
            observe["decode_seconds"].observe((times.finished_ns - times.first_token_ns) / 1e9)
            observe["inference_seconds"].observe((times.finished_ns - times.scheduled_ns) / 1e9)

    # --- Collector ---------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for own, vllm, _, _ in _HISTOGRAMS:
            yield self._renamed(own, f"longturn_{own}")
            if vllm is not None:
                yield self._renamed(own, f"vllm:{vllm}")

    def _gauges(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, text, value in (
            ("longturn_engine_up", "1 while there is an engine.", float(self._engine.alive)),
            ("longturn_requests_open", "Generations that the server has in hand.", self._open),
            ("longturn_requests_running", "Requests being computed.", stats.running),
            ("longturn_requests_waiting", "Requests waiting to be computed.", stats.waiting),
            ("longturn_pages_total", "Pages in the pool.", stats.pages_total),
            ("longturn_pages_used", "Pages referenced by requests.", stats.pages_used),
            ("longturn_pages_cached", "Free pages that hold a reusable prefix.", stats.pages_cached),
            ("longturn_host_pages_total", "Pages that host memory can hold.", stats.host_pages_total),
            ("longturn_host_pages_cached", "Pages that host memory holds.", stats.host_pages_cached),
            ("vllm:num_requests_running", "Requests being computed.", stats.running),
            ("vllm:num_requests_waiting", "Requests waiting to be computed.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", used),
        ):
            yield self._single(GaugeMetricFamily, name, text, value)
        info = {**self._labels, "block_size": str(PAGE_TOKENS), "num_gpu_blocks": str(stats.pages_total)}
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The prefix cache's shape.", labels=list(info))
        gauge.add_metric(list(info.values()), 1)
        yield gauge

    def _counters(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("longturn_engine_restarts", "Restarts of the engine process.", self._engine.restarts),
            ("longturn_steps", "Steps.", stats.steps),
            ("longturn_busy_seconds", "Time with a step in flight.", stats.busy_ns / 1e9),
            ("longturn_prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens),
            ("longturn_cached_tokens", "Of those, from the prefix cache.", stats.cached_tokens),
            ("longturn_generated_tokens", "Output tokens.", stats.generated_tokens),
            ("longturn_preemptions", "Preempted requests.", stats.preemptions),
            ("longturn_evictions", "Cached pages that were evicted.", stats.evictions),
            ("longturn_offloaded_pages", "Pages copied to host memory.", stats.offloaded_pages),
            ("longturn_loaded_pages", "Pages copied back from host memory.", stats.loaded_pages),
            ("longturn_host_hit_tokens", "Prompt tokens found in host memory alone.", stats.host_hit_tokens),
            ("longturn_aborts", "Aborted requests.", stats.aborts),
            ("longturn_leak_faults", "Failed page balance checks; anything but 0 is a bug.", stats.leak_faults),
            ("longturn_diverged_prompts", "Prompts that departed from their conversation.", self._diverged),
            ("longturn_volatile_headers", "Prompts new in a short part near their front alone.", self._volatile),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("vllm:prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Of those, from the prefix cache.", stats.cached_tokens),
            ("vllm:generation_tokens", "Output tokens.", stats.generated_tokens),
            ("vllm:num_preemptions", "Preempted requests.", stats.preemptions),
        ):
            yield self._single(CounterMetricFamily, name, text, value)
        for name in ("longturn_requests_finished", "vllm:request_success"):
            finished = CounterMetricFamily(name, "Ended generations.", labels=[*self._labels, "finished_reason"])
            for reason in FinishReason:
                finished.add_metric([*self._labels.values(), reason.value], self._finished[reason.value])
            yield finished
        reuse = CounterMetricFamily(
            "longturn_prompt_reuse",
            "Conversations' prompts by why no more was cached.",
            labels=[*self._labels, "reason"],
        )
        for why in ReuseReason:
            reuse.add_metric([*self._labels.values(), why.value], self._reuse[why])
        yield reuse
        http = CounterMetricFamily("longturn_http_responses", "HTTP responses.", labels=["path", "status"])
        for (path, status), count in self._http.items():
            http.add_metric([path, str(status)], count)
        yield http

    def _single(
        self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        metric = family(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _renamed(self, own: str, name: str) -> Metric:
        (source,) = self.histograms[own].collect()
        metric = Metric(name, source.documentation, source.type)
        for sample in source.samples:
            # `_created` lines are noise in the text format.
            if not sample.name.endswith("_created"):
                labels = {**self._labels, **sample.labels}
                metric.add_sample(name + sample.name.removeprefix(own), labels, sample.value)
        return metric
