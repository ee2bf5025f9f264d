"""The one configuration: a tree of frozen dataclasses, read from CLI flags, Python or YAML.

`config_from_dict` builds the tree from nested mappings, `check_config` checks one that a program built; unknown keys,
wrong types and values out of range are `ConfigError`s that name the key. No setting is read from the environment. The
docstring under a field is its `--help` text, its annotation says what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from longturn.errors import ConfigError

PAGE_TOKENS = 128
"""Tokens in one page: the block of MiniMax Sparse Attention, and the unit of caching, eviction and transfer."""

GIB = 1 << 30
MIB = 1 << 20


_UNBOUNDED = 1 << 53
"""Every number in a configuration is below this, so that JSON and floats carry it exactly."""


@dataclass(frozen=True, slots=True)
class Range:
    """What values a number may have; both ends belong to it unless `open_high`. NaN and infinity never do."""

    low: int
    high: int = _UNBOUNDED
    open_high: bool = False

    def complaint(self, value: float) -> str | None:
        """What is wrong with `value`: "at least 1"; None if nothing is."""
        too_high = value >= self.high if self.open_high else value > self.high
        if math.isfinite(value) and self.low <= value and not too_high:
            return None
        if self.high == _UNBOUNDED and not value > self.high:
            return f"at least {self.low}"
        return f"at least {self.low} and below {self.high}" if self.open_high else f"from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Of a text: at least one character that is not white space."""


