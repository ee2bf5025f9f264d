"""A whole decode step of MiniMax-M3's shape on random weights: the kernels of `longturn.kernels` chained in one CUDA
graph.

This is a measuring stand for kernels and the gaps between them, not the executor: rows, page tables and weights are
fixed at construction, and sampling is greedy. `reference_step` computes the same step in fp32 with the references of
`longturn.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpu_greedy import greedy_step
from longturn.kernels.moe_few import MoePlan, MoeScratch, moe_few_tokens
from longturn.kernels.moe_one import MoeOnePlan, moe_one_token, pays_at_one_token
from longturn.kernels.msa_decode import msa_decode
from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaPlan, MsaScratch, MsaShape
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed, random_packed
from longturn.kernels.pages import PageLayout
from longturn.kernels.small_linear import LinearPlan, as_operand, small_linear
from longturn.kernels.step_edges import begin_step
from longturn.models.minimax_m3_gpu_plans import head_plan
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention

HEAD_DIM, ROTARY_DIM, EXPERTS, TOP_EXPERTS, SCALING, VOCAB = 128, 64, 128, 4, 2.0, 200_064
STREAM_BYTES_PER_S = 4.4e12
"""Read-only streaming rate of an H200, as measured."""


@dataclass(frozen=True)
class Preset:
    """Widths of a model; the first layer's MLP is dense."""

    hidden: int
    q_heads: int
    inter: int
    dense: int
    layers: int
    kv_heads: int = 4

    @property
    def projected(self) -> int:
        return (self.q_heads + 3 * self.kv_heads + 1) * HEAD_DIM


PRESETS = {
    "mini60": Preset(hidden=2048, q_heads=32, inter=512, dense=6144, layers=60),
    "slice8": Preset(hidden=6144, q_heads=64, inter=3072, dense=12288, layers=8),
}


@dataclass(frozen=True)
class Formats:
    """Of routed experts, and of projections, dense and shared MLPs; the head stays bf16 and the router fp32."""

    experts: WeightFormat = WeightFormat.PLAIN
    others: WeightFormat = WeightFormat.PLAIN


VALUE_BYTES = {WeightFormat.PLAIN: 2.0, WeightFormat.MXFP8: 1 + 1 / 32, WeightFormat.NVFP4: 0.5 + 1 / 16}


