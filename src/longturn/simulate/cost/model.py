"""One step of one replica, from shape to nanoseconds, kernel by kernel.

Everything that depends on the number of tokens alone (matrix products, experts, norms, collectives) is computed once
for each padded number and kept; the rest is a few multiplications by sums that the step's shape already holds. A mixed
step is one set of matrix products over all its tokens, not a decode step plus a prefill step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longturn.simulate.cost.comm import Collective
from longturn.simulate.cost.constants import (
    ASSUMED_RMS,
    LEAST_RMS,
    attention_constants,
    expert_constants,
    multiply_rate,
)
from longturn.simulate.cost.draft import DraftCost
from longturn.simulate.cost.formulas import (
    attend_operations,
    attended,
    experts_ns,
    gemm_ns,
    index_operations,
    pairs,
)
from longturn.simulate.cost.memory import attention_elements
from longturn.simulate.cost.options import KERNELS, CostOptions
from longturn.simulate.cost.routing import RoutingTable
from longturn.simulate.cost.step import StepShape
from longturn.simulate.formats import CACHE_BYTES, WEIGHT_BYTES, Formats
from longturn.simulate.layout import Layout, check_layout, heads_per_rank
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape

DENSE_STREAM, DENSE_COMPUTE = 0.8, 0.6
"""Of peak bandwidth and BF16 peak, for dense attention: assumed, the tables have none. M3 has three such layers."""
ACTIVATION_STREAM = 0.5
"""Of peak bandwidth, for norms and sampling, whose data often sits in L2: assumed."""
NORM_BYTES = 8.0
"""Read and write of hidden state and residual, BF16, per token and hidden element."""
SAMPLING_KERNELS, SAMPLING_BYTES = 6, 16.0
"""Launches of one sampling pass, and bytes it moves per logit (FP32, four passes): assumed."""
SECOND_PATH_KERNELS = 4
"""Kernels that a layer launches in addition when a step has decode rows and chunks: their attention is separate."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where one step's time goes. All nanoseconds."""

    ns: tuple[int, ...]
    """Of each of `KERNELS`."""
    host_ns: int
    step_ns: int
    band_ns: int
    """Half-width of the uncertainty: residuals of all kernels taken to err the same way."""

    @property
    def device_ns(self) -> int:
        return sum(self.ns)

    def by_kernel(self) -> Mapping[str, int]:
        return dict(zip(KERNELS, self.ns, strict=True))