Name = Annotated[str, NotEmpty()]
Count = Annotated[int, Range(1)]
Duration = Annotated[float, Range(0, 10**9)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: Name | None = None
    """Local Hugging Face directory or GGUF file; by default the embedded SmolLM2-135M-Instruct."""
    served_name: Name | None = None
    """Name that the API shows; by default that of the directory or file."""
    weights: Literal["auto", "fp32", "packed"] = "auto"
    """fp32: dequantised, exact. packed: 4- and 8-bit blocks, 12-bit activations. auto: as the checkpoint has them."""
    max_context_tokens: Count | None = None
    """Longest prompt plus output; by default the checkpoint's own limit."""
    tool_parser: Literal["auto", "none", "hermes", "json", "llama_json", "minimax_m3", "qwen3_coder"] = "auto"
    """How the model writes tool calls; auto: what its architecture and its chat template say."""
    reasoning_parser: Literal["auto", "none", "minimax_m3", "think"] = "auto"
    """How the model writes reasoning (think: <think>...</think>); auto: as its architecture and chat template say."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    memory_bytes: Count = 384 * MIB
    """Bytes for the page pool (keys, values and every other lane). On a GPU the default takes all that is left."""
    dtype: Literal["auto", "fp32", "fp16", "bf16", "fp8", "nvfp4"] = "auto"
    """Type of cached keys and values; auto: fp32 with fp32 weights, else fp16 (CPU). fp8, nvfp4: MiniMax-M3 alone."""
    prefix_caching: bool = True
    """Keep whole pages of finished requests and reuse them for equal prefixes."""
    retention_half_life_s: Duration = 30.0
    """A waiting session's claim on its pages halves in this time; 0 is plain segmented LRU."""
    host_memory_bytes: Annotated[int, Range(0)] = 0
    """Bytes of host memory for pages that leave the pool, copied back when a prompt hits them; 0 keeps none."""
    events_endpoint: Name | None = None
    """ZeroMQ address to publish page events at, in vLLM's format, for cache-aware routers; such as tcp://*:5557."""
    events_replay_endpoint: Name | None = None
    """ZeroMQ address that sends past page events again to routers that missed some; such as tcp://*:5558."""
    events_topic: str = ""
    """ZeroMQ topic of page events."""
    events_format: Literal["maps", "arrays"] = "maps"
    """How a page event is written: with names, as by vLLM 0.24 and later, or as an array, which older routers read."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_running: Annotated[int, Range(1, 4096)] = 16
    """Requests computed at once (rows of the executor)."""
    step_tokens: Annotated[int, Range(1, 1 << 20)] = 512
    """Token budget of one step: decodes and prefill chunks together. On a GPU the default becomes 4096."""
    chunk_tokens: Annotated[int, Range(0, 1 << 20)] = 0
    """Most tokens of one prompt in a step, however much of the budget is left; 0 is no bound."""
    decode_share: Annotated[float, Range(0, 1, open_high=True)] = 0.25
    """Share of the step budget that running decodes keep when prompts wait."""
    target_itl_ms: Duration = 150.0
    """Inter-token latency that a prefill chunk beside running decodes is sized for; 0 switches the sizing off."""
    ageing_ms: Duration = 500.0
    """A waiting prompt overtaken for this long counts as if it were half as long; this is what stops starvation."""
    recompute_share: Annotated[float, Range(0, 1)] = 0.15
    """Share of time for computing again what was evicted of sessions: beyond it a turn that lost its pages waits while
    others run. 1 is no bound; 0 lets such turns run only when nothing else does."""
    expected_output_tokens: Count = 256
    """Output that admission reserves for a request at first; learned from finished requests after that."""
    max_waiting: Count = 1024
    """Requests that may wait beyond those that there are rows for; one more is refused with 429."""
    run_ahead: bool = True
    """Launch step N+1 before the result of step N is read."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where steps run."""
    threads: Annotated[int, Range(1, 1024)] | None = None
    """Compute threads of the CPU executor; by default one per physical core that this process may use."""
    gpu_memory_share: Annotated[float, Range(0, 1)] = 0.92
    """Share of a GPU's memory to use; the page pool gets what weights and scratch leave of it."""


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    stabilise_headers: Literal["off", "report", "move"] = "report"
    """Dates, counters and the like in system prompts, which cost the cache of all behind them: off, report them, or
    move their lines to the system prompt's end."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: Name = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0 picks a free one and prints it."""
    api_keys: tuple[Name, ...] = ()
    """Accepted bearer keys; empty admits everyone. /health and /metrics stay open."""
    api_keys_file: Name | None = None
    """File with more accepted keys, one a line (# begins a comment): keys on a command line are seen by everyone."""
    ssl_certfile: Name | None = None
    """PEM file with the certificate chain to serve HTTPS with; needs ssl_keyfile unless the key is in it too."""
    ssl_keyfile: Name | None = None
    """PEM file with the certificate's private key."""
    cors_origins: tuple[Name, ...] = ()
    """Origins that browsers may call from."""
    model_aliases: tuple[Name, ...] = ()
    """Other names that requests may call the model, for clients that send their own; * at the end is any ending."""
    unsupported_tools: Literal["refuse", "drop"] = "refuse"
    """What Responses and Messages do with tools that would run on the server (web search and such)."""
    response_store_bytes: Annotated[int, Range(0)] = 64 * MIB
    """Bytes of responses of /v1/responses to keep for previous_response_id; 0 keeps none."""
    response_store_ttl_s: Annotated[float, Range(1, 10**9)] = 24 * 3600.0
    """A kept response that was not used for this long is forgotten."""
    max_body_bytes: Count = 64 * MIB
    """Largest body of one HTTP request; a larger one is answered with 413."""
    request_timeout_s: Duration = 0.0
    """Longest time one request may take; 0 is no limit."""
    engine_silence_s: Duration = 300.0
    """An engine that is silent for this long hangs: its requests fail, and it is restarted once; 0 waits for ever."""
    drain_s: Duration = 10.0
    """Time that requests in flight have to finish after SIGTERM; what is left then ends with an error."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least level that is logged; info has a line for each request."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written: for people, or one JSON object a line with the request's id."""
    traces_endpoint: Name | None = None
    """Where OpenTelemetry traces go (OTLP over HTTP, such as http://localhost:4318/v1/traces); needs longturn[otel]."""
    grammar_timeout_s: Duration = 5.0
    """Longest time that compiling one request's schema or grammar may take; longer is that request's 400."""
    grammar_max_bytes: Count = 256 * 1024
    """Largest schema or grammar of one request, in bytes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything a running engine needs; the same tree for `longturn serve`, `longturn.LLM` and the benchmarks."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cache_dir: Name | None = None
    """Directory for prepared files (packed weights, compiled kernels); by default ~/.cache/longturn."""
    seed: Annotated[int, Range(-_UNBOUNDED)] = 0
    """Seed of sampling for requests that bring none."""


T = TypeVar("T")


def config_from_dict(cls: type[T], data: Mapping[str, Any], *, where: str = "") -> T:
    """Build dataclass `cls` from nested mappings.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range; the message names the dotted
            key.
    """
    hints = get_type_hints(cls, include_extras=True)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{where}{key}"
        if key not in names:
            raise ConfigError(f"unknown setting '{dotted}' (known: {', '.join(sorted(names))})")
        values[key] = _convert(hints[key], value, dotted)
    return cls(**values)


def check_config(config: T, *, where: str = "") -> T:
    """The same settings, each of them checked: for trees, or parts of one, that a program has put together.

    Raises:
        ConfigError: as `config_from_dict`.
    """
    return config_from_dict(type(config), _as_mapping(config), where=where)


def _as_mapping(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *limits = get_args(hint)
        return _limited(_convert(inner, value, dotted), limits, dotted)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            value = _as_mapping(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{dotted}' must be a mapping, not {value!r}")
        return config_from_dict(hint, value, where=f"{dotted}.")
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"'{dotted}' must be one of {', '.join(map(str, get_args(hint)))}, not {value!r}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        return _convert(next(a for a in get_args(hint) if a is not type(None)), value, dotted)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, typing.Sequence):
            raise ConfigError(f"'{dotted}' must be a list, not {value!r}")
        return tuple(_convert(get_args(hint)[0], item, f"{dotted}[{i}]") for i, item in enumerate(value))
    if isinstance(value, bool) and hint is not bool:
        raise ConfigError(f"'{dotted}' must be {hint.__name__}, not {value!r}")
    if hint is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"'{dotted}' is out of range: {value}") from None
    if not isinstance(value, hint):
        raise ConfigError(f"'{dotted}' must be {hint.__name__}, not {value!r}")
    return value


def _limited(value: Any, limits: list[Any], dotted: str) -> Any:
    for limit in limits:
        if isinstance(limit, NotEmpty) and not value.strip():
            raise ConfigError(f"'{dotted}' must not be empty")
        if isinstance(limit, Range) and (allowed := limit.complaint(value)) is not None:
            raise ConfigError(f"'{dotted}' must be {allowed}, not {value}")
    return value