def floor_ms(p: Preset, rows: int, context: int, formats: Formats | None = None) -> float:
    """Bytes one step must read, at the streaming bandwidth: uniform routing, cache and index key in bf16."""
    formats = formats or Formats()
    distinct = EXPERTS * (1 - (1 - TOP_EXPERTS / EXPERTS) ** rows)
    moe_layers = p.layers - 1
    expert_values = 3 * p.hidden * p.inter
    others = p.layers * (p.projected + p.q_heads * HEAD_DIM) * p.hidden + 3 * p.hidden * p.dense
    others += moe_layers * expert_values
    weights = VALUE_BYTES[formats.others] * others + 2 * VOCAB * p.hidden
    weights += moe_layers * (VALUE_BYTES[formats.experts] * distinct * expert_values + 4 * EXPERTS * p.hidden)
    blocks = min(16, context // 128 + 1)
    cache = p.layers * rows * (context * HEAD_DIM + blocks * 128 * p.kv_heads * 2 * HEAD_DIM)
    return (weights + 2 * cache) / STREAM_BYTES_PER_S * 1e3


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; a dense layer has `w13` and `w2` of one expert, which are the shared ones (not stacked if
    quantised: decode kernels do not read them)."""

    input_norm: Tensor
    qkv: Tensor | PackedWeight
    heads: MsaNorms
    o: Tensor | PackedWeight
    post_norm: Tensor
    router: Tensor
    bias: Tensor
    w13: Tensor | PackedWeight
    w2: Tensor | PackedWeight
    shared_w13: Tensor | PackedWeight
    shared_w2: Tensor | PackedWeight
    top: int


@dataclass(frozen=True)
class Tuning:
    """What a sweep varies."""

    pdl: bool = True
    no_pdl: frozenset[str] = frozenset()
    qkv: LinearPlan | None = None
    o: LinearPlan = field(default_factory=LinearPlan)
    head: LinearPlan | None = None
    moe_one: MoeOnePlan | None = None
    msa: MsaPlan | None = None
    moe: MoePlan | None = None
    next_norm: bool = True
    """Whether the last kernel of the experts of several tokens normalises for the next projection."""
    few_at_one: bool | None = None
    """Whether one token takes the experts' kernels for several; None leaves it to the weights' format."""
    parts: frozenset[str] = frozenset({"qkv", "msa", "o", "moe", "head"})

    def uses_pdl(self, part: str) -> bool:
        return self.pdl and part not in self.no_pdl


def random_weight(*shape: int, scale: float, device: str) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0.0, scale)


def random_layer(p: Preset, dense: bool, device: str = "cuda", formats: Formats | None = None) -> Layer:
    """Weights whose products keep unit size; the router's logits spread enough that routing is near uniform."""
    formats = formats or Formats()
    h, i = p.hidden, p.dense if dense else p.inter
    attention = p.q_heads * HEAD_DIM

    def norm(n: int) -> Tensor:
        return random_weight(n, scale=0.1, device=device)

    def matrix(form: WeightFormat, *shape: int, scale: float) -> Tensor | PackedWeight:
        made = random_packed(form, *shape, scale=scale, device=device)
        return made.words if form is WeightFormat.PLAIN else made

    def as_stack(weight: Tensor | PackedWeight) -> Tensor | PackedWeight:
        return weight[None] if isinstance(weight, Tensor) else weight

    router = torch.randn(EXPERTS, h, device=device) * h**-0.5
    s13 = matrix(formats.others, 2 * i, h, scale=h**-0.5)
    s2 = matrix(formats.others, h, i, scale=0.3 * i**-0.5)
    return Layer(
        norm(h), matrix(formats.others, p.projected, h, scale=h**-0.5),
        MsaNorms(*(norm(HEAD_DIM) for _ in range(4))),
        matrix(formats.others, h, attention, scale=0.3 * attention**-0.5), norm(h),
        router, torch.randn(EXPERTS, device=device) * 0.01,
        as_stack(s13) if dense else matrix(formats.experts, EXPERTS, 2 * i, h, scale=h**-0.5),
        as_stack(s2) if dense else matrix(formats.experts, EXPERTS, h, i, scale=0.3 * i**-0.5),
        s13, s2, 0 if dense else TOP_EXPERTS,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    preset: Preset
    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Tensor
    inv_freq: Tensor

    @staticmethod
    def random(p: Preset, device: str = "cuda", formats: Formats | None = None) -> Model:
        layers = tuple(random_layer(p, n == 0, device, formats) for n in range(p.layers))
        inv_freq = 5e6 ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32, device=device) / ROTARY_DIM)
        return Model(
            p, random_weight(VOCAB, p.hidden, scale=1.0, device=device), layers,
            random_weight(p.hidden, scale=0.1, device=device),
            random_weight(VOCAB, p.hidden, scale=p.hidden**-0.5, device=device), inv_freq,
        )  # fmt: skip


