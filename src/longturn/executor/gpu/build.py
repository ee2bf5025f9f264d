"""The GPU executor of a configured model: what fits, and one clear line where something does not."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from longturn.config import PAGE_TOKENS, CacheConfig, EngineConfig, ModelConfig
from longturn.errors import ConfigError, ModelError
from longturn.executor.gpu.device import check_device
from longturn.executor.gpu.early import EarlyWork
from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import GpuLimits
from longturn.executor.offload import slots_of
from longturn.grammar_library import Vocabulary
from longturn.kernels.packed_weights import WeightFormat
from longturn.kernels.plan_table import load_table, table_path
from longturn.models.checkpoint.base import open_checkpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.formats import ServedFormats, main_format
from longturn.models.inspect import inspect_model
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config, minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_limits import NVFP4_BYTES, scratch_bytes, weight_bytes, why_not_on_gpu
from longturn.models.minimax_m3_gpu_plans import PLANS, GpuPlans
from longturn.models.minimax_m3_gpu_weights import GpuWeights
from longturn.models.minimax_m3_load import load_minimax_m3
from longturn.models.registry import CACHE_TYPES
from longturn.prepared import cache_directory
from longturn.source import ModelSource

_log = logging.getLogger(__name__)

FAMILY = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")
_GB = 1e9
_CACHES = ("auto", "bf16", "fp8", "nvfp4")
_CONTEXT_BYTES = 1 << 30
"""What CUDA, its libraries and loaded kernels take beside tensors, about."""


def why_not_served(source: ModelSource) -> str | None:
    """Why this model does not run on a GPU; None if it does."""
    if source.architecture not in FAMILY:
        return f"architecture {source.architecture} has no GPU kernels (MiniMax-M3's has)"
    return why_not_on_gpu(minimax_m3_config(source.config))


def build_gpu_executor(
    config: EngineConfig, source: ModelSource, vocabulary: Callable[[], Vocabulary] | None = None
) -> GpuExecutor:
    """Load the model onto the GPU and make every step's graph. `vocabulary` is for requests with a grammar.

    Raises:
        ConfigError: there is no usable GPU, the model or a setting is not supported on one, or memory is too small.
        ModelError: the checkpoint is damaged.
    """
    if (reason := why_not_served(source)) is not None:
        raise ConfigError(f"executor.device 'cuda' is not possible: {source.path}: {reason}; 'cpu' serves this model")
    c = minimax_m3_config(source.config)
    _check_settings(config, c)
    check_device()
    device = torch.device("cuda")
    memory = _memory(config, c, source, device)
    begin = time.perf_counter()
    formats = _formats(config)
    kv_dtype = CACHE_TYPES[formats.kv_cache]
    assert kv_dtype is not None, "the automatic type has been decided"
    page_bytes = minimax_m3_kv(c, kv_dtype).page_bytes
    pages = memory.pages(page_bytes)
    context = min(source.max_context_tokens, (pages - 1) * PAGE_TOKENS)
    if context < source.max_context_tokens:
        shortened = (context, source.max_context_tokens)
        _log.warning("the context is limited to %d of the model's %d tokens by GPU memory", *shortened)
    host_pages = slots_of(config.cache.host_memory_bytes, page_bytes)
    limits = GpuLimits(config.scheduler.max_running, config.scheduler.step_tokens, context, host_pages=host_pages)
    experts = _EXPERTS.get(formats.quantisation, WeightFormat.PLAIN)
    name = torch.cuda.get_device_name(device)
    with _told(source, name, memory):
        plans = GpuPlans(table=load_table(table_path(cache_directory(config.cache_dir), name), name, PLANS))
        early = EarlyWork(
            c, pages, limits, experts=experts, kv_dtype=kv_dtype, masked=vocabulary is not None, plans=plans
        )
        try:
            weights = _load(c, source, kv_dtype, device)
        except Exception:
            early.close()
            raise
        loaded = time.perf_counter()
        executor = GpuExecutor(
            MiniMaxM3Gpu(weights, pages, plans),
            limits,
            description=f"cuda ({name})",
            vocabulary=vocabulary,
            formats=formats,
        )
        graphs = executor.start(early.compilation())
    gc.collect()
    gc.freeze()  # a full collection over everything loaded so far would cost a step a tenth of a second
    spent = (loaded - begin, graphs, time.perf_counter() - loaded)
    _log.info("weights loaded in %.1f s, %d graphs made in %.1f s", *spent)
    return executor


@contextlib.contextmanager
def _told(source: ModelSource, name: str, memory: _Memory) -> Iterator[None]:
    """Running out of memory as one line. What is needed is known before only about, and other processes take some."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{source.path} does not fit on {name} beside {memory.pool_bytes / _GB:.1f} GB of pages: "
            f"{memory.explanation}; a smaller executor.gpu_memory_share leaves more room"
        ) from error


def expert_format(model: ModelConfig) -> WeightFormat:
    """The format in which a checkpoint's experts stay."""
    return _EXPERTS.get(_stored(model), WeightFormat.PLAIN)


def _stored(model: ModelConfig) -> str:
    return main_format((size.format, size.parameters, size.bytes) for size in inspect_model(model).formats)


