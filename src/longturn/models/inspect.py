"""What a checkpoint is, from its configuration and the headers of its files; no weights are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longturn.config import ModelConfig
from longturn.models.base import KVSpec
from longturn.models.checkpoint.gguf import GGUFCheckpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.checkpoint.quant_config import Format
from longturn.models.llama import llama_kv
from longturn.models.llama_config import llama_config
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config, minimax_m3_config
from longturn.models.minimax_m3_load import is_other_part
from longturn.models.packed import is_quantised, why_not_packed
from longturn.ops.kv_lane import FP8, NVFP4
from longturn.source import ModelSource, resolve_source


@dataclass(frozen=True, slots=True)
class FormatSize:
    """All tensors of one stored format."""

    format: str
    tensors: int
    parameters: int
    bytes: int
    """In the files, scales included."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of the cache for one token in one storage type."""

    type: str
    kv_bytes_per_token: float
    index_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Summary:
    path: str
    family: str
    architecture: str
    quantisation: str
    layers: int
    layer_kinds: str
    """For people: how many layers are sparse and have experts."""
    context_tokens: int
    vocab_size: int
    parameters: int
    """Of the language model."""
    active_parameters: int
    """Used by one token."""
    formats: tuple[FormatSize, ...]
    skipped_tensors: int
    """Of vision towers and drafts."""
    skipped_bytes: int
    cache: tuple[CacheSize, ...]


def inspect_model(model: ModelConfig) -> Summary:
    """Describe the model that a configuration names.

    Raises:
        ModelError: it is unknown or damaged, or its configuration cannot be honoured.
    """
    source = resolve_source(model)
    if source.architecture.startswith("MiniMaxM3"):
        return _minimax_m3(source)
    config = llama_config(source.architecture, source.config)
    tensors: list[tuple[str, int, int]]
    if source.kind == "gguf":
        gguf = GGUFCheckpoint(source)
        tensors = [(gguf.type(n).lower(), math.prod(gguf.shape(n)), gguf.raw(n).nbytes) for n in sorted(gguf.names())]
        quantisation = "GGUF"
        packed = is_quantised(source) and why_not_packed(source) is None
    else:
        published = PublishedCheckpoint.of(source)
        tensors = [_stored(published, name) for name in sorted(published.names())]
        quantisation = published.quant.method
        packed = False
    # Packed weights keep their cache in fp16 unless fp32 is asked for, and take no bf16.
    types = (
        {"fp16": torch.float16, "fp32": torch.float32} if packed else {"fp32": torch.float32, "bf16": torch.bfloat16}
    )
    parameters = sum(count for _, count, _ in tensors)
    return Summary(
        path=str(source.path),
        family="dense decoder",
        architecture=source.architecture,
        quantisation=quantisation,
        layers=config.layers,
        layer_kinds="dense attention, dense feed-forward",
        context_tokens=source.max_context_tokens,
        vocab_size=source.vocab_size,
        parameters=parameters,
        active_parameters=parameters,
        formats=_sizes(tensors),
        skipped_tensors=0,
        skipped_bytes=0,
        cache=_cache(types, lambda dtype: llama_kv(config, dtype)),
    )


def _minimax_m3(source: ModelSource) -> Summary:
    checkpoint = PublishedCheckpoint.of(source)
    config = minimax_m3_config(source.config)
    names = sorted(checkpoint.names())
    ours = [name for name in names if not is_other_part(name)]
    others = [name for name in names if is_other_part(name)]
    counts = {name: math.prod(checkpoint.shape(name)) for name in ours}
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    parameters = sum(counts.values())
    idle = experts - experts * config.top_experts // config.experts if config.experts else 0
    types = {"bf16": torch.bfloat16, "fp8": FP8, "nvfp4": NVFP4}
    return Summary(
        path=str(source.path),
        family="MiniMax-M3",
        architecture=source.architecture,
        quantisation=checkpoint.quant.method,
        layers=config.layers,
        layer_kinds=_kinds(config),
        context_tokens=source.max_context_tokens,
        vocab_size=source.vocab_size,
        parameters=parameters,
        active_parameters=parameters - idle,
        formats=_sizes([_stored(checkpoint, name) for name in ours]),
        skipped_tensors=len(others),
        skipped_bytes=sum(checkpoint.stored_bytes(name) for name in others),
        cache=_cache(types, lambda dtype: minimax_m3_kv(config, dtype)),
    )


def _kinds(c: MiniMaxM3Config) -> str:
    text = f"{sum(c.sparse_layers)} sparse and {c.layers - sum(c.sparse_layers)} dense attention"
    if not c.experts:
        return f"{text}, dense feed-forward"
    shared = " and a shared one" if c.shared_ffn else ""
    return f"{text}, {sum(c.moe_layers)} with {c.experts} experts (top {c.top_experts}{shared})"


def _stored(checkpoint: PublishedCheckpoint, name: str) -> tuple[str, int, int]:
    form: str = checkpoint.format(name)
    if form == Format.PLAIN:
        form = checkpoint.shards.find(name).dtype.lower()
    return form, math.prod(checkpoint.shape(name)), checkpoint.stored_bytes(name)


def _sizes(tensors: list[tuple[str, int, int]]) -> tuple[FormatSize, ...]:
    """Largest first."""
    found = []
    for form in {form for form, _, _ in tensors}:
        of_form = [(count, size) for other, count, size in tensors if other == form]
        found.append(FormatSize(form, len(of_form), sum(c for c, _ in of_form), sum(s for _, s in of_form)))
    return tuple(sorted(found, key=lambda size: (-size.bytes, size.format)))


def _cache(types: dict[str, torch.dtype], spec: Callable[[torch.dtype], KVSpec]) -> tuple[CacheSize, ...]:
    sizes = []
    for name, dtype in types.items():
        lanes = [lane for layer in spec(dtype).layers for lane in layer]
        index = sum(lane.nbytes for lane in lanes if lane.name.startswith("index"))
        total = sum(lane.nbytes for lane in lanes)
        tokens = lanes[0].shape[-2]
        sizes.append(CacheSize(name, (total - index) / tokens, index / tokens))
    return tuple(sizes)
