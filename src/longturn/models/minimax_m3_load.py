"""The weights of MiniMax-M3 under their published names. Vision towers and draft modules are passed over by name."""

from __future__ import annotations

import torch
from torch import Tensor

from longturn.models.checkpoint.base import CheckedReader
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.checkpoint.quant_config import Format
from longturn.models.minimax_m3 import (
    AttentionWeights,
    Experts,
    MiniMaxM3,
    MiniMaxM3Layer,
    MlpWeights,
    MoeWeights,
    PackedExperts,
    PackedWeight,
    StackedExperts,
)
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config

PACK_ABOVE_BYTES = 4 << 30
"""Quantised experts that would take more than this when dequantised stay packed on a CPU."""
COPY_BYTES = 128 << 20
"""About how much is copied out of a mapped file before its memory is given back: tables are gigabytes."""
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")


def is_other_part(name: str) -> bool:
    """Whether a tensor belongs to vision, multi-token prediction or the bundled draft, and not to the text model."""
    return name.startswith(_OTHER_PARTS) or any(part in ("mtp", "dspark") for part in name.split("."))


def load_minimax_m3(
    c: MiniMaxM3Config,
    checkpoint: PublishedCheckpoint,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    pack_above_bytes: int = PACK_ABOVE_BYTES,
) -> MiniMaxM3:
    """Read the weights layer by layer, converted to `dtype`; the router and norms stay as exact as they are stored.

    Args:
        c: from `minimax_m3_config`.
        checkpoint: in any of its formats.
        dtype: of weights and activations.
        kv_dtype: of the cache, see `minimax_m3_kv`.
        device: where weights go.
        pack_above_bytes: see `PACK_ABOVE_BYTES`. Results are the same but for the rounding of weights to `dtype`.

    Raises:
        ModelError: a tensor is missing, has the wrong shape, or has no place in the model.
    """
    kv = minimax_m3_kv(c, kv_dtype)  # a cache that cannot be is known before gigabytes are read
    weights = _Weights(c, checkpoint, dtype, device, pack_above_bytes)
    layers = tuple(weights.layer(index) for index in range(c.layers))
    embedding = weights.stack(c.hidden, ("model.embed_tokens", c.vocab_size))
    if c.tied:
        weights.ignore("lm_head.weight")
    head = embedding if c.tied else weights.stack(c.hidden, ("lm_head", c.vocab_size))
    norm = weights.exact("model.norm", c.hidden)
    weights.reader.finish()
    checkpoint.release()
    return MiniMaxM3(c, embedding, layers, norm, head, kv)


