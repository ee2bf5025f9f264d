"""The kernels for many tokens against fp32 references, at real widths on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from tests.kernels.many_steps import (
    attention_over,
    expected_attention,
    fill_quantised,
    lanes,
    many_step,
    stored_floats,
)

from gpu_decode_stack import (
    EXPERTS,
    HEAD_DIM,
    PRESETS,
    ROTARY_DIM,
    SCALING,
    TOP_EXPERTS,
    Formats,
    random_cache,
    random_layer,
    shortened,
)
from longturn.executor.gpu.compile import Compilation, noting_kernels
from longturn.kernels.dense_attention import DensePlan, DenseScratch, DenseShape, dense_many_tokens
from longturn.kernels.moe_many import MoeManyPlan, MoeManyScratch, moe_many_tokens
from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.kernels.unpack_weights import unpack
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route

STEPS: list[tuple[list[tuple[int, int]], int]] = [
    ([(0, 1)], 64), ([(0, 127), (0, 128), (0, 129)], 512), ([(2047, 1), (2048, 1), (2049, 2), (0, 1)], 64),
    ([(2048, 300), (5000, 1), (128, 60), (1, 1)], 512), ([(9000, 700)], 1024), ([(0, 2300)], 2304),
    ([(5000, 4200)], 4224), ([(8000, 1), (9000, 1), (4096, 33), (1000, 1), (7, 290)], 384),
]  # fmt: skip
"""(cached, new) tokens of each row, and the size that the step is padded to."""


def relative(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative Frobenius error, and the share of rows whose own is above 5e-2."""
    gap = (got.float() - expected).norm(dim=1)
    each = gap / expected.norm(dim=1).clamp(min=1e-20)
    return (gap.norm() / expected.norm()).item(), (each > 5e-2).float().mean().item()