class DecodeStack:
    """Rows at fixed contexts, and the buffers and graph of their decode step."""

    def __init__(self, model: Model, cache: Tensor, contexts: list[int], tuning: Tuning | None = None) -> None:
        p, rows = model.preset, len(contexts)
        device = model.head.device
        self.model, self.cache, self.tuning = model, cache, tuning or Tuning()
        self.layout = PageLayout(p.layers, p.kv_heads)
        self.blocks = max(contexts) // 128 + 1
        self.shape = MsaShape(p.q_heads, self.layout, ROTARY_DIM, max_blocks=self.blocks)
        self.plan = self.tuning.msa or MsaPlan.default(rows, self.blocks)
        self.qkv_plan = self.tuning.qkv or LinearPlan.before_attention(rows, self.blocks)
        pages = cache.numel() // self.layout.page_stride
        table = torch.randperm(pages - 1)[: rows * self.blocks].to(torch.int32) + 1
        if table.numel() < rows * self.blocks:
            raise ValueError(f"{pages} pages are too few for {rows} rows of {self.blocks} blocks")
        self.start = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.positions = self.start.clone()
        self.tokens = torch.randint(VOCAB, (rows,), dtype=torch.int32, device=device)
        fp32 = {"dtype": torch.float32, "device": device}
        self.x = torch.empty(rows, p.hidden, dtype=torch.bfloat16, device=device)
        self.projected = torch.full((rows, p.projected), float("nan"), **fp32)
        self.attention = torch.full((rows, p.q_heads * HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
        if as_packed(model.layers[0].o).format is not WeightFormat.PLAIN:
            self.attention = as_operand(self.attention)
        self.logits = torch.full((rows, VOCAB), float("nan"), **fp32)
        self.values, self.indices = (
            torch.empty(rows, 64, **fp32),
            torch.empty(rows, 64, dtype=torch.int32, device=device),
        )
        self.expert_logits, self.hidden = (
            torch.empty(EXPERTS, **fp32),
            torch.full((5 * max(p.inter, p.dense),), float("nan"), **fp32),
        )
        self.rows = DecodeRows(
            self.positions,
            table.view(rows, self.blocks).to(device),
            torch.empty(rows, HEAD_DIM, **fp32),
            torch.empty(rows, HEAD_DIM, **fp32),
        )
        self.msa = MsaScratch.allocate(rows, self.shape, self.plan, device)
        self.moe = MoeScratch.allocate(rows, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, self.x, p.dense)
        self.graph = torch.cuda.CUDAGraph()

    def launch(self, finish: bool = True) -> None:
        """One decode step, kernel by kernel; `finish` chooses the next token and moves every row on by one."""
        t, m = self.tuning, self.model
        begin_step(
            self.tokens, self.positions, m.embedding, m.inv_freq, self.x, self.rows.cos, self.rows.sin, pdl=t.pdl
        )
        for n, layer in enumerate(m.layers):
            self._layer(n, layer)
        if "head" in t.parts:
            head = t.head or head_plan(len(self.start), m.preset.hidden)
            self._project(len(m.layers) - 1, m.head, self.logits, m.final_norm, head, t.pdl)
        if finish:
            greedy_step(self.logits, self.values, self.indices, self.tokens, self.positions, pdl=t.pdl)

    def _is_few(self, layer: Layer) -> bool:
        few = self.tuning.few_at_one
        return len(self.start) > 1 or (not pays_at_one_token(layer.w13) if few is None else few)

    def _next_norm(self, n: int) -> Tensor | None:
        """Norm of the projection after layer `n`, if that layer's experts end with it."""
        m = self.model
        if n < 0 or not self.tuning.next_norm or not self._is_few(m.layers[n]):
            return None
        if n + 1 == len(m.layers):
            return m.final_norm
        following = m.layers[n + 1]
        return following.input_norm if len(self.start) > 1 or isinstance(following.qkv, Tensor) else None

    def _next_packed(self, n: int) -> bool:
        return n + 1 < len(self.model.layers) and isinstance(self.model.layers[n + 1].qkv, PackedWeight)

    def _project(
        self, n: int, weight: Tensor | PackedWeight, out: Tensor, norm: Tensor, plan: LinearPlan, pdl: bool
    ) -> None:
        """Normalise and project the hidden state after layer `n`."""
        if self._next_norm(n) is not None:
            normed = as_operand(self.moe.normed) if isinstance(weight, PackedWeight) else self.moe.normed
            small_linear(normed, weight, out, plan=plan, pdl=pdl)
        else:
            small_linear(self.x, weight, out, norm_weight=norm, normed=self.moe.normed, plan=plan, pdl=pdl)

    def _layer(self, n: int, layer: Layer) -> None:
        t = self.tuning
        if "qkv" in t.parts:
            self._project(n - 1, layer.qkv, self.projected, layer.input_norm, self.qkv_plan, t.uses_pdl("qkv"))
        if "msa" in t.parts:
            msa_decode(
                self.projected,
                self.rows,
                layer.heads,
                self.cache,
                n,
                self.attention,
                self.shape,
                self.plan,
                self.msa,
                pdl=t.uses_pdl("msa"),
            )
        if "o" in t.parts:
            small_linear(self.attention, layer.o, self.x, residual=self.x, plan=t.o, pdl=t.uses_pdl("o"))
        if "moe" in t.parts:
            ffn = (layer.post_norm, layer.router, layer.bias, layer.w13, layer.w2, layer.shared_w13, layer.shared_w2)
            if not self._is_few(layer):
                moe_one_token(
                    self.x, *ffn, self.expert_logits, self.hidden, top_experts=layer.top, scaling_factor=SCALING,
                    plan=t.moe_one, release_first=self.qkv_plan.ahead is True, pdl=t.uses_pdl("moe"),
                )  # fmt: skip
            else:
                moe_few_tokens(
                    self.x,
                    self.positions,
                    *ffn,
                    self.moe,
                    top_experts=layer.top,
                    scaling_factor=SCALING,
                    plan=t.moe,
                    next_norm=self._next_norm(n),
                    next_packed=self._next_packed(n),
                    pdl=t.uses_pdl("moe"),
                )

    def capture(self) -> None:
        """Compile by one eager step, then record the step as a graph. Positions are back at their start afterwards."""
        self.launch()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.launch()
        self.reset()

    def reset(self) -> None:
        self.positions.copy_(self.start)

    def time_ms(self, steps: int = 30, repeats: int = 3) -> float:
        """Median over `repeats` of the mean time of a replayed step. steps + 3 must stay inside a row's last page."""
        times = []
        for _ in range(repeats):
            self.reset()
            for _ in range(3):
                self.graph.replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(steps):
                self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / steps)
        return sorted(times)[len(times) // 2]


def rotated(heads: Tensor, angle: Tensor) -> Tensor:
    """Half-rotated heads [H, d], the first 2 * len(angle) columns turned."""
    half = angle.shape[0]
    a, b = heads[:, :half], heads[:, half : 2 * half]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), heads[:, 2 * half :]), 1)