class _Weights:
    """Reads parts of the model."""

    def __init__(
        self,
        c: MiniMaxM3Config,
        checkpoint: PublishedCheckpoint,
        dtype: torch.dtype,
        device: torch.device,
        pack_above_bytes: int,
    ) -> None:
        self.c = c
        self.reader = CheckedReader(checkpoint)
        self._checkpoint = checkpoint
        expert_values = sum(c.moe_layers) * c.experts * 3 * c.expert_ffn * c.hidden
        self._may_pack = device.type == "cpu" and expert_values * dtype.itemsize > pack_above_bytes
        self._copy_rows = max(1, COPY_BYTES // (4 * c.hidden))
        self._dtype = dtype
        self._device = device
        names = checkpoint.names()
        for name in names:
            if is_other_part(name):
                self.reader.ignore(name)
        # Vision-language checkpoints keep the text model under a prefix, text-only ones do not.
        self._top = "language_model." if any(name.startswith("language_model.") for name in names) else ""

    def ignore(self, name: str) -> None:
        self.reader.ignore(f"{self._top}{name}")

    def exact(self, name: str, *shape: int, suffix: str = ".weight") -> Tensor:
        """A small tensor in fp32, whatever the model's dtype."""
        # a copy, for the file behind the tensor is released
        return self.reader.load(f"{self._top}{name}{suffix}", *shape).to(self._device, torch.float32, copy=True)

    def stack(self, width: int, *parts: tuple[str, int], out: Tensor | None = None) -> Tensor:
        """Weights (name, rows) [rows, width] one under the other, written in place so that no second copy is held."""
        if out is None:
            out = torch.empty((sum(rows for _, rows in parts), width), dtype=self._dtype, device=self._device)
        at = 0
        for name, rows in parts:
            weight = self.reader.load(f"{self._top}{name}.weight", rows, width)
            for begin in range(0, rows, self._copy_rows):
                end = min(begin + self._copy_rows, rows)
                out[at + begin : at + end] = weight[begin:end]
                self._checkpoint.release()
            at += rows
        return out

    def layer(self, index: int) -> MiniMaxM3Layer:
        c, at = self.c, f"model.layers.{index}"
        return MiniMaxM3Layer(
            attention_norm=self.exact(f"{at}.input_layernorm", c.hidden),
            attention=self.attention(f"{at}.self_attn", c.sparse_layers[index]),
            mlp_norm=self.exact(f"{at}.post_attention_layernorm", c.hidden),
            mlp=self.moe(f"{at}.block_sparse_moe") if c.moe_layers[index] else self.mlp(f"{at}.mlp", c.dense_ffn),
        )

    def attention(self, at: str, sparse: bool) -> AttentionWeights:
        c = self.c
        rows = [("q_proj", c.q_width), ("k_proj", c.kv_width), ("v_proj", c.kv_width)]
        if sparse:
            rows += [("index_q_proj", c.index_q_width), ("index_k_proj", c.index_dim)]
        return AttentionWeights(
            projection=self.stack(c.hidden, *((f"{at}.{name}", count) for name, count in rows)),
            q_norm=self.exact(f"{at}.q_norm", c.head_dim),
            k_norm=self.exact(f"{at}.k_norm", c.head_dim),
            index_q_norm=self.exact(f"{at}.index_q_norm", c.index_dim) if sparse else None,
            index_k_norm=self.exact(f"{at}.index_k_norm", c.index_dim) if sparse else None,
            out=self.stack(c.q_width, (f"{at}.o_proj", c.hidden)),
        )

    def mlp(self, at: str, width: int) -> MlpWeights:
        gate_up = self.stack(self.c.hidden, (f"{at}.gate_proj", width), (f"{at}.up_proj", width))
        return MlpWeights(gate_up, self.stack(width, (f"{at}.down_proj", self.c.hidden)))

    def moe(self, at: str) -> MoeWeights:
        c = self.c
        if c.routing_bias:
            bias = self.exact(f"{at}.e_score_correction_bias", c.experts, suffix="")
        else:
            bias = torch.zeros(c.experts, device=self._device)
            self.ignore(f"{at}.e_score_correction_bias")
        return MoeWeights(
            gate=self.exact(f"{at}.gate", c.experts, c.hidden),
            bias=bias,
            experts=self.experts(f"{at}.experts"),
            shared=self.mlp(f"{at}.shared_experts", c.shared_ffn) if c.shared_ffn else None,
        )

    def experts(self, at: str) -> Experts:
        c, numbers = self.c, range(self.c.experts)
        names = [f"{self._top}{at}.{number}.{part}.weight" for number in numbers for part in ("w1", "w2", "w3")]
        quantised = all(n in self._checkpoint.names() and self._checkpoint.format(n) != Format.PLAIN for n in names)
        if self._may_pack and quantised:

            def packed(part: str, rows: int, width: int) -> tuple[PackedWeight, ...]:
                return tuple(self.packed(f"{at}.{number}.{part}", rows, width) for number in numbers)

            return PackedExperts(
                packed("w1", c.expert_ffn, c.hidden),
                packed("w3", c.expert_ffn, c.hidden),
                packed("w2", c.hidden, c.expert_ffn),
            )
        w13 = torch.empty((c.experts, 2 * c.expert_ffn, c.hidden), dtype=self._dtype, device=self._device)
        w2 = torch.empty((c.experts, c.hidden, c.expert_ffn), dtype=self._dtype, device=self._device)
        for number in numbers:
            one = f"{at}.{number}"
            self.stack(c.hidden, (f"{one}.w1", c.expert_ffn), (f"{one}.w3", c.expert_ffn), out=w13[number])
            self.stack(c.expert_ffn, (f"{one}.w2", c.hidden), out=w2[number])
        return StackedExperts(w13, w2)

    def packed(self, name: str, rows: int, width: int) -> PackedWeight:
        """A quantised weight as it is stored, copied out of the file."""
        full = f"{self._top}{name}.weight"
        self.reader.check(full, rows, width)
        weight = self._checkpoint.weight(full)
        assert not isinstance(weight, Tensor), "the caller has looked"
        copy = weight.clone()
        self._checkpoint.release()
        return copy
