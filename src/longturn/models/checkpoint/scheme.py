"""How a MiniMax-M3 checkpoint is quantised when it is written: which weights, into what, under which names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from longturn.errors import ConfigError, ModelError
from longturn.models.checkpoint.quant_config import Format
from longturn.ops import mxfp8, nvfp4

Stored = Literal["bf16", "mxfp8", "nvfp4"]
Flavour = Literal["compressed-tensors", "modelopt"]

_EXPERT = re.compile(r"(?:language_model\.)?model\.layers\.\d+\.block_sparse_moe\.experts\.\d+\.w[123]\.weight")
_DENSE = re.compile(
    r"(?:language_model\.)?model\.layers\.\d+\."
    r"(?:self_attn\.(?:q|k|v|o|index_q|index_k)_proj|(?:mlp|block_sparse_moe\.shared_experts)\.(?:gate|up|down)_proj)"
    r"\.weight"
)
_FORMATS = {"bf16": Format.PLAIN, "mxfp8": Format.MXFP8, "nvfp4": Format.NVFP4}


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `longturn convert` and `make-checkpoint` write."""

    experts: Stored = "bf16"
    """Routed experts."""
    dense: Stored = "bf16"
    """Attention, index and shared-expert projections and dense feed-forwards. The rest is never quantised."""
    flavour: Flavour = "compressed-tensors"
    """Whose names and declarations: M3.1-Flash follows compressed-tensors."""

    def __post_init__(self) -> None:
        if self.dense == "nvfp4":
            raise ConfigError("dense weights can be mxfp8 or bf16, not nvfp4")

    def format_of(self, name: str) -> Format | None:
        """Format of weight `name`; None if it is stored as it comes."""
        if _EXPERT.fullmatch(name):
            return _FORMATS[self.experts]
        if _DENSE.fullmatch(name):
            return _FORMATS[self.dense]
        return None

    def encode(self, name: str, weight: Tensor, largest: float | None = None) -> dict[str, Tensor]:
        """The tensors to store for a weight.

        Args:
            name: as published, ending in `.weight`.
            weight: [out, in] for quantised weights, anything else otherwise.
            largest: see `ops.nvfp4.quantize_weight`.

        Raises:
            ModelError: rows do not divide into the format's groups, or a value is not finite.
        """
        form = self.format_of(name)
        if form is None:
            return {name: weight}
        if form == Format.PLAIN:
            return {name: weight.to(torch.bfloat16)}
        group = nvfp4.GROUP if form == Format.NVFP4 else mxfp8.GROUP
        if weight.dim() != 2 or weight.shape[1] % group:
            raise ModelError(
                f"tensor {name} has shape {list(weight.shape)}: {form} needs rows of a multiple of {group}"
            )
        if not bool(weight.isfinite().all()):
            raise ModelError(f"tensor {name} has values that are not finite, which {form} cannot hold")
        ours = self.flavour == "compressed-tensors"
        if form == Format.NVFP4:
            four = nvfp4.quantize_weight(weight, largest=largest, global_divides=ours)
            if ours:
                return {
                    f"{name}_packed": four.packed,
                    f"{name}_scale": four.scales,
                    f"{name}_global_scale": four.global_scale,
                }
            return {name: four.packed, f"{name}_scale": four.scales, f"{name}_scale_2": four.global_scale.reshape(())}
        eight = mxfp8.quantize_weight(weight)
        return {name: eight.values, f"{name}_scale{'_inv' if self._minimax else ''}": eight.scales}

    def declare(self, names: Iterable[str]) -> dict[str, Any] | None:
        """`quantization_config` for weights of these names; None if nothing is quantised."""
        if self.experts == self.dense == "bf16":
            return None
        if self.flavour == "modelopt":
            return self._declare_modelopt(names)
        if self._minimax:
            declared: dict[str, Any] = {"quant_method": "mxfp8"}
            if self.experts == "nvfp4":
                declared |= {"moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}
            return declared
        groups = {}
        for number, (stored, target) in enumerate(((self.experts, _EXPERT), (self.dense, _DENSE))):
            if stored != "bf16":
                weights = {
                    "num_bits": 4 if stored == "nvfp4" else 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "tensor_group" if stored == "nvfp4" else "group",
                    "group_size": nvfp4.GROUP if stored == "nvfp4" else mxfp8.GROUP,
                    "dynamic": False,
                }
                targets = [f"re:{target.pattern.removesuffix(chr(92) + '.weight')}$"]
                groups[f"group_{number}"] = {"targets": targets, "weights": weights, "input_activations": None}
        form = "nvfp4-pack-quantized" if self.experts == "nvfp4" else "mxfp8-quantized"
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": form,
            "config_groups": groups,
            "ignore": ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*", "re:patch_merge_mlp.*"],
        }

    @property
    def _minimax(self) -> bool:
        """M3.1-Flash's own declaration fits: everything that can be is MXFP8, experts perhaps NVFP4."""
        return self.flavour == "compressed-tensors" and self.dense == "mxfp8" and self.experts != "bf16"

    def _declare_modelopt(self, names: Iterable[str]) -> dict[str, Any]:
        layers: dict[str, dict[str, Any]] = {}
        for name in names:
            form = self.format_of(name)
            if form == Format.NVFP4:
                layers[name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": nvfp4.GROUP}
            elif form == Format.MXFP8:
                layers[name.removesuffix(".weight")] = {"quant_algo": "MXFP8", "group_size": mxfp8.GROUP}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
