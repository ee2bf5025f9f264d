"""The one place where the parts are put together: executor, engine and frontend from a configuration.

Imports are inside the functions: the server process calls `build_frontend` and must not import torch, and the engine
process calls `build_engine` and needs no web package.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from longturn.config import PAGE_TOKENS, EngineConfig, ExecutorConfig, SchedulerConfig
from longturn.errors import ConfigError
from longturn.source import ModelSource, resolve_source

if TYPE_CHECKING:
    from longturn.engine.kv_events import CacheListener
    from longturn.engine.loop import Engine
    from longturn.executor.cpu import CpuModel
    from longturn.executor.offload import Offload
    from longturn.frontend.engine_client import EngineClient
    from longturn.frontend.frontend import Frontend
    from longturn.grammar_library import Vocabulary
    from longturn.models.formats import ServedFormats

_log = logging.getLogger(__name__)

GPU_STEP_TOKENS = 4096
"""Token budget of a step on a GPU, unless another is configured."""


def build_engine(config: EngineConfig) -> Engine:
    """An engine with its executor, ready for requests.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        ConfigError: settings contradict each other or the model.
    """
    from longturn.engine.clock import SystemClock
    from longturn.engine.loop import Engine
    from longturn.executor.cpu import CpuExecutor

    if on_gpu(config):
        from longturn.executor.gpu.build import build_gpu_executor

        config = gpu_defaults(config)
        on_device = build_gpu_executor(config, resolve_source(config.model), lambda: _vocabulary(config))
        return Engine(on_device, config.scheduler, config.cache, SystemClock(), cache_listener=_cache_listener(config))
    model = build_cpu_model(config)
    executor = CpuExecutor(
        model,
        rows=config.scheduler.max_running,
        formats=cpu_formats(config, model),
        vocabulary=lambda: _vocabulary(config),
        offload=_cpu_offload(config, model),
    )
    return Engine(executor, config.scheduler, config.cache, SystemClock(), cache_listener=_cache_listener(config))


def _cache_listener(config: EngineConfig) -> CacheListener | None:
    cache = config.cache
    if cache.events_endpoint is None:
        if cache.events_replay_endpoint is not None:
            raise ConfigError("cache.events_replay_endpoint is given without cache.events_endpoint")
        return None
    from longturn.frontend.kv_publisher import KvPublisher

    return KvPublisher(
        cache.events_endpoint,
        cache.events_replay_endpoint,
        topic=cache.events_topic,
        events_format=cache.events_format,
    )


def _vocabulary(config: EngineConfig) -> Vocabulary:
    # Imported when the first grammar comes: the engine needs the tokenizer for nothing else.
    from longturn.frontend.grammar_vocabulary import source_vocabulary

    return source_vocabulary(resolve_source(config.model))


def gpu_defaults(config: EngineConfig) -> EngineConfig:
    """The configuration with what is left at its default changed to what suits a GPU: there a step of 512 tokens takes
    nearly as long as one of some thousand, since both read all experts."""
    if config.scheduler.step_tokens != SchedulerConfig().step_tokens:
        return config
    return replace(config, scheduler=replace(config.scheduler, step_tokens=GPU_STEP_TOKENS))


def on_gpu(config: EngineConfig) -> bool:
    """Whether steps run on a GPU: as configured, or where both model and machine can (`auto`).

    Raises:
        ConfigError: a GPU is asked for and is not possible here; the line says why.
    """
    if config.executor.device == "cpu":
        return False
    reason = why_on_cpu(config)
    if reason is not None and config.executor.device == "cuda":
        raise ConfigError(f"executor.device 'cuda' is not possible: {reason}; executor.device 'cpu' works without")
    return reason is None


def why_on_cpu(config: EngineConfig) -> str | None:
    """Why the configured model cannot run on a GPU here; None if it can.

    Raises:
        ModelError: as `resolve_source`.
    """
    source = resolve_source(config.model)
    if not source.architecture.startswith("MiniMaxM3"):  # torch is not loaded to serve other models
        return f"architecture {source.architecture} has no GPU kernels (MiniMax-M3's has)"
    from longturn.executor.gpu.device import why_no_device

    reason = why_no_device()
    if reason is not None:
        return reason
    from longturn.executor.gpu.build import why_not_served

    return why_not_served(source)


def build_cpu_model(config: EngineConfig) -> CpuModel:
    """The model that the configuration names, with its page pool, on this machine's processor."""
    source = resolve_source(config.model)
    threads = _threads(config.executor)
    if _packed(config, source):
        from longturn.executor.native_model import NativeCpuModel
        from longturn.kernels.cpu import native
        from longturn.models.packed import load_packed
        from longturn.prepared import cache_directory

        if config.cache.dtype not in ("auto", "fp16", "fp32"):
            raise ConfigError(
                f"cache.dtype '{config.cache.dtype}' is not supported with packed weights (fp16 and fp32 are)"
            )
        cache_dtype: Literal["fp16", "fp32"] = "fp32" if config.cache.dtype == "fp32" else "fp16"
        library = native.load(cache_directory(config.cache_dir))
        packed = load_packed(source, cache_dir=config.cache_dir)
        decoder = packed.decoder(library, threads=threads, cache_dtype=cache_dtype)
        pages, context = _pool(config, source, decoder.page_bytes)
        isa = f"{library.isa}{' amx' if library.amx else ''}"
        return NativeCpuModel(decoder, pages=pages, max_context_tokens=context, isa=isa)
    import torch

    from longturn.executor.torch_model import TorchCpuModel
    from longturn.models.registry import CACHE_TYPES, load_model

    _check_weights(config, source)
    model = load_model(source, dtype=torch.float32, kv_dtype=CACHE_TYPES[config.cache.dtype])
    pages, context = _pool(config, source, model.kv.page_bytes)
    return TorchCpuModel(model, pages=pages, max_context_tokens=context, threads=threads)