class StepCost:
    """The cost model of one replica. Pure: the same shape always costs the same; only a table of results is kept."""

    __slots__ = (
        "_attend_chunk", "_attend_decode", "_attention", "_by_samples", "_by_tokens", "_chunk_token", "_decode_token",
        "_dense_chunk", "_dense_decode", "_draft", "_experts", "_family", "_fixed", "_index_chunk",
        "_index_decode_compute", "_index_stream", "_limit", "_needs", "_relative", "_routing", "_tp_reduce",
        "_world_exchange", "formats", "layout", "options", "platform", "shape",
    )  # fmt: skip

    def __init__(
        self,
        platform: Platform,
        shape: ModelShape,
        layout: Layout,
        formats: Formats,
        options: CostOptions | None = None,
    ) -> None:
        """Raises ConfigError if the layout cannot hold the model, or the platform has no constants for the formats."""
        options = CostOptions() if options is None else options
        check_layout(layout, shape, int(platform.value("scale_up_chips")))
        self.platform, self.shape, self.layout, self.formats, self.options = platform, shape, layout, formats, options
        family = platform.family(options.family)
        self._family = family
        self._attention = attention_constants(platform, family, formats)
        self._experts = expert_constants(platform, family, formats, options.locality) if shape.moe_layers else None
        ranks = layout.expert_ep
        self._routing = (
            RoutingTable(shape.experts, shape.top_experts, ranks, options.routing) if shape.moe_layers else None
        )
        link = platform.value("link_bandwidth")
        self._tp_reduce = Collective(family.all_reduce, layout.attention_tp, link)
        self._world_exchange = Collective(family.all_to_all, layout.chips, link)
        self._draft = DraftCost(options.drafter, shape, layout, formats, platform, family, self._attention)
        self._by_tokens: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self._by_samples: dict[int, tuple[int, int]] = {}
        self._set_rates()

    def _set_rates(self) -> None:
        """Nanoseconds for one unit of each sum in a step's shape, all layers together."""
        shape, constants, formats = self.shape, self._attention, self.formats
        tp = self.layout.attention_tp
        bandwidth = self.platform.value("hbm_bandwidth") / 1e9
        bf16 = self.platform.flops("bf16") / 1e9
        heads = float(shape.heads // tp)
        groups = float(heads_per_rank(shape.kv_heads, tp))
        # A tensor-core tile holds all heads of a group: a rank with fewer of them computes as many (see fit/attention).
        tiled = max(heads, min(float(shape.heads // shape.kv_heads), 16.0))
        key_bytes = 2.0 * groups * shape.head_dim * CACHE_BYTES[formats.cache]
        sparse, dense = float(shape.sparse_layers), float(shape.dense_layers)
        index_heads = float(heads_per_rank(shape.index_heads, tp))
        index_bytes = shape.index_dim * CACHE_BYTES[formats.index]
        self._limit = float(shape.attend_limit)
        # Index keys have one head: every rank reads all of them, however attention is split.
        self._index_stream = sparse * index_bytes / (bandwidth * constants.index_stream)
        score = index_operations(1.0, index_heads, shape.index_dim) / (bf16 * constants.index_compute)
        self._index_decode_compute = self._index_chunk = sparse * score
        self._attend_decode = sparse * key_bytes / (bandwidth * constants.attend_stream)
        operations = attend_operations(1.0, tiled, shape.head_dim)
        self._attend_chunk = sparse * operations / (bf16 * constants.attend_compute)
        self._dense_decode = dense * key_bytes / (bandwidth * DENSE_STREAM)
        self._dense_chunk = dense * attend_operations(1.0, heads, shape.head_dim) / (bf16 * DENSE_COMPUTE)
        layers = float(shape.layers)
        second = SECOND_PATH_KERNELS * self._family.small_kernel_ns
        prefill = max(constants.prefill_fixed_ns, constants.decode_fixed_ns)
        self._fixed = (layers * constants.decode_fixed_ns, layers * prefill, layers * (prefill + second))
        self._decode_token = layers * constants.decode_token_ns
        self._chunk_token = layers * constants.prefill_token_ns
        scale = self.options.factors
        self._needs = tuple(float(scale.get(name, 1.0)) for name in KERNELS)
        decode, prefill_rms = constants.decode.rms, constants.prefill.rms
        attention = max(decode, prefill_rms, LEAST_RMS[constants.basis])
        known = dict.fromkeys(("projections", "attention_fixed", "index_scan", "sparse_attend"), attention)
        if not shape.sparse_layers:
            known["attention_fixed"] = max(attention, ASSUMED_RMS)  # the tables' modules choose blocks; these don't
        if self._experts is not None:
            least_experts = LEAST_RMS[self._experts.basis]
            known["experts"] = max(self._experts.tables.rms, self._experts.uneven_tables.rms, least_experts)
        self._relative = tuple(known.get(name, ASSUMED_RMS) for name in KERNELS)

    def step_ns(self, step: StepShape) -> int:
        """How long the step takes; the host's time counts where it is the longer one (or is not overlapped)."""
        if step.tokens == 0:
            return self._with_host(0, step)
        total = self._of_tokens(step)[1] + sum(self._of_samples(step.samples)) + sum(self._moving(step))
        return self._with_host(total, step)

    def breakdown(self, step: StepShape) -> Breakdown:
        """The same with its parts: `breakdown(s).step_ns == step_ns(s)`."""
        ns = self._kernels(step)
        band = round(sum(value * relative for value, relative in zip(ns, self._relative, strict=True)))
        return Breakdown(ns, self._host(step), self._with_host(sum(ns), step), band)

    def _host(self, step: StepShape) -> int:
        host, graphs = self.options.host, self.options.graphs
        return host.ns(step.rows + len(step.chunks)) + graphs.host_ns(step.tokens, self.shape.layers)

    def _with_host(self, device_ns: int, step: StepShape) -> int:
        host = self._host(step)
        return max(device_ns, host) if self.options.host.overlap else device_ns + host

    def _kernels(self, step: StepShape) -> tuple[int, ...]:
        if step.tokens == 0:
            return (0,) * len(KERNELS)
        projections, *middle = self._of_tokens(step)[0]
        fixed, index, attend, dense, draft = self._moving(step)
        return (projections, fixed, index, attend, dense, *middle, *self._of_samples(step.samples), draft)

    def _moving(self, step: StepShape) -> tuple[int, int, int, int, int]:
        """What depends on the step's contexts: fixed parts and rows, index scan, chosen blocks, dense attention,
        drafting."""
        index, attend, dense = self._context_part(step)
        fixed = self._fixed[0 if not step.chunks else (2 if step.rows else 1)]
        fixed += step.row_tokens * self._decode_token + step.chunk_tokens * self._chunk_token
        draft = self._draft.ns(step.rows, step.context_tokens, step.chunk_tokens)
        need = self._needs
        return (
            round(fixed * need[1]),
            round(index * need[2]),
            round(attend * need[3]),
            round(dense * need[4]),
            round(draft * need[13]),
        )

    def _of_tokens(self, step: StepShape) -> tuple[tuple[int, ...], int]:
        """What depends on the number of tokens alone, and its sum; computed once for each."""
        padded = self.options.graphs.padded(step.tokens)
        key = (padded, self._independent(step, padded))
        found = self._by_tokens.get(key)
        if found is None:
            needs = (self._needs[0], *self._needs[5:11])
            ns = tuple(round(value * need) for value, need in zip(self._matrices(*key), needs, strict=True))
            found = self._by_tokens[key] = ns, sum(ns)
        return found

    def _of_samples(self, samples: int) -> tuple[int, int]:
        """Head and sampling; computed once for each number of samples."""
        found = self._by_samples.get(samples)
        if found is None:
            head, sampling = self._head(samples)
            found = self._by_samples[samples] = round(head * self._needs[11]), round(sampling * self._needs[12])
        return found

    def _independent(self, step: StepShape, padded: int) -> int:
        """Tokens, of those computed, that choose experts independently of each other."""
        exponent = self.options.expert_factor_tokens
        if exponent == 1.0 or step.row_tokens <= step.rows:
            return padded
        each: float = (step.row_tokens / step.rows) ** exponent
        return max(1, min(padded, round(padded - step.row_tokens + step.rows * each)))

    def _context_part(self, step: StepShape) -> tuple[float, float, float]:
        """Index scan, attention over chosen blocks, dense attention."""
        per_row = step.row_tokens / step.rows if step.rows else 0.0
        context = float(step.context_tokens)
        # A row's index keys are read once for all of its tokens; scores are computed for each.
        index = max(context * self._index_stream, context * per_row * self._index_decode_compute)
        attend = step.attended_tokens * self._attend_decode
        dense = max(context * self._dense_decode, context * per_row * self._dense_chunk)
        for start, count in step.chunks:
            end = float(start + count)
            scored = pairs(end) - pairs(float(start))
            index += max(scored * self._index_chunk, end * self._index_stream)
            if self._limit:
                chosen = float(attended(end, self._limit) - attended(float(start), self._limit))
                # At least each distinct key is read once.
                attend += max(chosen * self._attend_chunk, min(end, chosen) * self._attend_decode)
            dense += max(scored * self._dense_chunk, end * self._dense_decode)
        return index, attend, dense

    def _matrices(self, tokens: int, independent: int) -> tuple[float, ...]:
        shape, layout = self.shape, self.layout
        small = self._family.small_kernel_ns
        moe, plain = shape.moe_layers, shape.layers - shape.moe_layers
        projections = sum(
            layers * self._gemm(attention_elements(shape, layout.attention_tp, index), tokens, self.formats.attention)
            for layers, index in ((shape.sparse_layers, True), (shape.dense_layers, False))
            if layers
        )
        touched = tokens * shape.hidden / (self.platform.value("hbm_bandwidth") / 1e9 * ACTIVATION_STREAM)
        norms = (2 * shape.layers + 1) * (small + NORM_BYTES * touched)
        router = moe * (2.0 * small + 4.0 * touched)
        shared = moe * self._ffn(shape.shared_ffn, tokens) if shape.shared_ffn else 0.0
        ffn = plain * self._ffn(shape.dense_ffn, tokens) if plain else 0.0
        experts = moe * self._expert_layer(tokens, independent) if moe else 0.0
        return projections, router, experts, shared, ffn, norms, self._exchange(tokens)

    def _gemm(self, elements: float, tokens: int, weights: str) -> float:
        """A matrix of `elements` weights on one rank, by `tokens` tokens."""
        constants = self._attention
        bandwidth = self.platform.value("hbm_bandwidth") / 1e9
        peak = self.platform.flops(multiply_rate(self.platform, weights)) / 1e9
        return gemm_ns(
            elements * WEIGHT_BYTES[weights] / (bandwidth * constants.weight_stream),
            2.0 * elements * tokens / (peak * constants.compute),
        )

    def _ffn(self, width: int, tokens: int) -> float:
        """Two matrices and the activation between them."""
        elements = 3.0 * self.shape.hidden * width / self.layout.attention_tp
        return self._gemm(elements, tokens, self.formats.ffn) + 3.0 * self._family.small_kernel_ns

    def _expert_layer(self, tokens: int, independent: int) -> float:
        """Routed experts on the slowest rank."""
        shape, layout, constants = self.shape, self.layout, self._experts
        assert constants is not None and self._routing is not None
        everywhere = tokens * layout.attention_dp
        load = self._routing.slowest(independent * layout.attention_dp)
        choices = load.choices * tokens / independent
        bandwidth = self.platform.value("hbm_bandwidth") / 1e9
        elements = 3.0 * shape.hidden * shape.expert_ffn / layout.expert_tp
        choices = min(choices, float(everywhere * shape.top_experts))
        return experts_ns(
            load.experts * elements * WEIGHT_BYTES[self.formats.experts] / bandwidth,
            2.0 * choices * elements / (self.platform.flops(constants.rate) / 1e9),
            choices * shape.hidden * constants.activation_bytes / bandwidth,
            fixed_ns=constants.fixed_ns,
            stream=constants.stream,
            stream_exponent=constants.stream_exponent,
            compute=constants.compute,
            sharpness=constants.sharpness,
            uneven=constants.uneven * self.options.routing.unevenness,
        )

    def _exchange(self, tokens: int) -> float:
        """Collectives of all layers: after attention and after the feed-forward; to experts and back under data
        parallel attention."""
        shape, layout = self.shape, self.layout
        message = tokens * shape.hidden * 2.0
        if layout.attention_dp == 1:
            return (2 * shape.layers + 1) * self._tp_reduce.ns(message)
        after_attention = shape.layers * self._tp_reduce.ns(message)
        sent = min(shape.top_experts, layout.expert_ep) * message
        there = sent * WEIGHT_BYTES[self.formats.experts] / 2.0
        return after_attention + shape.moe_layers * (self._world_exchange.ns(there) + self._world_exchange.ns(sent))

    def _head(self, samples: int) -> tuple[float, float]:
        """Logits of `samples` positions, and drawing tokens from them."""
        if samples == 0:
            return 0.0, 0.0
        shape, layout = self.shape, self.layout
        rows = shape.vocab / layout.attention_tp
        head = self._gemm(rows * shape.hidden, samples, "bf16") + self._family.small_kernel_ns
        head += self._tp_reduce.ns(samples * rows * 2.0)
        moved = samples * shape.vocab * SAMPLING_BYTES / (self.platform.value("hbm_bandwidth") / 1e9)
        return head, SAMPLING_KERNELS * self._family.small_kernel_ns + moved / ACTIVATION_STREAM
