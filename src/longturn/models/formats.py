"""Names for the format that a model's weights are served in. No torch: the packed path must not load it for a name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from longturn.gguf_file import read_gguf
from longturn.source import ModelSource

KEPT_BLOCKS = ("q4_1", "q8_0")
"""Block formats that packed weights keep as they are; everything else becomes q8_0."""
_FLOAT_NAMES = {"f32": "fp32", "f16": "fp16"}


@dataclass(frozen=True, slots=True)
class ServedFormats:
    """What a loaded model computes with."""

    weights: str
    """`packed` or `fp32`."""
    quantisation: str
    """The weights' format: `q4_1`, `bf16` ..."""
    kv_cache: str


def main_format(sizes: Iterable[tuple[str, int, int]]) -> str:
    """The name that a checkpoint of several formats goes by: the shortest one that has a tenth of the parameters.

    Args:
        sizes: (format, parameters, bytes) of each format, or of each tensor.
    """
    totals: dict[str, tuple[int, int]] = {}
    for form, parameters, size in sizes:
        before = totals.get(form, (0, 0))
        totals[form] = before[0] + parameters, before[1] + size
    whole = sum(parameters for parameters, _ in totals.values())
    large = {form: size / parameters for form, (parameters, size) in totals.items() if 10 * parameters >= whole}
    name = min(large, key=large.__getitem__)
    return _FLOAT_NAMES.get(name, name)


def gguf_format(source: ModelSource) -> str:
    """`main_format` of a GGUF file, from its header."""
    tensors = read_gguf(source.path).tensors.values()
    return main_format((tensor.type.lower(), math.prod(tensor.shape), tensor.nbytes) for tensor in tensors)


def served_formats(stored: str, *, packed: bool, cache_dtype: str) -> ServedFormats:
    """What a checkpoint is served as on a CPU.

    Args:
        stored: `main_format` of the checkpoint.
        packed: with packed weights; in fp32 they have the values that are stored, whatever the format.
        cache_dtype: `cache.dtype` of the configuration.
    """
    automatic = "fp16" if packed else "fp32"
    return ServedFormats(
        weights="packed" if packed else "fp32",
        quantisation="q8_0" if packed and stored not in KEPT_BLOCKS else stored,
        kv_cache=automatic if cache_dtype == "auto" else cache_dtype,
    )
