"""Triton linear, mixture-of-experts and step-edge kernels in Triton's interpreter on the CPU, against torch
references."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.moe_few import MoePlan, MoeScratch, moe_few_tokens
from longturn.kernels.moe_few_kernels import _router_wide
from longturn.kernels.moe_one import moe_one_token
from longturn.kernels.norm import add_norm
from longturn.kernels.small_linear import LinearPlan, small_linear
from longturn.kernels.step_edges import begin_step
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route

EPS = 1e-6


def rand(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("tokens", [1, 3, 5, 17])
@pytest.mark.parametrize(("norm", "residual"), [(True, False), (False, True)])
def test_small_linear(tokens: int, norm: bool, residual: bool) -> None:
    x, weight, norm_weight = rand(tokens, 192, seed=1), rand(70, 192, seed=2), rand(192, seed=3, scale=0.3)
    base = rand(tokens, 70, seed=4)
    expected = (gemma_rms_norm(x, norm_weight, EPS) if norm else x) @ weight.T + (base if residual else 0)
    out = torch.full((tokens, 70), float("nan"))
    small_linear(
        x, weight, out, norm_weight=norm_weight if norm else None, normed=torch.full_like(x, float("nan")),
        residual=base if residual else None, eps=EPS, plan=LinearPlan(rows=16),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_add_norm() -> None:
    x, delta, weight = rand(3, 192, seed=1), rand(3, 192, seed=2), rand(192, seed=3)
    added, out = x + delta, torch.full((3, 192), float("nan"))
    add_norm(x, weight, out, delta=delta, eps=EPS)
    torch.testing.assert_close(x, added)
    torch.testing.assert_close(out, gemma_rms_norm(added, weight, EPS))


@pytest.mark.parametrize("inter", [32, 96])
def test_moe_one_token(inter: int) -> None:
    n, experts = 192, 16
    x, norm_weight = rand(1, n, seed=1), rand(n, seed=2, scale=0.3)
    router, bias = rand(experts, n, seed=3, scale=0.1), rand(experts, seed=4)
    w13, w2 = rand(experts, 2 * inter, n, seed=5, scale=0.2), rand(experts, n, inter, seed=6)
    s13, s2 = rand(2 * inter, n, seed=7, scale=0.2), rand(n, inter, seed=8)
    y = gemma_rms_norm(x, norm_weight, EPS)
    expected = x + moe(y, route(y, router, bias, 4, 2.0), w13, w2, s13, s2, SwigluOai())
    hidden = torch.full((5 * inter,), float("nan"))
    moe_one_token(
        x, norm_weight, router, bias, w13, w2, s13, s2, torch.full((experts,), float("nan")), hidden,
        top_experts=4, scaling_factor=2.0, eps=EPS,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-3)


def test_a_broken_router_reads_no_wild_expert() -> None:
    x, w13, w2 = rand(1, 64, seed=1), rand(16, 64, 64, seed=5), rand(16, 64, 32, seed=6)
    x[0, 0] = float("nan")
    moe_one_token(
        x, rand(64, seed=2), rand(16, 64, seed=3), rand(16, seed=4), w13, w2, w13[0], w2[0], torch.empty(16),
        torch.empty(5 * 32), top_experts=4, scaling_factor=2.0,
    )  # fmt: skip
    assert x.isnan().all()


def test_moe_without_experts_is_the_dense_mlp() -> None:
    x, norm_weight, bias = rand(1, 64, seed=1), rand(64, seed=2, scale=0.3), rand(16, seed=4)
    router, s13, s2 = rand(16, 64, seed=3), rand(2 * 96, 64, seed=7, scale=0.3), rand(64, 96, seed=8)
    expected = x + expert(gemma_rms_norm(x, norm_weight, EPS), s13, s2, SwigluOai())
    moe_one_token(
        x, norm_weight, router, bias, s13[None], s2[None], s13, s2, torch.empty(16), torch.full((96,), float("nan")),
        top_experts=0, scaling_factor=2.0, eps=EPS,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-3)


def test_moe_few_without_experts_is_the_dense_mlp() -> None:
    x, norm_weight, router = rand(3, 64, seed=1), rand(64, seed=2, scale=0.3), rand(16, 64, seed=3)
    s13, s2 = rand(2 * 128, 64, seed=7, scale=0.3), rand(64, 128, seed=8)
    expected = x + expert(gemma_rms_norm(x, norm_weight, EPS), s13, s2, SwigluOai())
    scratch = MoeScratch.allocate(3, 16, 0, 64, 32, x, dense_inter=128)
    moe_few_tokens(
        x, torch.zeros(3, dtype=torch.int32), norm_weight, router, rand(16, seed=4), s13[None], s2[None], s13, s2,
        scratch, top_experts=0, scaling_factor=2.0, eps=EPS, plan=MoePlan(in_rows=16, down_rows=32),
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-3)


def test_the_beginning_of_a_step() -> None:
    embedding, inv_freq = rand(50, 96, seed=1), torch.tensor([1.0, 0.1])
    tokens, positions = torch.tensor([7, 3], dtype=torch.int32), torch.tensor([100_000, -1], dtype=torch.int32)
    x, cos, sin = torch.empty(2, 96), torch.empty(2, 8), torch.empty(2, 8)
    begin_step(tokens, positions, embedding, inv_freq, x, cos, sin)
    assert torch.equal(x, embedding[[7, 0]])
    angle = torch.tensor([100_000.0, 10_000.0])
    torch.testing.assert_close(cos[0], torch.cat((angle.cos(), angle.cos(), torch.ones(4))))
    torch.testing.assert_close(sin[0], torch.cat((-angle.sin(), angle.sin(), torch.zeros(4))))


def test_router_of_wide_rows() -> None:
    x, norm, weight = rand(3, 384, seed=1), rand(384, seed=2, scale=0.3), rand(8, 384, seed=3)
    logits = torch.full((4, 8), float("nan"))
    _router_wide[(8, 2)](x, norm, weight, logits, 3, EPS, EXPERTS=8, K=384, BLOCK=128, TOKENS=2, PDL=False)
    torch.testing.assert_close(logits[:3], gemma_rms_norm(x, norm, EPS) @ weight.T, rtol=1e-4, atol=1e-4)
    assert logits[3].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "n", "changed"),
    [
        (2, 96, {}),
        (17, 96, {"down_turns": 3, "down_block": 32}),
        (18, 128, {"down_turns": 2}),
        (12, 128, {"down_turns": 3}),  # 4 tiles do not go into turns of 3
    ],
)
def test_moe_few_tokens(tokens: int, n: int, changed: dict[str, int]) -> None:
    experts, inter = 16, 64
    x, norm_weight = rand(tokens, n, seed=1), rand(n, seed=2, scale=0.3)
    router, bias = rand(experts, n, seed=3, scale=0.1), rand(experts, seed=4)
    bias[5] = 9.0  # every token chooses expert 5, so with 17 tokens it needs a second tile
    w13, w2 = rand(experts, 2 * inter, n, seed=5, scale=0.2), rand(experts, n, inter, seed=6)
    s13, s2 = rand(2 * inter, n, seed=7, scale=0.2), rand(n, inter, seed=8)
    y = gemma_rms_norm(x, norm_weight, EPS)
    routed = moe(y, route(y, router, bias, 4, 2.0), w13, w2, s13, s2, SwigluOai())
    routed[0] = expert(y[:1], s13, s2, SwigluOai())  # row 0 is padding: the shared expert only
    expected = x + routed
    positions = torch.full((tokens,), 5, dtype=torch.int32)
    positions[0] = -1
    scratch = MoeScratch.allocate(tokens, experts, 4, n, inter, x)
    for buffer in (scratch.logits, scratch.normed, scratch.hidden, scratch.parts, scratch.shares):
        buffer.fill_(float("nan"))
    following = rand(n, seed=9, scale=0.3) if tokens != 17 else None
    moe_few_tokens(
        x, positions, norm_weight, router, bias, w13, w2, s13, s2, scratch, top_experts=4, scaling_factor=2.0, eps=EPS,
        plan=MoePlan(in_rows=16, down_rows=32, **changed), next_norm=following,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-3)
    if following is not None:
        torch.testing.assert_close(scratch.normed, gemma_rms_norm(x, following, EPS), rtol=1e-4, atol=1e-4)
