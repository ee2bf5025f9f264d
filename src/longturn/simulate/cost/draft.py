"""What proposing tokens costs: a small dense model beside the target.

A block drafter computes all drafts of a row in one pass; an autoregressive one takes a pass a draft. Both read the
target's head for every draft. Verifying is not here: it is the target's own step over more tokens.
"""

from __future__ import annotations

from longturn.simulate.calibration import AttentionConstants, KernelFamily
from longturn.simulate.cost.comm import Collective
from longturn.simulate.cost.constants import multiply_rate
from longturn.simulate.cost.formulas import gemm_ns
from longturn.simulate.cost.options import Drafter
from longturn.simulate.formats import CACHE_BYTES, WEIGHT_BYTES, Formats
from longturn.simulate.layout import Layout, heads_per_rank
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape

KERNELS_PER_LAYER = 10
"""Launches of a dense layer: projections, rotation, cache write, attention, output, two norms, feed-forward."""
ATTEND_STREAM = 0.8
"""Of peak bandwidth, reading the draft's keys and values: assumed."""


class DraftCost:
    """Time of drafting for some rows; nothing if there is no drafter."""

    __slots__ = (
        "_by_rows",
        "_compute",
        "_drafter",
        "_fixed",
        "_head",
        "_head_compute",
        "_key",
        "_reduce",
        "_shape",
        "_stream",
    )

    def __init__(
        self,
        drafter: Drafter | None,
        shape: ModelShape,
        layout: Layout,
        formats: Formats,
        platform: Platform,
        family: KernelFamily,
        attention: AttentionConstants,
    ) -> None:
        self._drafter, self._shape = drafter, shape
        self._by_rows: dict[int, tuple[float, float]] = {}
        if drafter is None:
            return
        tp = layout.attention_tp
        bandwidth = platform.value("hbm_bandwidth") / 1e9
        projections = (2.0 * drafter.heads + 2.0 * drafter.kv_heads) * drafter.head_dim * shape.hidden
        elements = drafter.layers * (projections + 3.0 * shape.hidden * drafter.ffn) / tp
        elements += drafter.context_layers * shape.hidden * shape.hidden / tp
        peak = platform.flops(multiply_rate(platform, formats.ffn)) / 1e9
        self._stream = elements * WEIGHT_BYTES[formats.ffn] / (bandwidth * attention.weight_stream)
        self._compute = 2.0 * elements / (peak * attention.compute)
        rows = shape.vocab / tp * shape.hidden
        self._head = rows * 2.0 / (bandwidth * attention.weight_stream)
        self._head_compute = 2.0 * rows / (platform.flops("bf16") / 1e9 * attention.compute)
        key_heads = heads_per_rank(drafter.kv_heads, tp)
        self._key = drafter.layers * 2.0 * key_heads * drafter.head_dim * CACHE_BYTES[formats.cache]
        self._key /= bandwidth * ATTEND_STREAM
        self._fixed = (drafter.layers * KERNELS_PER_LAYER + 4) * family.small_kernel_ns
        self._reduce = Collective(family.all_reduce, tp, platform.value("link_bandwidth"))

    def ns(self, rows: int, context_tokens: int, chunk_tokens: int) -> float:
        """Drafting for `rows` decode rows whose contexts add up to `context_tokens`; the draft's cache is also filled
        for `chunk_tokens` tokens of prompts."""
        drafter = self._drafter
        if drafter is None:
            return 0.0
        filled = gemm_ns(self._stream, self._compute * chunk_tokens) if chunk_tokens else 0.0
        if rows == 0:
            return filled
        seen = context_tokens if drafter.window == 0 else min(context_tokens, rows * drafter.window)
        products, reduced = self._of_rows(drafter, rows)
        passes = 1 if drafter.block else drafter.drafts
        return passes * (products + (seen * self._key + reduced)) + filled

    def _of_rows(self, drafter: Drafter, rows: int) -> tuple[float, float]:
        """Matrix products and collectives of one pass; computed once for each number of rows."""
        found = self._by_rows.get(rows)
        if found is None:
            each = rows * drafter.drafts if drafter.block else rows
            message = each * self._shape.hidden * 2.0
            head = gemm_ns(self._head, self._head_compute * each)
            products = self._fixed + gemm_ns(self._stream, self._compute * each) + head
            found = self._by_rows[rows] = products, 2 * drafter.layers * self._reduce.ns(message)
        return found
