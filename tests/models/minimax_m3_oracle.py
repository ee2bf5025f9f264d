"""Tiny random MiniMax-M3 checkpoints, saved by transformers under the published names, with its model as the oracle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 97
LAYERS = 3
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 8192,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 48,
    "index_topk_blocks": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def make_oracle(path: Path, settings: dict[str, Any] | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model to `path` and return it. The router stays fp32, as published checkpoints have it."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    config = MiniMaxM3VLConfig(
        text_config={**TEXT, **(settings or {})}, vision_config=VISION, projector_hidden_size=64,
        image_token_index=90, video_token_index=91,
    )  # fmt: skip
    torch.manual_seed(11)
    model = MiniMaxM3SparseForConditionalGeneration(config).eval()
    with torch.no_grad():  # what starts at a constant, or too small to matter, would hide a mistake
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "language_model" not in name and "lm_head" not in name:
                continue
            if "inv_freq" in name:
                continue
            if "norm" in name:
                tensor.uniform_(-0.4, 0.4)
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.3, 0.3)
            elif "embed_tokens" in name:
                tensor.normal_(0.0, 1.0)
            else:
                tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
    for name, parameter in model.named_parameters():  # not buffers: rotary frequencies must stay exact
        if not name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(path)
    return model


def change_config(path: Path, text: dict[str, Any], *, drop: tuple[str, ...] = ()) -> None:
    """Edit the text part of a saved configuration."""
    config = json.loads((path / "config.json").read_text())
    config["text_config"] = {k: v for k, v in (config["text_config"] | text).items() if k not in drop}
    (path / "config.json").write_text(json.dumps(config))


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB - 10), k=count)  # the last ten are images and the like


@torch.no_grad()
def expected(model: Any, ids: list[int]) -> Tensor:
    """Logits at every position, fp32 [n, vocab]."""
    return model(input_ids=torch.tensor([ids])).logits[0].float()


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())
