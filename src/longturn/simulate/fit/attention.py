"""Constants of a block-sparse attention layer, from the tables of whole attention modules.

A table row is one module (projections to projections) for MiniMax-M3's widths with some heads. Decode and prefill rows
are fitted together: they share how fast weights stream and multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longturn.simulate.calibration import AttentionConstants
from longturn.simulate.cost.formulas import (
    attend_operations,
    attended,
    gemm_ns,
    index_operations,
    pairs,
    projection_elements,
)
from longturn.simulate.fit.solver import Array, solve
from longturn.simulate.fit.tables import Columns, numbers
from longturn.simulate.formats import CACHE_BYTES, WEIGHT_BYTES
from longturn.simulate.platform import Platform

_HIDDEN, _HEAD_DIM, _INDEX_DIM, _HEADS_PER_GROUP = 6144, 128, 128, 16
_LIMIT = 2048.0
_HEADS = (8, 16, 32, 64)
_WEIGHTS = {"bfloat16": "bf16", "fp8_block": "fp8", "nvfp4": "nvfp4"}
_CACHES = {"bfloat16": "bf16", "fp8": "fp8"}
_LEAST_CONTEXT = 256
_MOST_CHUNKS = 16
_INDEX_BYTES = 256.0
_BEST_COMPUTE = 0.76
"""Of the BF16 peak: a large matrix product on an H200 (754 of 989 TFLOP/s). The tables end at prompts of 32,768 tokens,
where scoring the index is little of the whole, so the fit alone would leave its rate open upwards."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns of decode rows, then of prefill rows; what does not apply is 0."""

    weight_bytes: Array
    operations: Array
    decode_tokens: Array
    read_index_bytes: Array
    read_cache_bytes: Array
    chunk_tokens: Array
    scored: Array
    attend: Array
    ns: Array

    @property
    def is_prefill(self) -> NDArray[np.bool_]:
        return self.chunk_tokens > 0


def fit_attention(platform: Platform, decode: Columns, prefill: Columns, note: str) -> dict[str, AttentionConstants]:
    """Constants by "<weights>-<cache>", for every pair of formats in the tables."""
    found: dict[str, AttentionConstants] = {}
    for weights in _WEIGHTS:
        for cache in _CACHES:
            rows = _rows(decode, prefill, weights, cache)
            if len(rows.ns):
                found[f"{_WEIGHTS[weights]}-{_CACHES[cache]}"] = _fit(platform, rows, _WEIGHTS[weights], note)
    return found


def _fit(platform: Platform, rows: _Rows, weights: str, note: str) -> AttentionConstants:
    bandwidth = platform.value("hbm_bandwidth") / 1e9
    peak = platform.flops(weights) / 1e9
    bf16 = platform.flops("bf16") / 1e9
    prefill = rows.is_prefill

    def predict(x: Array) -> Array:
        stream, compute, index_stream, _, attend_stream, attend_compute = x[2:8]
        projections = gemm_ns(rows.weight_bytes / (bandwidth * stream), rows.operations / (peak * compute))
        own = np.where(
            prefill,
            x[1] + rows.chunk_tokens * x[9],
            x[0] + rows.decode_tokens * x[8],
        )
        return np.asarray(
            own
            + projections
            + rows.read_index_bytes / (bandwidth * index_stream)
            + rows.read_cache_bytes / (bandwidth * attend_stream)
            + rows.scored / (bf16 * _bounded(float(x[5])))
            + rows.attend / (bf16 * attend_compute)
        )

    start = (25e3, 50e3, 0.7, 0.5, 0.85, 0.1, 0.4, 0.5, 20.0, 5.0)
    solution = solve(predict, start, rows.ns)
    x = [float(f"{value:.4g}") for value in solution.constants]
    return AttentionConstants(
        basis="tables",
        note=note,
        decode_fixed_ns=x[0],
        prefill_fixed_ns=x[1],
        weight_stream=x[2],
        compute=x[3],
        index_stream=x[4],
        index_compute=round(_bounded(x[5]), 4),
        attend_stream=x[6],
        attend_compute=x[7],
        decode_token_ns=x[8],
        prefill_token_ns=x[9],
        decode=solution.residual(~prefill),
        prefill=solution.residual(prefill),
    )


def _bounded(value: float) -> float:
    """A positive number, mapped below `_BEST_COMPUTE`."""
    return value / (1.0 + value / _BEST_COMPUTE)


def _rows(decode: Columns, prefill: Columns, weights: str, cache: str) -> _Rows:
    parts = []
    for table, is_prefill in ((decode, False), (prefill, True)):
        chosen = (table["gemm_type"] == weights) & (table["kv_cache_dtype"] == cache)
        chosen &= np.isin(table["num_heads"], _HEADS)
        if is_prefill:
            chosen &= (table["isl"] >= 64) & (table["batch_size"] <= _MOST_CHUNKS)
        else:
            chosen &= table["step"] + 1 >= _LEAST_CONTEXT
        heads = numbers(table, "num_heads", chosen)
        batch = numbers(table, "batch_size", chosen)
        start = numbers(table, "step", chosen)
        count = numbers(table, "isl", chosen)
        groups = np.maximum(1.0, heads // _HEADS_PER_GROUP)
        elements = projection_elements(np.full_like(heads, _HIDDEN), heads, groups, groups, _HEAD_DIM, _INDEX_DIM)
        tokens = batch * count
        end = start + count
        zero = np.zeros_like(heads)
        scored = batch * (pairs(end) - pairs(start))
        attend = batch * (attended(end, _LIMIT) - attended(start, _LIMIT))
        # A tensor-core tile holds the 16 heads of a group: fewer heads on a rank compute as many.
        tiled = np.maximum(float(_HEADS_PER_GROUP), heads)
        cache_bytes = batch * np.minimum(end, _LIMIT) * groups * 2.0 * _HEAD_DIM * CACHE_BYTES[_CACHES[cache]]
        parts.append(
            _Rows(
                weight_bytes=elements * WEIGHT_BYTES[_WEIGHTS[weights]],
                operations=2.0 * tokens * elements,
                decode_tokens=zero if is_prefill else tokens,
                read_index_bytes=zero if is_prefill else batch * end * _INDEX_BYTES,
                read_cache_bytes=zero if is_prefill else cache_bytes,
                chunk_tokens=tokens if is_prefill else zero,
                scored=index_operations(scored, groups, _INDEX_DIM) if is_prefill else zero,
                attend=attend_operations(attend, tiled, _HEAD_DIM) if is_prefill else zero,
                ns=numbers(table, "latency", chosen) * 1e6,
            )
        )
    names = _Rows.__dataclass_fields__
    return _Rows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
