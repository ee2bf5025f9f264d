"""MiniMax-M3's mixture of experts: router, SwiGLU-OAI and the weighted sum, as a reference that is plainly right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SwigluOai:
    """down((clamp(up) + beta) * gate * sigmoid(alpha * gate)), gate clamped from above only."""

    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0


@dataclass(frozen=True)
class Routing:
    """Chosen experts int64 [T, k] and their weights fp32 [T, k]; the scaling factor is already in the weights."""

    experts: Tensor
    weights: Tensor


def swiglu_oai(gate: Tensor, up: Tensor, form: SwigluOai) -> Tensor:
    """The activation, fp32, elementwise over gate and up of one shape."""
    gate, up = gate.float().clamp(max=form.limit), up.float().clamp(-form.limit, form.limit)
    return (up + form.beta) * gate * torch.sigmoid(form.alpha * gate)


def route(x: Tensor, gate_weight: Tensor, bias: Tensor, top_experts: int, scaling_factor: float) -> Routing:
    """Sigmoid routing in fp32: x [T, n], gate_weight [E, n], bias [E]; the bias chooses experts and weighs nothing."""
    scores = torch.sigmoid(x.float() @ gate_weight.float().T)
    experts = (scores + bias.float()).topk(top_experts, dim=-1).indices
    weights = scores.gather(-1, experts)
    return Routing(experts, scaling_factor * weights / weights.sum(-1, keepdim=True))


def expert(x: Tensor, w13: Tensor, w2: Tensor, form: SwigluOai) -> Tensor:
    """One expert in fp32: x [T, n], w13 [2i, n] rows gate then up, w2 [n, i]; fp32 [T, n]."""
    gate, up = (x.float() @ w13.float().T).chunk(2, dim=-1)
    return swiglu_oai(gate, up, form) @ w2.float().T


def moe(
    x: Tensor, routing: Routing, w13: Tensor, w2: Tensor, shared_w13: Tensor, shared_w2: Tensor, form: SwigluOai
) -> Tensor:
    """Routed experts plus the shared one, fp32 [T, n]: w13 [E, 2i, n], w2 [E, n, i], shared_w13 [2s, n], shared_w2 [n,
    s]."""
    out = expert(x, shared_w13, shared_w2, form)
    for number in sorted(set(routing.experts.flatten().tolist())):
        token, slot = (routing.experts == number).nonzero(as_tuple=True)
        part = expert(x[token], w13[number], w2[number], form) * routing.weights[token, slot][:, None]
        out = out.index_add(0, token, part)
    return out
