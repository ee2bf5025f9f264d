"""MiniMax-M3's weights as the GPU kernels take them: plain, or in 4 and 8 bits.

A loaded model (`models.minimax_m3`) has the kernels' layout already; experts that a checkpoint keeps quantised are
rearranged once, as `kernels.packed_weights` says. Benchmarks draw random ones on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longturn.errors import ModelError
from longturn.kernels.msa_plan import MsaNorms
from longturn.kernels.packed_weights import (
    PackedWeight,
    WeightFormat,
    join_rows,
    pack_mxfp8,
    pack_nvfp4,
    random_packed,
)
from longturn.models.base import KVSpec
from longturn.models.make_checkpoint import BIAS_STD, NORM_STD
from longturn.models.minimax_m3 import (
    Experts,
    MiniMaxM3,
    MiniMaxM3Layer,
    MlpWeights,
    MoeWeights,
    PackedExperts,
    StackedExperts,
)
from longturn.models.minimax_m3 import PackedWeight as PublishedWeight
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.ops.nvfp4 import Nvfp4Weight

Weight = Tensor | PackedWeight
FeedForward = tuple[Tensor, Tensor, Tensor, Weight, Weight, Weight, Weight]


@dataclass(frozen=True)
class GpuLayer:
    """One layer's weights in the order of the kernels' arguments."""

    input_norm: Tensor
    projection: Weight
    head_norms: tuple[Tensor, Tensor]
    """Of query and key."""
    heads: MsaNorms | None
    """None: the layer has dense attention."""
    out: Weight
    feed_forward: FeedForward
    """Norm, router, bias, w13, w2, shared w13, shared w2; of a dense layer the last two are its own."""
    top: int
    """Experts a token; 0 for a dense layer."""


@dataclass(frozen=True)
class GpuWeights:
    """All weights on one device."""

    config: MiniMaxM3Config
    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: Tensor
    kv: KVSpec

    @staticmethod
    def of(model: MiniMaxM3, device: torch.device | str | None = None) -> GpuWeights:
        """The weights of a loaded model, moved to `device` layer by layer; where they are if None."""
        where = torch.device(device or model.head.device)
        c = model.config
        no_router = torch.zeros(c.experts, 1, device=where), torch.zeros(c.experts, device=where)
        embedding = model.embedding.to(where)
        head = embedding if c.tied else model.head.to(where)
        norms = _NormsOf(where, head.dtype)
        layers = tuple(_layer(layer, c.top_experts, no_router, norms) for layer in model.layers)
        return GpuWeights(c, embedding, layers, norms(model.norm), head, model.kv)


@dataclass(frozen=True)
class _NormsOf:
    """Puts weights of norms where they belong, in the model's type if that holds them exactly, as it does where a
    checkpoint has them in it: every program of a one-token kernel reads all of them."""

    where: torch.device
    dtype: torch.dtype

    def __call__(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.where)
        narrow = weight.to(self.dtype)
        return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _layer(layer: MiniMaxM3Layer, top: int, no_router: tuple[Tensor, Tensor], norms: _NormsOf) -> GpuLayer:
    a, f, where = layer.attention, layer.mlp, norms.where
    head_norms = norms(a.q_norm), norms(a.k_norm)
    heads = None
    if a.index_q_norm is not None and a.index_k_norm is not None:
        heads = MsaNorms(*head_norms, norms(a.index_q_norm), norms(a.index_k_norm))
    norm = norms(layer.mlp_norm)
    weights: FeedForward
    if isinstance(f, MlpWeights):
        gate_up, down = f.gate_up.to(where), f.down.to(where)
        top, weights = 0, (norm, *no_router, gate_up[None], down[None], gate_up, down)
    else:
        assert isinstance(f, MoeWeights) and f.shared is not None, "why_not_on_gpu has looked"
        routed = _experts(f.experts, where)
        shared = f.shared.gate_up.to(where), f.shared.down.to(where)
        weights = (norm, f.gate.to(where), f.bias.to(where), *routed, *shared)
    projection, out = a.projection.to(where), a.out.to(where)
    return GpuLayer(norms(layer.attention_norm), projection, head_norms, heads, out, weights, top)


def _experts(experts: Experts, where: torch.device) -> tuple[Weight, Weight]:
    if isinstance(experts, StackedExperts):
        return experts.gate_up.to(where), experts.down.to(where)
    assert isinstance(experts, PackedExperts)
    pairs = zip(experts.gate, experts.up, strict=True)
    if len({type(weight) for part in (experts.gate, experts.up, experts.down) for weight in part}) > 1:
        raise ModelError("experts of several formats in one layer are not supported on a GPU")
    w13 = _stack([join_rows([_packed(gate, where), _packed(up, where)]) for gate, up in pairs])
    return w13, _stack([_packed(down, where) for down in experts.down])


def _packed(weight: PublishedWeight, where: torch.device) -> PackedWeight:
    """One published matrix as kernels read it; rearranged where it is going, which is faster there."""
    if isinstance(weight, Nvfp4Weight):
        scale = weight.global_scale.to(where, torch.float32).reshape(())
        factor = 1.0 / scale if weight.global_divides else scale
        return pack_nvfp4(weight.packed.to(where), weight.scales.to(where), factor)
    return pack_mxfp8(weight.values.to(where), weight.scales.to(where))


def _stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Matrices of one format and shape, one an expert."""
    stacked = PackedWeight.allocate(weights[0].format, len(weights), *weights[0].shape, device=weights[0].words.device)
    for number, weight in enumerate(weights):
        stacked[number].copy_(weight)
    return stacked


