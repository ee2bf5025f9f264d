"""What attention costs beside its projections: all that depends on a step's contexts and chunks.

Rates are worked out once; a step is a few multiplications by sums that its shape holds.
"""

from __future__ import annotations

import math

from longturn.simulate.calibration import AttentionConstants
from longturn.simulate.cost.formulas import attend_operations, attended, distinct_keys, index_operations, pairs
from longturn.simulate.cost.step import StepShape
from longturn.simulate.formats import CACHE_BYTES, Formats
from longturn.simulate.layout import Layout, heads_per_rank
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape

DENSE_STREAM, DENSE_COMPUTE = 0.8, 0.6
"""Of peak bandwidth and BF16 peak, for dense attention: assumed, the tables have none. M3 has three such layers."""
SECOND_PATH_KERNELS = 4
"""Kernels that a layer launches in addition when a step has decode rows and chunks: their attention is separate."""


class AttentionCost:
    """Nanoseconds of all layers together."""

    __slots__ = (
        "_attend_chunk", "_attend_decode", "_chunk_token", "_decode_token", "_dense_chunk", "_dense_decode",
        "_distinct", "_few", "_fixed", "_index_chunk", "_index_floor", "_index_stream", "_limit", "_lone", "_lone_rows",
        "_parts", "_row_tile", "_select", "_tile",
    )  # fmt: skip

    def __init__(
        self,
        constants: AttentionConstants,
        platform: Platform,
        shape: ModelShape,
        layout: Layout,
        formats: Formats,
        small_kernel_ns: float,
    ) -> None:
        tp = layout.attention_tp
        bandwidth = platform.value("hbm_bandwidth") / 1e9
        bf16 = platform.flops("bf16") / 1e9
        heads = float(shape.heads // tp)
        groups = float(heads_per_rank(shape.kv_heads, tp))
        # A tensor-core tile holds all heads of a group: a rank with fewer of them computes as many (see fit/attention).
        tiled = max(heads, min(float(shape.heads // shape.kv_heads), 16.0))
        key_bytes = 2.0 * groups * shape.head_dim * CACHE_BYTES[formats.cache]
        layers, sparse, dense = float(shape.layers), float(shape.sparse_layers), float(shape.dense_layers)
        index_heads = float(heads_per_rank(shape.index_heads, tp))
        # Index keys have one head: every rank reads all of them, however attention is split.
        scan = sparse * shape.index_dim * CACHE_BYTES[formats.index] / bandwidth
        self._limit = float(shape.attend_limit)
        self._index_stream = scan / constants.index_stream
        # Kernels that score chunks in tiles were measured apart from those of decode rows: bytes are their floor alone.
        self._index_floor = scan if constants.tile_tokens else self._index_stream
        score = index_operations(1.0, index_heads, shape.index_dim) / (bf16 * constants.index_compute)
        self._index_chunk = sparse * score
        self._select = sparse * index_heads * constants.select_ns / shape.block_tokens if sparse else 0.0
        self._attend_decode = sparse * key_bytes / (bandwidth * constants.attend_stream)
        operations = attend_operations(1.0, tiled, shape.head_dim)
        self._attend_chunk = sparse * operations / (bf16 * constants.attend_compute)
        # Blocks are read apart from computing with them, or behind it (0).
        self._distinct = sparse * key_bytes / (bandwidth * constants.chunk_stream) if constants.chunk_stream else 0.0
        self._parts = sparse * shape.top_blocks * heads * shape.head_dim * constants.part_bytes / bandwidth
        self._dense_decode = dense * key_bytes / (bandwidth * DENSE_STREAM)
        self._dense_chunk = dense * attend_operations(1.0, heads, shape.head_dim) / (bf16 * DENSE_COMPUTE)
        self._tile = constants.tile_tokens
        self._row_tile = float(constants.row_tile_tokens or constants.tile_tokens)
        second = 0.0 if self._tile else SECOND_PATH_KERNELS * small_kernel_ns
        prefill = max(constants.prefill_fixed_ns, constants.decode_fixed_ns)
        self._fixed = (layers * constants.decode_fixed_ns, layers * prefill, layers * (prefill + second))
        self._lone_rows = constants.lone_rows if shape.hidden <= constants.lone_hidden else 0
        self._lone = layers * constants.lone_fixed_ns, scan / constants.lone_index_stream
        self._few = layers * constants.few_fixed_ns, scan / constants.few_index_stream
        self._decode_token = layers * constants.decode_token_ns
        self._chunk_token = layers * constants.prefill_token_ns

    def ns(self, step: StepShape) -> tuple[float, float, float, float, float]:
        """Fixed parts and those of each token, index scan, choice of blocks, attention over them, dense attention."""
        if not step.chunks:
            return self._of_rows(step)
        rows = self._of_rows(step) if step.rows and not self._tile else self._beside_chunks(step)
        _, index, select, attend, dense = rows
        for start, count in step.chunks:
            end = float(start + count)
            scored = pairs(end) - pairs(float(start))
            filled = _tiled(count, self._tile) / count if self._tile else 1.0
            index += max(scored * filled * self._index_chunk, end * self._index_floor)
            select += scored * self._select
            dense += max(scored * self._dense_chunk, end * self._dense_decode)
            if not self._limit:
                continue
            chosen = float(attended(end, self._limit) - attended(float(start), self._limit))
            attend += count * self._parts
            if self._distinct:
                attend += chosen * self._attend_chunk + distinct_keys(end, count, self._limit) * self._distinct
            else:
                # At least each distinct key is read once.
                attend += max(chosen * self._attend_chunk, min(end, chosen) * self._attend_decode)
        fixed = self._fixed[2 if step.rows else 1] + step.chunk_tokens * self._chunk_token
        fixed += step.row_tokens * (self._chunk_token if self._tile else self._decode_token)
        return fixed, index, select, attend, dense

    def _of_rows(self, step: StepShape) -> tuple[float, float, float, float, float]:
        """A step's decode rows by kernels of their own."""
        context = float(step.context_tokens)
        fixed, stream = self._fixed[0], self._index_stream
        if step.row_tokens == step.rows <= self._lone_rows and not step.chunks:
            fixed, stream = self._lone if step.rows == 1 else self._few
        # A row's index keys are read once for all of its tokens; scores are computed for each.
        scored = context * step.row_tokens / step.rows if step.rows else 0.0
        return (
            fixed + step.row_tokens * self._decode_token,
            max(context * stream, scored * self._index_chunk),
            0.0,
            step.attended_tokens * self._attend_decode,
            max(context * self._dense_decode, scored * self._dense_chunk),
        )

    def _beside_chunks(self, step: StepShape) -> tuple[float, float, float, float, float]:
        """The rows of a step with chunks, by the kernels for chunks; nothing if there are none."""
        if not step.rows:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        context = float(step.context_tokens)
        per_row = step.row_tokens / step.rows
        scored = context * per_row
        filled = self._row_tile if per_row == 1.0 else _tiled(per_row, self._tile)
        attend = step.attended_tokens * (self._attend_chunk + self._distinct / per_row) + step.row_tokens * self._parts
        return (
            0.0,
            max(context * self._index_floor, context * filled * self._index_chunk),
            scored * self._select,
            attend,
            max(context * self._dense_decode, scored * self._dense_chunk),
        )


def _tiled(tokens: float, tile: int) -> float:
    """Tokens that tiles of `tile` hold, filled or not."""
    return float(math.ceil(tokens / tile) * tile)
