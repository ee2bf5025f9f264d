"""A checkpoint's weights in the GPU kernels' layout, against the loaded model that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longturn.config import ModelConfig
from longturn.kernels.packed_weights import PackedWeight, WeightFormat
from longturn.models.checkpoint.base import open_checkpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.make_checkpoint import make_checkpoint
from longturn.models.minimax_m3 import MiniMaxM3, MoeWeights
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu_weights import GpuWeights, random_gpu_weights
from longturn.models.minimax_m3_load import load_minimax_m3
from longturn.source import resolve_source


def load(path: Path, scheme: Scheme) -> MiniMaxM3:
    made = make_checkpoint(path / "tiny", "tiny", scheme=scheme)
    source = resolve_source(ModelConfig(path=str(made.path)))
    checkpoint = open_checkpoint(source)
    assert isinstance(checkpoint, PublishedCheckpoint)
    dtype, host = torch.bfloat16, torch.device("cpu")
    config = minimax_m3_config(source.config)
    return load_minimax_m3(config, checkpoint, dtype=dtype, kv_dtype=dtype, device=host, pack_above_bytes=0)


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        (Scheme(), WeightFormat.PLAIN),
        (Scheme(experts="nvfp4", dense="mxfp8"), WeightFormat.NVFP4),
        (Scheme(experts="mxfp8", dense="mxfp8"), WeightFormat.MXFP8),
    ],
)
def test_experts_keep_their_values_and_their_bytes(tmp_path: Path, scheme: Scheme, form: WeightFormat) -> None:
    model = load(tmp_path, scheme)
    weights = GpuWeights.of(model)
    assert [layer.heads is None for layer in weights.layers] == [not s for s in model.config.sparse_layers]
    for layer, loaded in zip(weights.layers, model.layers, strict=True):
        if not isinstance(loaded.mlp, MoeWeights):
            assert layer.top == 0
            continue
        assert layer.top == model.config.top_experts
        w13, w2 = layer.feed_forward[3:5]
        packed = isinstance(w13, PackedWeight)
        assert packed == (form is not WeightFormat.PLAIN)
        for number in (0, model.config.experts - 1):
            for found, wanted in ((w13, loaded.mlp.experts.w13(number)), (w2, loaded.mlp.experts.w2(number))):
                one = found[number]
                values = one.dequantised() if isinstance(one, PackedWeight) else one
                torch.testing.assert_close(values.float(), wanted.float(), rtol=1e-6, atol=0.0)
        if isinstance(w13, PackedWeight):
            assert w13.format is form
            assert w13.nbytes < 1.2 * w13.words.nelement() * 2


def test_random_weights_have_the_loaded_ones_shapes(tmp_path: Path) -> None:
    model = load(tmp_path, Scheme())
    loaded = GpuWeights.of(model)
    made = random_gpu_weights(model.config, device="cpu", experts=WeightFormat.NVFP4, others=WeightFormat.MXFP8)
    for a, b in zip(made.layers, loaded.layers, strict=True):
        assert (a.top, tuple(a.projection.shape), tuple(a.out.shape)) == (
            b.top, tuple(b.projection.shape), tuple(b.out.shape)
        )  # fmt: skip
        if a.top:
            shapes = [[tuple(w.shape) for w in layer.feed_forward] for layer in (a, b)]
            assert shapes[0] == shapes[1]