@dataclass(frozen=True)
class _Dequantised:
    """Stacked experts as the reference indexes them, one in fp32 at a time."""

    weight: PackedWeight

    def __getitem__(self, expert: int) -> Tensor:
        return self.weight[expert].dequantised()


def dense(weight: Tensor | PackedWeight) -> Tensor:
    """A matrix in fp32."""
    return as_packed(weight).dequantised()


def reference_step(stack: DecodeStack) -> tuple[Tensor, Tensor]:
    """Logits of the step in fp32 from a copy of the cache, and each row's narrowest margin between the last expert
    chosen and the first not chosen: a row with a near tie may rightly go the other way. Rows at -1 give NaN and margin
    0.

    The residual stream and the attention output are rounded to bf16 where the step stores them: without that, a near
    tie of the router now and then falls the other way, which says nothing about the kernels.
    """

    def rounded(value: Tensor) -> Tensor:
        return value.to(torch.bfloat16).float()

    m, layout = stack.model, stack.layout
    p, kv = m.preset, m.preset.kv_heads
    cache = stack.cache.clone().view(-1, layout.page_stride)
    form = SwigluOai()
    out = torch.full_like(stack.logits, float("nan"))
    margin = torch.zeros(len(stack.positions), device=cache.device)
    for r, position in enumerate(stack.positions.tolist()):
        if position < 0:
            continue
        margin[r] = 1.0
        at = torch.tensor([position], device=cache.device)
        pages = stack.rows.page_table[r, : position // 128 + 1]
        x = m.embedding[stack.tokens[r].long()].float()[None]
        for n, layer in enumerate(m.layers):
            projected = gemma_rms_norm(x, layer.input_norm, 1e-6) @ dense(layer.qkv).T
            q, k, v, iq, ik = projected.view(-1, HEAD_DIM).split((p.q_heads, kv, kv, kv, 1))
            norms = (layer.heads.query, layer.heads.key, layer.heads.index_query, layer.heads.index_key)
            q, k, iq, ik = (
                rotated(gemma_rms_norm(y, w, 1e-6), position * m.inv_freq)[None]
                for y, w in zip((q, k, iq, ik), norms, strict=True)
            )
            begin = (layout.key_offset(n), layout.value_offset(n), layout.index_offset(n))
            lanes = [
                cache[:, b : b + heads * 128 * HEAD_DIM].view(-1, heads, 128, HEAD_DIM)
                for b, heads in zip(begin, (kv, kv, 1), strict=True)
            ]
            for lane, new in zip(lanes, (k[0], v, ik[0]), strict=True):
                lane[pages[-1].long(), :, position % 128] = new.to(cache.dtype)
            keys, values, index = (gather_pages(lane, pages) for lane in lanes)
            scores = index_block_scores(iq, index[:, 0], at)
            attended = sparse_attention(q, keys, values, at, select_blocks(scores, at, 16), HEAD_DIM**-0.5)
            x = rounded(x + rounded(attended.flatten()[None]) @ dense(layer.o).T)
            y = gemma_rms_norm(x, layer.post_norm, 1e-6)
            if layer.top:
                order = (torch.sigmoid(y @ layer.router.T) + layer.bias).sort(descending=True).values[0]
                margin[r] = torch.minimum(margin[r], order[layer.top - 1] - order[layer.top])
                routing = route(y, layer.router, layer.bias, layer.top, SCALING)
                w13, w2 = _Dequantised(as_packed(layer.w13)), _Dequantised(as_packed(layer.w2))
                x = rounded(x + moe(y, routing, w13, w2, dense(layer.shared_w13), dense(layer.shared_w2), form))
            else:
                x = rounded(x + expert(y, dense(layer.shared_w13), dense(layer.shared_w2), form))
        out[r] = (gemma_rms_norm(x, m.final_norm, 1e-6) @ m.head.float().T)[0]
    return out, margin


def random_cache(p: Preset, pages: int, device: str = "cuda") -> Tensor:
    """A flat cache of random keys and values, its null page poisoned."""
    layout = PageLayout(p.layers, p.kv_heads)
    cache = torch.empty(pages * layout.page_stride, dtype=torch.bfloat16, device=device)
    for part in cache.split(2**30):
        part.normal_()
    cache[: layout.page_stride] = float("nan")
    return cache


def shortened(p: Preset, layers: int) -> Preset:
    return replace(p, layers=layers)
