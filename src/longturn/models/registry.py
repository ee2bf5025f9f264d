"""Which family serves which architecture, and how a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from longturn.errors import ModelError
from longturn.models.base import CausalModel
from longturn.models.checkpoint.base import Checkpoint, open_checkpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.llama import load_llama
from longturn.models.llama_config import llama_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_load import load_minimax_m3
from longturn.ops.kv_lane import FP8, NVFP4
from longturn.source import ModelSource

CACHE_TYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": FP8,
    "nvfp4": NVFP4,
}
"""Types of the cache by their name in the configuration; None is that of the weights."""

Loader = Callable[[ModelSource, Checkpoint, torch.dtype, torch.dtype], CausalModel]


def _load_llama(source: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype, kv_dtype: torch.dtype) -> CausalModel:
    if kv_dtype in (FP8, NVFP4):
        raise ModelError(f"architecture {source.architecture} has no fp8 or nvfp4 cache (fp32, fp16 and bf16 are)")
    config = llama_config(source.architecture, source.config)
    return load_llama(config, checkpoint, dtype=dtype, kv_dtype=kv_dtype)


def _load_minimax_m3(
    source: ModelSource, checkpoint: Checkpoint, dtype: torch.dtype, kv_dtype: torch.dtype
) -> CausalModel:
    assert isinstance(checkpoint, PublishedCheckpoint), "open_checkpoint decides"
    config = minimax_m3_config(source.config)
    return load_minimax_m3(config, checkpoint, dtype=dtype, kv_dtype=kv_dtype, device=torch.device("cpu"))


FAMILIES: Mapping[str, Loader] = {
    "LlamaForCausalLM": _load_llama,
    "Qwen2ForCausalLM": _load_llama,
    "Qwen3ForCausalLM": _load_llama,
    "MiniMaxM3SparseForConditionalGeneration": _load_minimax_m3,
    "MiniMaxM3SparseForCausalLM": _load_minimax_m3,
}


def load_model(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> CausalModel:
    """Load a model to run in torch, on the CPU.

    Args:
        source: from `resolve_source`.
        dtype: of weights and activations; quantised weights are dequantised to it.
        kv_dtype: of cached keys and values; `dtype` if None. The MiniMax-M3 family also takes fp8 and NVFP4, see
            `ops.kv_lane`.

    Raises:
        ModelError: the architecture has no family, or the checkpoint is damaged or does not fit its configuration.
    """
    if source.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{source.path}: architecture {source.architecture} is not supported (supported: {known})")
    checkpoint = open_checkpoint(source)
    try:
        return FAMILIES[source.architecture](source, checkpoint, dtype, kv_dtype or dtype)
    except ModelError as error:
        if str(source.path) in str(error):
            raise
        raise ModelError(f"{source.path}: {error}") from error
