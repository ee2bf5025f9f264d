"""MiniMax-M3 on a GPU: the decode step and the step of many tokens as chains of Triton kernels.

Decode kernels read quantised weights as they are, and so do experts of up to some hundred tokens; other products of
many tokens read plain weights, so that such a step unpacks a layer's into scratch first. Scratch is allocated where it
is used: inside a captured graph that is the graphs' one memory pool, where all graphs share it.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

from longturn.config import PAGE_TOKENS
from longturn.kernels.dense_attention import DensePlan, DenseScratch, DenseShape, dense_decode, dense_many_tokens
from longturn.kernels.linear_many import add_project_many, project_many
from longturn.kernels.many_tokens import ManyTokens
from longturn.kernels.moe_few import MoeScratch, moe_few_tokens
from longturn.kernels.moe_many import MoeManyScratch, moe_many_tokens, reads_packed
from longturn.kernels.moe_one import moe_one_token, pays_at_one_token
from longturn.kernels.msa_decode import msa_decode
from longturn.kernels.msa_many import MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import DecodeRows, MsaScratch, MsaShape
from longturn.kernels.packed_weights import PackedWeight
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.kernels.sampling_table import SamplePlan
from longturn.kernels.small_linear import as_operand, small_linear
from longturn.kernels.step_edges import begin_step
from longturn.kernels.step_state import Arrival, begin_decode
from longturn.kernels.unpack_weights import unpack
from longturn.models.base import KVSpec
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.models.minimax_m3_gpu_limits import LARGEST_BATCH
from longturn.models.minimax_m3_gpu_one_token import one_token_run
from longturn.models.minimax_m3_gpu_plans import GpuPlans, ModelPlans
from longturn.models.minimax_m3_gpu_weights import FeedForward, GpuLayer, GpuWeights, Weight
from longturn.ops.kv_lane import FP8


@dataclass(frozen=True)
class _Pages(PageLayout):
    """Pages in which layers with dense attention have no index key, so that layers differ in extent."""

    starts: tuple[int, ...] = ()
    """Where each layer begins, in the layout's unit."""
    stride: int = 0

    @property
    def page_stride(self) -> int:
        return self.stride

    def key_offset(self, layer: int) -> int:
        return self.starts[layer]

    def value_offset(self, layer: int) -> int:
        return self.starts[layer] + self.kv_lane + self.scale_lane

    def index_offset(self, layer: int) -> int:
        return self.starts[layer] + 2 * (self.kv_lane + self.scale_lane)


def warm_layers(c: MiniMaxM3Config) -> int:
    """First layers in which every kind of layer comes before another, and whose last one is of the kind that the model
    ends with: it prepares for the head, not for a layer."""
    kinds = list(zip(c.sparse_layers, c.moe_layers, strict=True))
    begin = 1 + max(kinds.index(kind) for kind in set(kinds))
    return next((at + 1 for at in range(begin, len(kinds)) if kinds[at] == kinds[-1]), len(kinds))


