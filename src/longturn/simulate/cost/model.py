"""One step of one replica, from shape to nanoseconds, kernel by kernel.

Everything that depends on the number of tokens alone (matrix products, experts, norms, collectives) is computed once
for each padded number and kept; the rest is a few multiplications by sums that the step's shape already holds. A mixed
step is one set of matrix products over all its tokens, not a decode step plus a prefill step.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from longturn.simulate.cost.attention import AttentionCost
from longturn.simulate.cost.comm import Collective
from longturn.simulate.cost.constants import (
    ASSUMED_RMS,
    LEAST_RMS,
    attention_constants,
    expert_constants,
    multiply_rate,
)
from longturn.simulate.cost.draft import DraftCost
from longturn.simulate.cost.formulas import experts_ns, gemm_ns
from longturn.simulate.cost.memory import attention_elements
from longturn.simulate.cost.options import KERNELS, CostOptions
from longturn.simulate.cost.routing import RoutingTable
from longturn.simulate.cost.step import StepShape
from longturn.simulate.formats import WEIGHT_BYTES, Formats
from longturn.simulate.layout import Layout, check_layout
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape

ACTIVATION_STREAM = 0.5
"""Of peak bandwidth, for norms and sampling, whose data often sits in L2: assumed."""
NORM_BYTES = 8.0
"""Read and write of hidden state and residual, BF16, per token and hidden element."""
SAMPLING_KERNELS, SAMPLING_BYTES = 6, 16.0
"""Launches of one sampling pass, and bytes it moves per logit (FP32, four passes): assumed."""


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
        "_attention", "_by_samples", "_by_tokens", "_contexts", "_draft", "_experts", "_family", "_needs", "_relative",
        "_routing", "_tp_reduce", "_world_exchange", "formats", "layout", "options", "platform", "shape",
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
        self._contexts = AttentionCost(self._attention, platform, shape, layout, formats, family.small_kernel_ns)
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
        self._needs = tuple(float(options.factors.get(name, 1.0)) for name in KERNELS)
        self._relative = self._uncertainty()

    def _uncertainty(self) -> tuple[float, ...]:
        """Relative, of each kernel."""
        shape, constants = self.shape, self._attention
        decode, prefill_rms = constants.decode.rms, constants.prefill.rms
        attention = max(decode, prefill_rms, LEAST_RMS[constants.basis])
        measured = ("projections", "attention_fixed", "index_scan", "block_select", "sparse_attend")
        known = dict.fromkeys(measured, attention)
        if not shape.sparse_layers:
            known["attention_fixed"] = max(attention, ASSUMED_RMS)  # the tables' modules choose blocks; these don't
        if self._experts is not None:
            least_experts = LEAST_RMS[self._experts.basis]
            known["experts"] = max(self._experts.tables.rms, self._experts.uneven_tables.rms, least_experts)
        return tuple(known.get(name, ASSUMED_RMS) for name in KERNELS)

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
        rows = host.ns(step.rows + len(step.chunks))
        if step.chunks and self._family.chunk_sizes and step.tokens <= self._family.chunk_sizes[-1]:
            return rows
        return rows + graphs.host_ns(step.tokens, self.shape.layers)

    def _padded(self, step: StepShape) -> int:
        """Tokens that are computed for those of the step."""
        sizes = self._family.chunk_sizes
        if not step.chunks or not sizes:
            return self.options.graphs.padded(step.tokens)
        at = bisect.bisect_left(sizes, step.tokens)
        return sizes[at] if at < len(sizes) else step.tokens

    def _with_host(self, device_ns: int, step: StepShape) -> int:
        host = self._host(step)
        return max(device_ns, host) if self.options.host.overlap else device_ns + host

    def _kernels(self, step: StepShape) -> tuple[int, ...]:
        if step.tokens == 0:
            return (0,) * len(KERNELS)
        projections, *middle = self._of_tokens(step)[0]
        *moving, draft = self._moving(step)
        return (projections, *moving, *middle, *self._of_samples(step.samples), draft)

    def _moving(self, step: StepShape) -> tuple[int, int, int, int, int, int]:
        """What depends on the step's contexts: fixed parts and rows, index scan, choice of blocks, attention over them,
        dense attention, drafting."""
        fixed, index, select, attend, dense = self._contexts.ns(step)
        draft = self._draft.ns(step.rows, step.context_tokens, step.chunk_tokens)
        need = self._needs
        return (
            round(fixed * need[1]),
            round(index * need[2]),
            round(select * need[3]),
            round(attend * need[4]),
            round(dense * need[5]),
            round(draft * need[14]),
        )

    def _of_tokens(self, step: StepShape) -> tuple[tuple[int, ...], int]:
        """What depends on the number of tokens alone, and its sum; computed once for each."""
        padded = self._padded(step)
        key = (padded, self._independent(step, padded))
        found = self._by_tokens.get(key)
        if found is None:
            needs = (self._needs[0], *self._needs[6:12])
            ns = tuple(round(value * need) for value, need in zip(self._matrices(*key), needs, strict=True))
            found = self._by_tokens[key] = ns, sum(ns)
        return found

    def _of_samples(self, samples: int) -> tuple[int, int]:
        """Head and sampling; computed once for each number of samples."""
        found = self._by_samples.get(samples)
        if found is None:
            head, sampling = self._head(samples)
            found = self._by_samples[samples] = round(head * self._needs[12]), round(sampling * self._needs[13])
        return found

    def _independent(self, step: StepShape, padded: int) -> int:
        """Tokens, of those computed, that choose experts independently of each other."""
        exponent = self.options.expert_factor_tokens
        if exponent == 1.0 or step.row_tokens <= step.rows:
            return padded
        each: float = (step.row_tokens / step.rows) ** exponent
        return max(1, min(padded, round(padded - step.row_tokens + step.rows * each)))

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