def _check_weights(config: EngineConfig, source: ModelSource) -> None:
    """Raises ConfigError if this machine's memory cannot hold the model's weights in fp32, beside the page pool."""
    from longturn.executor.memory import check_weights_fit, usable_memory_bytes
    from longturn.models.inspect import inspect_model
    from longturn.models.packed import why_not_packed

    check_weights_fit(
        source.path,
        [(size.format, size.parameters, size.bytes) for size in inspect_model(config.model).formats],
        cache_bytes=config.cache.memory_bytes,
        usable_bytes=usable_memory_bytes(),
        packable=why_not_packed(source) is None,
    )


def _threads(executor: ExecutorConfig) -> int:
    from longturn.executor.threads import usable_cores

    cores = usable_cores()
    if executor.threads is not None and executor.threads > cores:
        # They wait for each other within a step, so those that cannot run hold up all.
        counts = (executor.threads, cores)
        _log.warning("executor.threads is %d, more than the usable cores (%d): every step is slower for it", *counts)
    return executor.threads or cores


def _cpu_offload(config: EngineConfig, model: CpuModel) -> Offload | None:
    from longturn.executor.cpu_offload import cpu_offload
    from longturn.executor.offload import slots_of

    slots = slots_of(config.cache.host_memory_bytes, model.page_bytes, beside_bytes=model.pages * model.page_bytes)
    return cpu_offload(model.storage, slots) if slots else None


def cpu_formats(config: EngineConfig, model: CpuModel) -> ServedFormats:
    """What a model from `build_cpu_model` computes with."""
    from longturn.executor.native_model import NativeCpuModel
    from longturn.models.formats import gguf_format, main_format, served_formats

    source = resolve_source(config.model)
    packed = isinstance(model, NativeCpuModel)
    if source.kind == "gguf":
        stored = gguf_format(source)
    elif packed:
        stored = "bf16"  # whatever it is, packing makes q8_0 of it: only GGUF files have blocks that are kept
    else:
        from longturn.models.inspect import inspect_model

        formats = inspect_model(config.model).formats
        stored = main_format((size.format, size.parameters, size.bytes) for size in formats)
    return served_formats(stored, packed=packed, cache_dtype=config.cache.dtype)


def _packed(config: EngineConfig, source: ModelSource) -> bool:
    """Whether to run packed weights in native code; `auto` falls back to fp32 where they cannot run, and says so."""
    from longturn.kernels.cpu.build import find_compiler
    from longturn.kernels.cpu.library import unavailable_reason
    from longturn.models.packed import is_quantised, why_not_packed
    from longturn.prepared import cache_directory, require_writable

    wanted = config.model.weights
    if wanted == "fp32" or (wanted == "auto" and not is_quantised(source)):
        return False
    reason = why_not_packed(source)
    if reason is None:
        reason = unavailable_reason(cache_directory(config.cache_dir))
        if reason is None:
            return True
        if find_compiler() is not None:
            # Slow weights would only hide what the user can mend: a cache directory that cannot be written.
            require_writable(config.cache_dir)
    if wanted == "packed":
        raise ConfigError(f"model.weights 'packed' is not possible: {reason}")
    _log.warning("serving fp32 weights, which is slower: %s", reason)
    return False


def _pool(config: EngineConfig, source: ModelSource, page_bytes: int) -> tuple[int, int]:
    """(pages, longest context in tokens) that the configured memory holds."""
    from longturn.executor.memory import usable_memory_bytes

    usable_bytes = usable_memory_bytes()
    if usable_bytes is not None and config.cache.memory_bytes > usable_bytes:
        raise ConfigError(
            f"cache.memory_bytes {config.cache.memory_bytes} is more than the {usable_bytes} bytes of memory here"
        )
    pages = config.cache.memory_bytes // page_bytes
    if pages < 2:
        raise ConfigError(
            f"cache.memory_bytes {config.cache.memory_bytes} holds no page of this model ({page_bytes} bytes each, "
            "and one is reserved)"
        )
    context = min(source.max_context_tokens, (pages - 1) * PAGE_TOKENS)
    if context < source.max_context_tokens:
        limits = (context, source.max_context_tokens)
        _log.warning("the context is limited to %d of the model's %d tokens by cache.memory_bytes", *limits)
    return pages, context


def build_frontend(config: EngineConfig, engine: EngineClient) -> Frontend:
    """The text side of the configured model, in front of an engine.

    Raises:
        ModelError: the tokenizer is missing or not supported.
    """
    from longturn.frontend.frontend import Frontend
    from longturn.frontend.grammar_compiler import GrammarLimits
    from longturn.frontend.volatile import HeaderWatch

    limits = GrammarLimits(config.server.grammar_timeout_s, config.server.grammar_max_bytes)
    return Frontend.of(
        resolve_source(config.model),
        engine,
        reasoning_parser=config.model.reasoning_parser,
        tool_parser=config.model.tool_parser,
        grammar_limits=limits,
        headers=HeaderWatch(config.frontend.stabilise_headers),
        caches=config.cache.prefix_caching,
    )


def served_model(config: EngineConfig) -> tuple[str, str, int]:
    """(name, where it comes from, longest context in tokens) of the configured model."""
    source = resolve_source(config.model)
    return source.name, str(source.path), source.max_context_tokens
