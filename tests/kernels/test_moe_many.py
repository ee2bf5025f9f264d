"""Mixture of experts for many tokens in Triton's interpreter, against the torch reference, in fp32."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

import triton
import triton.language as tl

from longturn.kernels.linear_many import add_project_many, project_many
from longturn.kernels.moe_many import MoeManyPlan, MoeManyScratch, moe_many_tokens
from longturn.kernels.moe_many_experts import combine_experts, tile_of
from longturn.kernels.packed_weights import WeightFormat, random_packed
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route

EPS, WIDTH, INTER, EXPERTS = 1e-6, 64, 32, 8
PLAN = MoeManyPlan(tile=16, in_columns=16, in_block=32, down_columns=32, down_block=32, router_tokens=16)


def weights(gen: torch.Generator, inter: int = INTER) -> dict[str, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen) * shape[-1] ** -0.5

    return {
        "norm_weight": torch.randn(WIDTH, generator=gen) * 0.2,
        "router_weight": normal(EXPERTS, WIDTH) * 2,
        "bias": torch.randn(EXPERTS, generator=gen) * 0.1,
        "w13": normal(EXPERTS, 2 * inter, WIDTH),
        "w2": normal(EXPERTS, WIDTH, inter),
        "shared_w13": normal(2 * inter, WIDTH),
        "shared_w2": normal(WIDTH, inter),
    }


def scratch_for(tokens: int, top: int, inter: int = INTER) -> MoeManyScratch:
    scratch = MoeManyScratch.allocate(tokens, EXPERTS, top, WIDTH, INTER, torch.empty(0), inter)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 12345)
    return scratch


@pytest.mark.parametrize(
    ("tokens", "top", "padding", "bias", "plan"),
    [
        (1, 1, 0, 0.0, PLAN),
        (16, 2, 3, 0.0, PLAN),
        (70, 4, 6, 0.0, replace(PLAN, tile=32, router_parts=2)),
        (70, 4, 6, 0.0, replace(PLAN, tile=32, least=16)),
        (70, 4, 6, 0.0, replace(PLAN, tile=32, shared_apart=True)),
        (3, 1, 1, 0.0, replace(PLAN, shared_apart=True)),
        (70, 4, 6, 0.0, replace(PLAN, tile=32, least=16, shared_apart=True, copied=True)),
        (33, 2, 0, 9.0, PLAN),  # every token chooses expert 5
        (40, 4, 40, 0.0, PLAN),  # nothing but padding
    ],
)
def test_moe_many_is_the_reference(tokens: int, top: int, padding: int, bias: float, plan: MoeManyPlan) -> None:
    gen = torch.Generator().manual_seed(tokens + top)
    w = weights(gen)
    w["bias"][5] += bias
    x = torch.randn(tokens, WIDTH, generator=gen)
    positions = torch.arange(tokens, dtype=torch.int32)
    positions[tokens - padding :] = -1
    normed = gemma_rms_norm(x, w["norm_weight"], EPS)
    routing = route(normed, w["router_weight"], w["bias"], top, 2.0)
    live = (positions >= 0).float()[:, None]
    shared = expert(normed, w["shared_w13"], w["shared_w2"], SwigluOai())
    both = moe(normed, routing, w["w13"], w["w2"], w["shared_w13"], w["shared_w2"], SwigluOai())
    expected = x + shared + live * (both - shared)
    scratch, following = scratch_for(tokens + 9, top), torch.randn(WIDTH, generator=gen)
    moe_many_tokens(
        x, positions, **w, scratch=scratch, top_experts=top, scaling_factor=2.0, plan=plan, next_norm=following
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
    left = scratch.normed[: tokens * WIDTH].view(tokens, WIDTH)
    torch.testing.assert_close(left, gemma_rms_norm(x, following, EPS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_combining_in_several_blocks(norm: bool) -> None:
    gen = torch.Generator().manual_seed(8)
    tokens, top, width = 5, 2, 96
    x, weight = torch.randn(tokens, width, generator=gen), torch.randn(width, generator=gen)
    parts = torch.randn(tokens * (1 + top), width, generator=gen)
    shares, experts = torch.rand(tokens, top, generator=gen), torch.zeros(tokens, top, dtype=torch.int32)
    experts[3] = -1
    parts[tokens + 3 * top : tokens + 4 * top] = float("nan")
    routed = (parts[tokens:].view(tokens, top, width) * shares[..., None]).sum(1)
    expected = x + parts[:tokens] + torch.where((experts[:, :1] >= 0), routed, torch.tensor(0.0))
    normed = torch.full_like(x, float("nan"))
    combine_experts[(tokens, 1 if norm else 3)](
        parts, experts, shares, x, weight, normed, tokens, EPS, TOP=top, N=width, BLOCK=32, NORM=norm, PDL=False
    )  # fmt: skip
    torch.testing.assert_close(x, expected)
    if norm:
        torch.testing.assert_close(normed, gemma_rms_norm(expected, weight, EPS))


@pytest.mark.parametrize("apart", [False, True])
def test_a_dense_layer_between_routed_ones(apart: bool) -> None:
    gen = torch.Generator().manual_seed(1)
    scratch = scratch_for(24, 2, 4 * INTER)
    x = torch.randn(24, WIDTH, generator=gen)
    positions = torch.arange(24, dtype=torch.int32)
    following = torch.randn(WIDTH, generator=gen)
    for inter, top in ((INTER, 2), (4 * INTER, 0), (INTER, 2)):
        w = weights(gen, inter)
        normed = gemma_rms_norm(x, w["norm_weight"], EPS)
        if top:
            routing = route(normed, w["router_weight"], w["bias"], top, 2.0)
            y = moe(normed, routing, w["w13"], w["w2"], w["shared_w13"], w["shared_w2"], SwigluOai())
        else:
            y = expert(normed, w["shared_w13"], w["shared_w2"], SwigluOai())
        expected = x + y
        plan = replace(PLAN, shared_apart=apart)
        moe_many_tokens(
            x, positions, **w, scratch=scratch, top_experts=top, scaling_factor=2.0, plan=plan, next_norm=following
        )  # fmt: skip
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
        left = scratch.normed[: x.numel()].view_as(x)
        torch.testing.assert_close(left, gemma_rms_norm(x, following, EPS), rtol=1e-4, atol=1e-5)


def test_a_broken_token_stays_alone() -> None:
    gen = torch.Generator().manual_seed(2)
    w = weights(gen)
    x = torch.randn(20, WIDTH, generator=gen)
    positions = torch.arange(20, dtype=torch.int32)
    alone = x.clone()
    x[7, 3] = float("nan")
    for value in (x, alone):
        moe_many_tokens(value, positions, **w, scratch=scratch_for(20, 2), top_experts=2, scaling_factor=2.0, plan=PLAN)
    others = torch.arange(20) != 7
    assert torch.equal(x[others], alone[others])


@pytest.mark.parametrize(
    ("routed", "shared"),
    [(WeightFormat.NVFP4, WeightFormat.MXFP8), (WeightFormat.MXFP8, WeightFormat.MXFP8),
     (WeightFormat.NVFP4, WeightFormat.PLAIN), (WeightFormat.PLAIN, WeightFormat.MXFP8)],
)  # fmt: skip
@pytest.mark.parametrize("top", [0, 2])
def test_quantised_weights_are_their_values(routed: WeightFormat, shared: WeightFormat, top: int) -> None:
    """Against the reference on what the weights hold: exact codes, so only sums differ."""
    gen = torch.Generator().manual_seed(6)
    w, held = weights(gen), {}
    for name, form in (("w13", routed), ("w2", routed), ("shared_w13", shared), ("shared_w2", shared)):
        if form is not WeightFormat.PLAIN:
            packed = random_packed(form, *w[name].shape, scale=w[name].shape[-1] ** -0.5, device="cpu")
            held[name], w[name] = packed, packed.dequantised()
    x = torch.randn(45, WIDTH, generator=gen)
    positions = torch.arange(45, dtype=torch.int32)
    positions[40:] = -1
    normed = gemma_rms_norm(x, w["norm_weight"], EPS)
    extra = expert(normed, w["shared_w13"], w["shared_w2"], SwigluOai())
    if top:
        routing = route(normed, w["router_weight"], w["bias"], top, 2.0)
        both = moe(normed, routing, w["w13"], w["w2"], w["shared_w13"], w["shared_w2"], SwigluOai())
        extra = torch.where((positions >= 0)[:, None], both, extra)
    expected = x + extra
    plan = replace(PLAN, in_block=64, down_block=32, shared_apart=shared is WeightFormat.PLAIN or None)
    scratch = scratch_for(50, 2)
    moe_many_tokens(x, positions, **{**w, **held}, scratch=scratch, top_experts=top, scaling_factor=2.0, plan=plan)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=2e-5)


@triton.jit
def _tiles(counts, experts, starts, sizes, SHARED: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    expert, start, size = tile_of(tl.program_id(0), SHARED, counts, 40, EXPERTS, TILE)
    tl.store(experts + tl.program_id(0), expert)
    tl.store(starts + tl.program_id(0), start)
    tl.store(sizes + tl.program_id(0), size)


def test_tiles_are_those_of_the_shared_expert_and_then_of_each_list() -> None:
    counts = torch.tensor([3, 0, 33, 16, 0, 1, 17, 0], dtype=torch.int32)
    expected = [(-1, 0, 40), (-1, 16, 24), (-1, 32, 8)]
    expected += [(e, at, size - at) for e, size in enumerate(counts.tolist()) for at in range(0, size, 16)]
    found = torch.full((3, len(expected) + 2), -7, dtype=torch.int32)
    _tiles[(found.shape[1],)](counts, *found, SHARED=3, EXPERTS=8, TILE=16)
    assert [tuple(tile) for tile in found.T.tolist()[:-2]] == expected
    assert found[0, -2:].tolist() == [8, 8], "there are no more"


def test_projections() -> None:
    gen = torch.Generator().manual_seed(5)
    x, norm = torch.randn(5, WIDTH, generator=gen), torch.randn(WIDTH, generator=gen) * 0.2
    weight = torch.randn(48, WIDTH, generator=gen)
    out, normed = torch.full((5, 48), float("nan")), torch.full((7 * WIDTH,), float("nan"))
    project_many(x, norm, weight, normed, out, eps=EPS)
    expected = gemma_rms_norm(x, norm, EPS) @ weight.T
    torch.testing.assert_close(out, expected)
    again = torch.full((5, 48), float("nan"))
    project_many(x * float("nan"), None, weight, normed, again)
    torch.testing.assert_close(again, expected)
    back = x + out @ weight
    add_project_many(x, out, weight.T.contiguous())
    torch.testing.assert_close(x, back)
