"""GGUF weights under Hugging Face names: dequantised to fp32, or as raw blocks for packing without requantisation."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longturn.errors import ModelError
from longturn.gguf_file import GGUFTensor, read_gguf
from longturn.ops.quant import Bytes, Floats, dequantize
from longturn.source import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

_TOP: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_FREQUENCIES = "rope_freqs.weight"


def huggingface_name(name: str) -> str | None:
    """The Hugging Face name of a dense decoder's GGUF tensor, None if it has none."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


class GGUFCheckpoint:
    """A memory-mapped GGUF file."""

    def __init__(self, source: ModelSource) -> None:
        file = read_gguf(source.path)
        self._path = source.path
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name == _FREQUENCIES:  # is in the configuration, see source.py
                continue
            self._tensors[huggingface_name(name) or name] = tensor
        # llama.cpp's converter reorders query and key rows of the llama architecture, and of no other one, for its
        # interleaved rotation; see LlamaModel.permute in convert_hf_to_gguf.py.
        self._permuted_heads: dict[str, int] = {}
        if source.config["model_type"] == "llama":
            self._permuted_heads = {
                ".self_attn.q_proj.": source.config["num_attention_heads"],
                ".self_attn.k_proj.": source.config["num_key_value_heads"],
            }
        with source.path.open("rb") as stream:
            # The map outlives the descriptor; numpy views keep it alive.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: Bytes = np.frombuffer(mapped, np.uint8)

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def type(self, name: str) -> str:
        """The GGUF type of a tensor, such as `Q4_1`."""
        return self._find(name).type

    def raw(self, name: str) -> Bytes:
        """The stored bytes, [..., row bytes], rows in Hugging Face order; a view of the file where nothing moves."""
        tensor = self._find(name)
        data = self._bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes]
        if len(tensor.shape) == 1:
            rows = tensor.shape[0] if self._is_permuted(name) else 1
        else:
            rows = int(np.prod(tensor.shape[:-1]))
        data = data.reshape(rows, -1)
        for part, heads in self._permuted_heads.items():
            if part in name:
                if rows % (2 * heads):
                    raise ModelError(f"{self._path}: tensor {name} has {rows} rows for {heads} heads")
                data = data.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)
        return data.reshape(*tensor.shape[:-1], -1)

    def floats(self, name: str) -> Floats:
        """The tensor dequantised to fp32, in numpy; it may be a view of the read-only file."""
        return dequantize(self.raw(name), self.type(name)).reshape(self.shape(name))

    def load(self, name: str) -> Tensor:
        import torch  # here alone: packing reads this file without it

        weights = self.floats(name)
        # A view of the read-only map must not become a writable tensor.
        return torch.from_numpy(weights if weights.flags.writeable else weights.copy())

    def _is_permuted(self, name: str) -> bool:
        return any(part in name for part in self._permuted_heads)

    def _find(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        return self._tensors[name]
