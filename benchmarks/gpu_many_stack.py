"""Steps of many tokens of MiniMax-M3's shape on random weights: the kernels for prompts chained as a model chains them.

A measuring stand, like `gpu_decode_stack.py`: one row, fixed weights and page table, no executor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_decode_stack import EXPERTS, HEAD_DIM, ROTARY_DIM, SCALING, TOP_EXPERTS, Layer, Model, Preset
from longturn.kernels.linear_many import add_project_many, project_many
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.moe_many import MoeManyPlan, MoeManyScratch, moe_many_tokens
from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaShape
from longturn.kernels.norm import add_norm
from longturn.kernels.pages import PageLayout
from longturn.kernels.step_edges import begin_step


@dataclass(frozen=True)
class ManyPlans:
    """What a sweep varies."""

    msa: MsaManyPlan
    moe: MoeManyPlan
    pdl: bool = True


def flops_and_bytes(p: Preset, tokens: int, context: int) -> dict[str, tuple[float, float]]:
    """Floating-point operations and the least bytes of each part of one layer, for `tokens` new tokens after `context`
    cached ones. Attention counts the products alone, bytes the whole older cache once (16 blocks a token reach nearly
    all of it) and the parts written and read."""
    kv, group, d = p.kv_heads, p.q_heads // p.kv_heads, HEAD_DIM
    keys = context + tokens / 2
    blocks = min(16.0, keys / 128)
    pairs = tokens * (TOP_EXPERTS + 1)
    parts = tokens * blocks * p.q_heads * d * 2.0
    return {
        "projections": (2.0 * tokens * p.hidden * (p.projected + p.q_heads * d), 0.0),
        "block_scores": (2.0 * tokens * kv * keys * d, 2.0 * keys * d),
        "attend": (4.0 * tokens * kv * group * blocks * 128 * d, 4.0 * kv * keys * d + 2 * parts),
        "experts": (6.0 * pairs * p.hidden * p.inter, 6.0 * (EXPERTS + 1) * p.hidden * p.inter),
    }


class ManyStack:
    """A row that is `context` tokens long, `tokens` more of which are computed in one step."""

    def __init__(
        self, model: Model, cache: Tensor, tokens: int, most_context: int, plans: ManyPlans | None = None,
        layout: PageLayout | None = None,
    ) -> None:  # fmt: skip
        p = model.preset
        device = model.head.device
        self.model, self.cache, self.tokens = model, cache, tokens
        self.layout = layout or PageLayout(p.layers, p.kv_heads)
        blocks = most_context // 128 + 1
        self.shape = MsaShape(p.q_heads, self.layout, ROTARY_DIM, max_blocks=blocks)
        self.plans = plans or ManyPlans(
            MsaManyPlan.default(self.shape, tokens), MoeManyPlan.default(tokens, EXPERTS, TOP_EXPERTS)
        )
        pages = cache.numel() // self.layout.page_stride
        table = torch.randperm(pages - 1)[:blocks].to(torch.int32)[None] + 1
        tiles = [(i, min(TILE_TOKENS, tokens - i)) for i in range(0, tokens, TILE_TOKENS)] + [(0, 0)] * 16
        self.step = ManyTokens(
            torch.zeros(tokens, dtype=torch.int32, device=device),
            torch.zeros(tokens, dtype=torch.int32, device=device),
            table.to(device), torch.tensor(tiles, dtype=torch.int32, device=device),
            torch.empty(tokens, HEAD_DIM, device=device), torch.empty(tokens, HEAD_DIM, device=device),
        )  # fmt: skip
        self.ids = torch.randint(model.embedding.shape[0], (tokens,), dtype=torch.int32, device=device)
        self.x = torch.empty(tokens, p.hidden, dtype=torch.bfloat16, device=device)
        self.projected = self.x.new_full((tokens, p.projected), float("nan"))
        self.attention = self.x.new_full((tokens, p.q_heads * HEAD_DIM), float("nan"))
        self.msa = MsaManyScratch.allocate(tokens, pages, self.shape, self.plans.msa, self.x)
        self.moe = MoeManyScratch.allocate(tokens, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, self.x, p.dense)
        self.last = self.x.new_empty(1, p.hidden)
        self.logits = self.x.new_empty(1, model.head.shape[0])
        self.graph = torch.cuda.CUDAGraph()

    def seek(self, context: int) -> None:
        """The step computes tokens context .. context + T - 1."""
        torch.add(torch.arange(self.tokens, dtype=torch.int32, device=self.x.device), context, out=self.step.positions)

    def begin(self) -> None:
        m, s = self.model, self.step
        begin_step(self.ids, s.positions, m.embedding, m.inv_freq, self.x, s.cos, s.sin)

    def attend(self, number: int, layer: Layer) -> None:
        project_many(self.x, layer.input_norm, layer.qkv, self.moe.normed, self.projected, pdl=self.plans.pdl)
        msa_many_tokens(
            self.projected, self.step, layer.heads, self.cache, number, self.attention, self.shape, self.plans.msa,
            self.msa, pdl=self.plans.pdl,
        )  # fmt: skip
        add_project_many(self.x, self.attention, layer.o)

    def mix(self, layer: Layer) -> None:
        moe_many_tokens(
            self.x, self.step.positions, layer.post_norm, layer.router, layer.bias, layer.w13, layer.w2,
            layer.shared_w13, layer.shared_w2, self.moe, top_experts=layer.top, scaling_factor=SCALING,
            plan=self.plans.moe if layer.top else None, pdl=self.plans.pdl,
        )  # fmt: skip

    def launch(self) -> None:
        """The whole step, and the last token's logits."""
        self.begin()
        for number, layer in enumerate(self.model.layers):
            self.attend(number, layer)
            self.mix(layer)
        add_norm(self.x[-1:], self.model.final_norm, self.last)
        torch.mm(self.last, self.model.head.T, out=self.logits)

    def capture(self) -> None:
        """Compile by one eager step, then record the step as a graph."""
        self.launch()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.launch()