def sure_of(normed: torch.Tensor, router: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Whether each row's last choice of experts won by more than fp32 rounds away: else either choice is right."""
    choice = torch.sigmoid(normed.double() @ router.double().T) + bias.double()
    best = choice.topk(TOP_EXPERTS + 1).values
    return best[:, -2] - best[:, -1] > 1e-5


def check(name: str, hopper: bool = False, experts: bool = True) -> list[str]:
    """One layer's attention and experts over awkward lengths, poisoned buffers, eager and replayed; attention in Gluon
    if `hopper`, else in Triton."""
    p, lines = shortened(PRESETS[name], 2), []
    layout = PageLayout(p.layers, p.kv_heads)
    inv_freq = 5e6 ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32, device="cuda") / ROTARY_DIM)
    pages = 400
    cache = random_cache(p, pages)
    for spans, bucket in STEPS:
        shape = MsaShape(p.q_heads, layout, ROTARY_DIM, max_blocks=80)
        plan = MsaManyPlan.default(shape, bucket)
        plan = replace(plan, hopper_scores=hopper, hopper_attend=hopper)
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
        clean = cache.clone()
        for r, (cached, new) in enumerate(spans):  # what a broken request left in pages that others have now
            last, used = divmod(cached + new - 1, 128)
            for lane in lanes(cache, layout, 1):
                lane[table[r, last], :, used + 1 :] = float("nan")
        out = torch.full((bucket, p.q_heads * HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
        scratch = MsaManyScratch.allocate(bucket, pages, shape, plan, cache)
        for buffer in vars(scratch).values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)

        def attend(pdl: bool) -> None:
            msa_many_tokens(projected, step, norms, cache, 1, out, shape, plan, scratch, pdl=pdl)  # noqa: B023

        lines.append(
            verdict(
                f"{name} {'Gluon' if hopper else 'Triton'} attention {spans}",
                attend,
                out,
                expected,
                step.positions >= 0,
            )
        )
        cache.copy_(clean)
        if not experts:
            continue
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
        for buffer in vars(moe_scratch).values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
        x = x0.clone()

        def mix(pdl: bool) -> None:
            x.copy_(x0)  # noqa: B023
            moe_many_tokens(
                x, step.positions, layer.post_norm, layer.router, layer.bias, layer.w13, layer.w2, *weights,  # noqa: B023
                moe_scratch, top_experts=TOP_EXPERTS, scaling_factor=SCALING, pdl=pdl,  # noqa: B023
            )  # fmt: skip

        sure = live & sure_of(normed, layer.router, layer.bias)
        lines.append(verdict(f"{name} experts {spans}", mix, x, expected - x0.float(), sure, x0))
    return lines


def check_experts(name: str, tokens: int, plan: MoeManyPlan | None = None) -> list[str]:
    """Experts of a long step, and a dense layer, against fp32: nine tenths of the tokens live."""
    p, lines = shortened(PRESETS[name], 2), []
    x0 = torch.randn(tokens, p.hidden, device="cuda").bfloat16()
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    positions[tokens - tokens // 10 :] = -1
    live = positions >= 0
    scratch = MoeManyScratch.allocate(tokens, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, x0, p.dense)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
    x = x0.clone()
    for top in (TOP_EXPERTS, 0):
        layer = random_layer(p, top == 0)
        own = (layer.shared_w13, layer.shared_w2)
        normed = gemma_rms_norm(x0.float(), layer.post_norm.float(), 1e-6)
        expected = expert(normed, *own, SwigluOai())
        sure = live
        if top:
            sure = live & sure_of(normed, layer.router, layer.bias)
            routing = route(normed, layer.router, layer.bias, top, SCALING)
            both = moe(normed, routing, layer.w13, layer.w2, *own, SwigluOai())
            expected = torch.where(live[:, None], both, expected)

        def mix(pdl: bool) -> None:
            x.copy_(x0)
            moe_many_tokens(
                x, positions, layer.post_norm, layer.router, layer.bias, layer.w13, layer.w2, *own,  # noqa: B023
                scratch, top_experts=top, scaling_factor=SCALING, plan=plan if top else None, pdl=pdl,  # noqa: B023
            )  # fmt: skip

        with noting_kernels() as kernels:
            mix(True)
            mix(False)
        Compilation(kernels).wait()
        lines.append(verdict(f"{name} {'experts' if top else 'dense'} of {tokens} tokens", mix, x, expected, sure, x0))
    return lines


FORMATS = ((KvFormat.FP8, KvFormat.FP8), (KvFormat.NVFP4, KvFormat.FP8), (KvFormat.PLAIN, KvFormat.FP8))


def check_formats(name: str) -> list[str]:
    """Sparse attention over caches of fewer bits, against fp32 over what the cache holds after the step."""
    p, lines = shortened(PRESETS[name], 2), []
    inv_freq = 5e6 ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32, device="cuda") / ROTARY_DIM)
    gen = torch.Generator("cuda").manual_seed(torch.seed() % 2**31)
    pages, spans, bucket = 300, [(9000, 700), (128, 60), (2047, 2), (0, 129)], 1024
    for kv_format, index_format in FORMATS:
        layout = PageLayout(p.layers, p.kv_heads, kv_format=kv_format, index_format=index_format)
        cache = torch.zeros(pages, layout.page_stride, dtype=torch.uint8, device="cuda")
        fill_quantised(cache, layout, 1, gen)
        shape = MsaShape(p.q_heads, layout, ROTARY_DIM, max_blocks=80)
        plan = MsaManyPlan.default(shape)
        norms = MsaNorms(*(torch.randn(HEAD_DIM, device="cuda").mul(0.1).bfloat16() for _ in range(4)))
        ids = iter((torch.randperm(pages - 1) + 1).tolist())
        table = torch.zeros(len(spans), 80, dtype=torch.int32)
        for r, (cached, new) in enumerate(spans):
            for block in range((cached + new - 1) // 128 + 1):
                table[r, block] = next(ids)
        step = many_step(spans, bucket, table.cuda(), inv_freq, HEAD_DIM)
        projected = torch.randn(bucket, p.projected, device="cuda").bfloat16()
        out = torch.full((bucket, p.q_heads * HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
        scratch = MsaManyScratch.allocate(bucket, pages, shape, plan, out)
        for buffer in vars(scratch).values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)

        def attend(pdl: bool) -> None:
            msa_many_tokens(projected, step, norms, cache, 1, out, shape, plan, scratch, pdl=pdl)  # noqa: B023

        attend(False)
        held = stored_floats(cache, layout, 1)
        dtypes = [torch.bfloat16 if form == KvFormat.PLAIN else torch.float16 for form in (kv_format, index_format)]
        expected = attention_over(
            (held["key"], held["value"], held["index"]), projected.float(), step,
            MsaNorms(*(w.float() for w in vars(norms).values())), p.q_heads, inv_freq, (dtypes[0], dtypes[1]),
        )  # fmt: skip
        label = f"{name} {kv_format} keys and values, {index_format} index"
        lines.append(verdict(label, attend, out, expected, step.positions >= 0))
    return lines


def check_packed(name: str, tokens: int) -> str:
    """The experts' kernels on quantised weights against those for plain ones on the same values."""
    p = shortened(PRESETS[name], 2)
    layer = random_layer(p, False, formats=Formats(WeightFormat.NVFP4, WeightFormat.MXFP8))
    weights = [as_packed(w) for w in (layer.w13, layer.w2, layer.shared_w13, layer.shared_w2)]
    x0 = torch.randn(tokens, p.hidden, device="cuda").bfloat16()
    plain = [torch.empty(w.shape, dtype=torch.bfloat16, device="cuda") for w in weights]
    for weight, to in zip(weights, plain, strict=True):
        unpack(weight, to)
    scratch = MoeManyScratch.allocate(tokens, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, x0)
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    x = torch.empty_like(x0)

    def mix(of: list[torch.Tensor] | list[PackedWeight], pdl: bool) -> None:
        for buffer in vars(scratch).values() if not pdl else ():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
        x.copy_(x0)
        moe_many_tokens(
            x, positions, layer.post_norm, layer.router, layer.bias, *of, scratch, top_experts=TOP_EXPERTS,
            scaling_factor=SCALING, pdl=pdl,
        )  # fmt: skip

    mix(plain, False)
    expected = x.float() - x0.float()
    return verdict(f"{name} packed experts {tokens}", lambda pdl: mix(weights, pdl), x, expected, positions >= 0, x0)


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