class MiniMaxM3Gpu:
    """The model and its cache on one device. Implements `executor.gpu.model.DeviceModel`."""

    def __init__(self, weights: GpuWeights, pages: int, plans: GpuPlans | None = None) -> None:
        """
        Args:
            weights: on the device, bf16 where they are plain (fp32 for the interpreter); so is the cache.
            pages: of the pool, the null page counted.
            plans: how kernels deal out their work; as they choose themselves if None.
        """
        c = weights.config
        self.config = c
        self.device = weights.head.device
        self.dtype = weights.head.dtype
        self.hidden = c.hidden
        self.vocab_size = c.vocab_size
        self.pages = pages
        self.page_bytes = weights.kv.page_bytes
        self.largest_batch = LARGEST_BATCH
        self.warm_layers = warm_layers(c)
        self.layout = _page_layout(c, weights.kv, self.dtype)
        pool = weights.kv.allocate(pages, self.device)
        self.cache = pool if self.layout.in_bytes else pool.view(self.dtype)
        self._weights = weights
        self.plans = ModelPlans(weights, self.layout, plans)
        self._pdl = self.device.type != "cpu"  # `meta` stands for a GPU
        self._inv_freq = c.rope.inv_freq.to(self.device)
        self._layers = weights.layers
        self._dense = None if all(c.sparse_layers) else DenseShape(c.heads, self.layout, c.rope.rotary_dim, c.norm_eps)
        self._one_token = one_token_run(weights.layers, self._shape(1), self.cache)

    def with_plans(self, plans: GpuPlans) -> MiniMaxM3Gpu:
        """This model, weights and cache, with other plans."""
        other = copy.copy(self)
        other.plans = ModelPlans(self._weights, self.layout, plans)
        return other

    # --- decode -----------------------------------------------------------------------------------------------------

    def decode(
        self, tokens: Tensor, positions: Tensor, page_table: Tensor, x: Tensor, max_blocks: int,
        layers: int | None = None, arrival: Arrival | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Hidden states x [B, hidden] of one new token a slot; its K, V and index key go to its page. Returns x after
        the final norm where the last kernel has made it, for `logits`.

        tokens, positions int32 [B], position -1 for padding; page_table int32 [B, P]; `max_blocks` bounds a slot's
        pages; `layers` computes only so many, for what is thrown away; `arrival` as in `DeviceModel.decode`.
        """
        c, slots = self.config, tokens.shape[0]
        shape, plans = self._shape(max_blocks), self.plans
        plan = plans.msa(slots, max_blocks)
        project, out_of = plans.projection(slots, max_blocks), plans.out(slots)
        experts, one = plans.moe_few(slots), plans.moe_one()
        rows = DecodeRows(positions, page_table, self._fp32(slots, c.head_dim), self._fp32(slots, c.head_dim))
        scratch = MsaScratch.allocate(slots, shape, plan, self.device)
        moe = MoeScratch.allocate(slots, c.experts, c.top_experts, c.hidden, c.expert_ffn, x, c.dense_ffn)
        projected = self._fp32(slots * shape.projected_width)
        attention = x.new_empty(slots, c.q_width)
        logits = self._fp32(c.experts)
        hidden = self._fp32(max((c.top_experts + 1) * c.expert_ffn, c.dense_ffn))
        pdl, eps, form = self._pdl, c.norm_eps, c.activation
        dense = self._dense
        if dense is not None:
            dense_plan = DensePlan.decode(slots, dense)
            dense_scratch = DenseScratch.allocate(slots, dense_plan.splits, dense, x)
        first = (self._weights.embedding, self._inv_freq, x, rows.cos, rows.sin)
        if arrival is None:
            begin_step(tokens, positions, *first, pdl=pdl)
        else:
            begin_decode(arrival, tokens, positions, page_table, *first)
        normed = False  # whether the layer before left norm(x) in moe.normed
        chained = self._layers[:layers]
        run = self._one_token
        if run is not None and not run.serves(slots, max_blocks, self.device):
            run = None
        if run is not None:
            chained = chained[: run.first]
        for index, layer in enumerate(chained):
            width = layer.projection.shape[0]
            qkv = projected[: slots * width].view(slots, width)
            if normed:
                # As the layer before left it: in the type of a quantised projection's operands.
                packed = isinstance(layer.projection, PackedWeight)
                small_linear(
                    as_operand(moe.normed) if packed else moe.normed, layer.projection, qkv, plan=project, pdl=pdl
                )
            else:
                small_linear(
                    x, layer.projection, qkv, norm_weight=layer.input_norm, normed=moe.normed, eps=eps, plan=project,
                    pdl=pdl,
                )  # fmt: skip
            # What quantised weights are multiplied by without a conversion in every program.
            attended = as_operand(attention) if isinstance(layer.out, PackedWeight) else attention
            if layer.heads is not None:
                msa_decode(qkv, rows, layer.heads, self.cache, index, attended, shape, plan, scratch, pdl=pdl)
            elif dense is not None:
                dense_decode(
                    qkv, rows, layer.head_norms, self.cache, index, attended, dense, dense_plan, dense_scratch,
                    pdl=pdl,
                )  # fmt: skip
            small_linear(attended, layer.out, x, residual=x, plan=out_of, pdl=pdl)
            ends = run is None and index + 1 == len(chained)
            following = None if ends else self._layers[index + 1]
            following_norm = self._weights.norm if following is None else following.input_norm
            following_packed = following is not None and isinstance(following.projection, PackedWeight)
            normed = False
            if slots == 1 and pays_at_one_token(layer.feed_forward[3]):
                moe_one_token(
                    x, *layer.feed_forward, logits, hidden, top_experts=layer.top, scaling_factor=c.routed_scale,
                    alpha=form.alpha, beta=form.beta, limit=form.limit, eps=eps, plan=one if layer.top else None,
                    release_first=project.ahead is True, pdl=pdl,
                )  # fmt: skip
            else:
                # A quantised projection of one token normalises itself, as small_linear chooses for it.
                normed = slots > 1 or not following_packed
                moe_few_tokens(
                    x, positions, *layer.feed_forward, moe, top_experts=layer.top, scaling_factor=c.routed_scale,
                    alpha=form.alpha, beta=form.beta, limit=form.limit, eps=eps, plan=experts if layer.top else None,
                    next_norm=following_norm if normed else None, next_packed=following_packed, pdl=pdl,
                )  # fmt: skip
        if run is None:
            return moe.normed if normed else None
        if layers is None or layers > run.first:
            run.decode(x, rows, shape, scaling_factor=c.routed_scale, activation=form, last=layers)
        return None

    # --- many tokens ------------------------------------------------------------------------------------------------

    def many(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, page_table: Tensor, tiles: Tensor, x: Tensor,
        max_blocks: int, layers: int | None = None,
    ) -> None:  # fmt: skip
        """Hidden states x [T, hidden] of T tokens of any rows; see `kernels.many_tokens.ManyTokens`."""
        c, count = self.config, tokens.shape[0]
        shape = self._shape(max_blocks)
        # Plans are constants of the kernels: one for all sizes up to a power of two compiles them less often.
        rounded = 1 << (count - 1).bit_length()
        plan, experts = self.plans.msa_many(count, shape), self.plans.moe_many(count)
        scratch = MsaManyScratch.allocate(count, self.pages, shape, plan, x)
        cos, sin = self._fp32(count, c.head_dim), self._fp32(count, c.head_dim)
        step = ManyTokens(positions, rows, page_table, tiles, cos, sin)
        moe = MoeManyScratch.allocate(count, c.experts, c.top_experts, c.hidden, c.expert_ffn, x, c.dense_ffn)
        attention = x.new_empty(count, c.q_width)
        projected = x.new_empty(count * shape.projected_width)
        pdl, eps, form = self._pdl, c.norm_eps, c.activation
        dense = self._dense
        if dense is not None:
            attention.zero_()  # dense attention leaves padding as it is, and later kernels read every row
            dense_plan = DensePlan.many(rounded, dense)
            dense_scratch = DenseScratch.allocate(count, dense_plan.splits, dense, x)
        plain = _Plain(self._layers, x, pdl, experts=not reads_packed(count, c.experts, c.top_experts))
        begin_step(tokens, positions, self._weights.embedding, self._inv_freq, x, cos, sin, pdl=pdl)
        for index, packed in enumerate(self._layers[:layers]):
            layer = plain.layer(packed)
            width = layer.projection.shape[0]
            qkv = projected[: count * width].view(count, width)
            # A layer's experts leave norm(x) for the next one; after the last it is of no use, but another kernel
            # without it would have to be compiled.
            following = self._layers[min(index + 1, len(self._layers) - 1)]
            own_norm = packed.input_norm if index == 0 else None
            project_many(x, own_norm, layer.projection, moe.normed, qkv, eps=eps, pdl=pdl)
            if packed.heads is not None:
                msa_many_tokens(qkv, step, packed.heads, self.cache, index, attention, shape, plan, scratch, pdl=pdl)
            elif dense is not None:
                dense_many_tokens(
                    qkv, step, packed.head_norms, self.cache, index, attention, dense, dense_plan, dense_scratch,
                    pdl=pdl,
                )  # fmt: skip
            add_project_many(x, attention, layer.out)
            moe_many_tokens(
                x, positions, *layer.feed_forward, moe, top_experts=packed.top, scaling_factor=c.routed_scale,
                alpha=form.alpha, beta=form.beta, limit=form.limit, eps=eps, plan=experts if packed.top else None,
                next_norm=following.input_norm, pdl=pdl,
            )  # fmt: skip

    # --- pages ------------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Tensor:
        """uint8 [pages, page_bytes]: the page pool's own memory."""
        return self.cache.view(torch.uint8)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of every layer and lane."""
        self.cache[target].copy_(self.cache[source])

    # --- logits -----------------------------------------------------------------------------------------------------

    def logits(self, x: Tensor, normed: Tensor | None = None) -> Tensor:
        """Final norm and head: fp32 [S, vocab] of x [S, hidden]; `normed` is what `decode` returned."""
        weights, plan = self._weights, self.plans.head(x.shape[0])
        out = self._fp32(x.shape[0], self.vocab_size)
        if normed is not None:
            small_linear(normed, weights.head, out, plan=plan, pdl=self._pdl)
            return out
        small_linear(
            x, weights.head, out, norm_weight=weights.norm, normed=x.new_empty(x.shape), eps=self.config.norm_eps,
            plan=plan, pdl=self._pdl,
        )  # fmt: skip
        return out

    def sample_plan(self, samples: int) -> SamplePlan:
        return self.plans.sample(samples)

    def _shape(self, max_blocks: int) -> MsaShape:
        c = self.config
        return MsaShape(
            c.heads, self.layout, c.rope.rotary_dim, max_blocks, c.selection.top, c.selection.init, c.selection.local,
            c.norm_eps,
        )  # fmt: skip

    def _fp32(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class _PlainLayer:
    """A layer with plain projections; see `GpuLayer`."""

    projection: Tensor
    out: Tensor
    feed_forward: FeedForward


class _Plain:
    """Scratch that holds one layer's weights unpacked; nothing where all layers are plain already."""

    def __init__(self, layers: tuple[GpuLayer, ...], like: Tensor, pdl: bool, *, experts: bool) -> None:
        """`experts`: those and the shared ones are unpacked too. (A dense layer always is: all its tokens take one
        expert's way, and each tile of them would decode it again.)"""
        self._experts = experts
        sizes = [0] * 6
        for layer in layers:
            for slot, weight in _weights_of(layer)[: self._unpacked(layer)]:
                if isinstance(weight, PackedWeight):
                    sizes[slot] = max(sizes[slot], prod(weight.shape))
        self._scratch = [like.new_empty(size) for size in sizes]
        self._pdl = pdl

    def layer(self, layer: GpuLayer) -> _PlainLayer:
        """The layer's weights; those unpacked are good until the next call."""
        projection, out, *own = (
            self._plain(slot, weight) if slot < self._unpacked(layer) else weight for slot, weight in _weights_of(layer)
        )
        assert isinstance(projection, Tensor) and isinstance(out, Tensor), "the first two are always unpacked"
        norm, router, bias = layer.feed_forward[:3]
        # Without experts nothing is read in their place, and the layer's own may stand there.
        w13, w2, shared_w13, shared_w2 = (*own, *own) if not layer.top else own
        return _PlainLayer(projection, out, (norm, router, bias, w13, w2, shared_w13, shared_w2))

    def _unpacked(self, layer: GpuLayer) -> int:
        return 6 if self._experts or not layer.top else 2

    def _plain(self, slot: int, weight: Weight) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return weight
        out = self._scratch[slot][: prod(weight.shape)].view(weight.shape)
        unpack(weight, out, pdl=self._pdl)
        return out


def _weights_of(layer: GpuLayer) -> list[tuple[int, Weight]]:
    """The weights that may be quantised, each with a number of its own: projection, out, experts if any, the rest."""
    first = 3 if layer.top else 5
    return list(enumerate((layer.projection, layer.out, *layer.feed_forward[first:])))


def _page_layout(c: MiniMaxM3Config, kv: KVSpec, dtype: torch.dtype) -> PageLayout:
    """Where the kernels find the lanes of `kv`: in elements of `dtype`, or in bytes if a lane has fewer bits."""

    def form(name: str) -> KvFormat:
        found = {lane.dtype for lanes in kv.layers for lane in lanes if lane.name == name}
        formats = {dtype: KvFormat.PLAIN, FP8: KvFormat.FP8, torch.uint8: KvFormat.NVFP4}
        if len(found) != 1 or not found <= formats.keys():
            raise ValueError(f"lanes '{name}' of {found} beside weights of {dtype}")
        return formats[found.pop()]

    plain = PageLayout(
        c.layers, c.kv_heads, c.head_dim, c.index_dim, PAGE_TOKENS, form("key"), form("index_key"), dtype.itemsize
    )
    unit = 1 if plain.in_bytes else dtype.itemsize
    sizes = [sum(lane.nbytes for lane in lanes) // unit for lanes in kv.layers]
    starts = tuple(sum(sizes[:layer]) for layer in range(c.layers))
    layout = plain if all(c.sparse_layers) else _Pages(**asdict(plain), starts=starts, stride=sum(sizes))
    offsets = tuple(layout.key_offset(layer) for layer in range(c.layers))
    if offsets != starts or layout.page_stride * unit != kv.page_bytes:
        raise ValueError(f"a page has {kv.page_bytes} bytes, not those of the layout")
    return layout
