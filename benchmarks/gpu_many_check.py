"""The kernels for many tokens against fp32 references, at real widths on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.kernels.many_steps import expected_attention, many_step

from gpu_decode_stack import (
    EXPERTS,
    HEAD_DIM,
    PRESETS,
    ROTARY_DIM,
    SCALING,
    TOP_EXPERTS,
    random_cache,
    random_layer,
    shortened,
)
from longturn.kernels.dense_attention import DensePlan, DenseScratch, DenseShape, dense_many_tokens
from longturn.kernels.moe_many import MoeManyScratch, moe_many_tokens
from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.pages import PageLayout
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route


def relative(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative Frobenius error, and the share of rows whose own is above 5e-2."""
    gap = (got.float() - expected).norm(dim=1)
    each = gap / expected.norm(dim=1).clamp(min=1e-20)
    return (gap.norm() / expected.norm()).item(), (each > 5e-2).float().mean().item()


def check(name: str) -> list[str]:
    """One layer's attention and experts over awkward lengths, poisoned buffers, eager and replayed."""
    p, lines = shortened(PRESETS[name], 2), []
    layout = PageLayout(p.layers, p.kv_heads)
    inv_freq = 5e6 ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32, device="cuda") / ROTARY_DIM)
    steps = [
        ([(0, 1)], 64), ([(0, 127), (0, 128), (0, 129)], 512), ([(2047, 1), (2048, 1), (2049, 2), (0, 1)], 64),
        ([(2048, 300), (5000, 1), (128, 60), (1, 1)], 512), ([(9000, 700)], 1024), ([(0, 2300)], 2304),
    ]  # fmt: skip
    pages = 400
    cache = random_cache(p, pages)
    for spans, bucket in steps:
        shape = MsaShape(p.q_heads, layout, ROTARY_DIM, max_blocks=80)
        plan = MsaManyPlan.default(shape)
        norms = MsaNorms(*(torch.randn(HEAD_DIM, device="cuda").mul(0.1).bfloat16() for _ in range(4)))
        ids = iter((torch.randperm(pages - 1) + 1).tolist())
        table = torch.zeros(len(spans), 80, dtype=torch.int32)
        shared = [next(ids) for _ in range(72)]
        for r, (cached, new) in enumerate(spans):
            for block in range((cached + new - 1) // 128 + 1):
                table[r, block] = shared[block] if block < cached // 128 else next(ids)
        step = many_step(spans, bucket, table.cuda(), inv_freq, HEAD_DIM)
        projected = torch.randn(bucket, p.projected, device="cuda").bfloat16()
        expected, _ = expected_attention(
            projected.float(), step, MsaNorms(*(w.float() for w in vars(norms).values())), cache.float(), layout, 1,
            p.q_heads, inv_freq, torch.bfloat16,
        )  # fmt: skip
        out = torch.full((bucket, p.q_heads * HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
        scratch = MsaManyScratch.allocate(bucket, pages, shape, plan, cache)
        for buffer in vars(scratch).values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)

        def attend(pdl: bool) -> None:
            msa_many_tokens(projected, step, norms, cache, 1, out, shape, plan, scratch, pdl=pdl)  # noqa: B023

        lines.append(verdict(f"{name} attention {spans}", attend, out, expected, step.positions >= 0))
        everything, _ = expected_attention(
            projected.float(), step, MsaNorms(*(w.float() for w in vars(norms).values())), cache.float(), layout, 1,
            p.q_heads, inv_freq, torch.bfloat16, top_blocks=80,
        )  # fmt: skip
        dense = DenseShape(p.q_heads, layout, ROTARY_DIM)
        dense_plan = DensePlan.many(bucket, dense)
        dense_scratch = DenseScratch.allocate(bucket, dense_plan.splits, dense, cache)
        dense_out = torch.zeros_like(out)

        def attend_all(pdl: bool) -> None:
            of_two = (norms.query, norms.key)  # noqa: B023
            dense_many_tokens(projected, step, of_two, cache, 1, dense_out, dense, dense_plan, dense_scratch, pdl=pdl)  # noqa: B023

        live = step.positions >= 0
        lines.append(verdict(f"{name} dense attention {spans}", attend_all, dense_out, everything, live))
        layer = random_layer(p, False)
        x0 = torch.randn(bucket, p.hidden, device="cuda").bfloat16()
        normed = gemma_rms_norm(x0.float(), layer.post_norm.float(), 1e-6)
        routing = route(normed, layer.router, layer.bias, TOP_EXPERTS, SCALING)
        weights = (layer.shared_w13, layer.shared_w2)
        both = moe(normed, routing, layer.w13, layer.w2, *weights, SwigluOai())
        expected = x0.float() + torch.where(live[:, None], both, expert(normed, *weights, SwigluOai()))
        moe_scratch = MoeManyScratch.allocate(bucket, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, x0)
        for key, buffer in vars(moe_scratch).items():
            if key != "no_tiles":
                buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
        x = x0.clone()

        def mix(pdl: bool) -> None:
            x.copy_(x0)  # noqa: B023
            moe_many_tokens(
                x, step.positions, layer.post_norm, layer.router, layer.bias, layer.w13, layer.w2, *weights,  # noqa: B023
                moe_scratch, top_experts=TOP_EXPERTS, scaling_factor=SCALING, pdl=pdl,  # noqa: B023
            )  # fmt: skip

        lines.append(verdict(f"{name} experts {spans}", mix, x, expected - x0.float(), step.positions >= 0, x0))
    return lines


def verdict(
    label: str, launch: Callable[[bool], None], out: torch.Tensor, expected: torch.Tensor, live: torch.Tensor,
    minus: torch.Tensor | None = None,
) -> str:  # fmt: skip
    """Errors of one kernel chain, and whether replays with dependent launch give the same bits."""
    launch(False)
    eager = out.clone()
    got = eager.float() - (minus.float() if minus is not None else 0.0)
    error, wrong = relative(got[live], expected[live])
    finite = torch.isfinite(out).all().item()
    launch(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(True)
    differ = 0
    for _ in range(10):
        out[live] = float("nan")
        graph.replay()
        differ += not torch.equal(out, eager)
    ok = finite and error < 2e-2 and not differ
    line = f"check {label[:60]:60} rel {error:.2e} rows off {wrong:.4f} replays that differ {differ}/10"
    line += "" if ok else "  WRONG"
    print(line, flush=True)
    return line