def random_gpu_weights(
    c: MiniMaxM3Config,
    *,
    device: torch.device | str,
    experts: WeightFormat = WeightFormat.PLAIN,
    others: WeightFormat = WeightFormat.PLAIN,
    kv_dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
) -> GpuWeights:
    """Random weights for a cache of `kv_dtype`, bf16 where they are plain; embedding and head always are. Scales are
    those of `make_checkpoint`, so that activations stay near one and routing is near even. On `meta` only shapes are
    made. `layers`: only the first, of a cache for all."""
    # Drawing numbers on `meta` would load half of PyTorch's compiler, five seconds where its files have to be read.
    shapes_alone = torch.device(device).type == "meta"
    if not shapes_alone:
        torch.manual_seed(seed)
    branch = (2 * c.layers) ** -0.5

    def weight(form: WeightFormat, *shape: int, factor: float = 1.0) -> Weight:
        if shapes_alone and form is not WeightFormat.PLAIN:
            return PackedWeight.allocate(form, *shape, device=device)
        if shapes_alone:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        made = random_packed(form, *shape, scale=factor * shape[-1] ** -0.5, device=device)
        return made.words if form is WeightFormat.PLAIN else made

    def exact(*shape: int, std: float) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device=device)
        return out if shapes_alone else out.normal_(0.0, std)

    def norm(width: int) -> Tensor:
        out = torch.empty(width, dtype=torch.bfloat16, device=device)
        return out if shapes_alone else out.normal_(0.0, NORM_STD)

    def mlp(form: WeightFormat, width: int, *lead: int) -> tuple[Weight, Weight]:
        return weight(form, *lead, 2 * width, c.hidden), weight(form, *lead, c.hidden, width, factor=branch)

    def layer(sparse: bool, routed: bool) -> GpuLayer:
        rows = c.q_width + 2 * c.kv_width + (c.index_q_width + c.index_dim if sparse else 0)
        heads = norm(c.head_dim), norm(c.head_dim)
        norms = MsaNorms(*heads, norm(c.index_dim), norm(c.index_dim)) if sparse else None
        router = exact(c.experts, c.hidden, std=1.0)
        if not shapes_alone:
            router /= router.norm(dim=-1, keepdim=True)
        own = mlp(others, c.shared_ffn if routed else c.dense_ffn)
        theirs = mlp(experts, c.expert_ffn, c.experts) if routed else own
        feed_forward = (norm(c.hidden), router, exact(c.experts, std=BIAS_STD), *theirs, *own)
        return GpuLayer(
            norm(c.hidden), weight(others, rows, c.hidden), heads, norms,
            weight(others, c.hidden, c.q_width, factor=branch), feed_forward, c.top_experts if routed else 0,
        )  # fmt: skip

    kinds = list(zip(c.sparse_layers, c.moe_layers, strict=True))[:layers]
    made = tuple(layer(*kind) for kind in kinds)
    embedding, head = (torch.empty(c.vocab_size, c.hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
    if not shapes_alone:
        embedding.normal_()
        head.normal_(0.0, c.hidden**-0.5)
    return GpuWeights(c, embedding, made, norm(c.hidden), head, minimax_m3_kv(c, kv_dtype))