_EXPERTS = {"nvfp4": WeightFormat.NVFP4, "mxfp8": WeightFormat.MXFP8}
"""Formats in which experts stay, by the name of the checkpoint's."""


def _formats(config: EngineConfig) -> ServedFormats:
    stored = _stored(config.model)
    cache = "bf16" if config.cache.dtype == "auto" else config.cache.dtype
    return ServedFormats(weights="packed" if stored != "bf16" else "bf16", quantisation=stored, kv_cache=cache)


def _quantised(source: ModelSource) -> bool:
    return bool(source.config.get("quantization_config"))


def _load(c: MiniMaxM3Config, source: ModelSource, kv_dtype: torch.dtype, device: torch.device) -> GpuWeights:
    """The checkpoint's weights on the device: quantised experts as they are, everything else in bf16."""
    checkpoint = open_checkpoint(source)
    assert isinstance(checkpoint, PublishedCheckpoint), "why_not_served has looked"
    dtype = torch.bfloat16
    try:
        if not _quantised(source):
            return GpuWeights.of(load_minimax_m3(c, checkpoint, dtype=dtype, kv_dtype=kv_dtype, device=device))
        host = torch.device("cpu")
        model = load_minimax_m3(c, checkpoint, dtype=dtype, kv_dtype=kv_dtype, device=host, pack_above_bytes=0)
        return GpuWeights.of(model, device)
    except ModelError as error:
        if str(source.path) in str(error):
            raise
        raise ModelError(f"{source.path}: {error}") from error


def _check_settings(config: EngineConfig, c: MiniMaxM3Config) -> None:
    if config.model.weights != "auto":
        raise ConfigError(f"model.weights '{config.model.weights}' is not supported on a GPU (auto is)")
    if config.cache.dtype not in _CACHES:
        known = ", ".join(_CACHES)
        raise ConfigError(f"cache.dtype '{config.cache.dtype}' is not supported on a GPU ({known} are)")
    if config.cache.dtype in ("fp8", "nvfp4") and not all(c.sparse_layers):
        raise ConfigError(
            f"cache.dtype '{config.cache.dtype}' is not supported on a GPU for a model that has layers with dense "
            "attention (bf16 is)"
        )


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes that the page pool may take, and where they come from."""

    pool_bytes: int
    explanation: str

    def pages(self, page_bytes: int) -> int:
        """Pages of the pool, the null page counted. Raises ConfigError if there is room for no other."""
        pages = self.pool_bytes // page_bytes
        if pages < 2:
            raise ConfigError(
                f"too little GPU memory for a page of this model ({page_bytes} bytes, and one is reserved): "
                f"{self.explanation}"
            )
        return pages


_VALUE_BYTES = {WeightFormat.PLAIN: 2.0, WeightFormat.MXFP8: 1 + 1 / 32, WeightFormat.NVFP4: NVFP4_BYTES}
"""Of one value of a routed expert, scales counted."""
_LEAST_STEP_TOKENS = 512


def _memory(config: EngineConfig, c: MiniMaxM3Config, source: ModelSource, device: torch.device) -> _Memory:
    free, total = torch.cuda.mem_get_info(device)
    usable = int(min(free, total * config.executor.gpu_memory_share))
    experts = expert_format(config.model)
    rows = config.scheduler.max_running

    def needed(form: WeightFormat, tokens: int) -> tuple[int, int]:
        """(weights, scratch) in bytes."""
        packed = form is not WeightFormat.PLAIN
        scratch = scratch_bytes(c, max(tokens, rows), source.max_context_tokens, packed_experts=packed)
        return weight_bytes(c, _VALUE_BYTES[form]), scratch + _CONTEXT_BYTES

    weights, scratch = needed(experts, config.scheduler.step_tokens)
    left = usable - weights - scratch
    explanation = (
        f"{weights / _GB:.1f} GB of weights and {scratch / _GB:.1f} GB of scratch, of {usable / _GB:.1f} GB that may "
        f"be used ({free / _GB:.1f} GB free, executor.gpu_memory_share {config.executor.gpu_memory_share:g})"
    )
    if left <= 0:
        smaller = (
            (f"scheduler.step_tokens {_LEAST_STEP_TOKENS}", needed(experts, _LEAST_STEP_TOKENS)),
            ("experts in NVFP4 (`longturn convert`)", needed(WeightFormat.NVFP4, _LEAST_STEP_TOKENS)),
        )
        fits = next((f"{name} would fit" for name, parts in smaller if sum(parts) < usable), "no format of it would")
        raise ConfigError(f"{source.path} does not fit on {torch.cuda.get_device_name(device)}: {explanation}; {fits}")
    if config.cache.memory_bytes == CacheConfig().memory_bytes:
        return _Memory(left, explanation)
    if config.cache.memory_bytes > left:
        raise ConfigError(
            f"cache.memory_bytes {config.cache.memory_bytes} is more than fits, which is {left}: {explanation}"
        )
    return _Memory(config.cache.memory_bytes, f"cache.memory_bytes is {config.cache.memory_bytes}")
