"""What the measured models are made of, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from longturn.models.make_checkpoint import PRESETS, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config

pytest.importorskip("triton")

from longturn.cli.steps.harness import leave_experts
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights


def test_routers_are_left_with_the_first_experts() -> None:
    c = minimax_m3_config(preset_config(PRESETS["tiny"])["text_config"])
    made = random_gpu_weights(c, device="cpu")
    before = [layer.feed_forward[2].clone() for layer in made.layers]
    leave_experts(made, c.top_experts)
    for old, layer in zip(before, made.layers, strict=True):
        bias = layer.feed_forward[2]
        assert torch.equal(bias[: c.top_experts], old[: c.top_experts])
        if layer.top:
            chosen = (torch.rand(50, c.experts) + bias).topk(c.top_experts).indices
            assert bool((chosen < c.top_experts).all())
        else:
            assert torch.equal(bias, old)
