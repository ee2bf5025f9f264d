"""Typed calls into the compiled CPU decoder. Calls release the GIL; arrays are checked here, ids in the library.

A decoder computes one step: any mix of prefill chunks and decodes over a paged cache of keys and values. Its results
have the same bits for a token however it is batched, chunked or spread over threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longturn.config import PAGE_TOKENS
from longturn.errors import ConfigError, LongturnError, ModelError
from longturn.kernels.cpu.library import (
    MATRICES,
    VECTORS,
    CacheArray,
    Float32,
    Int32,
    LayerStruct,
    ModelStruct,
    NativeLibrary,
    StepStruct,
    address,
    expect,
    load,
    matrix_struct,
)
from longturn.kernels.cpu.packing import PackedMatrix

__all__ = ["DecoderConfig", "DecoderWeights", "LayerWeights", "NativeDecoder", "NativeLibrary", "load", "page_bytes"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes of a Llama-type dense model."""

    hidden: int
    """Width of the residual stream, a multiple of 32."""
    heads: int
    kv_heads: int
    head_dim: int
    """A multiple of 16; heads * head_dim is a multiple of 32."""
    ffn: int
    """Width of the gated layer, a multiple of 32."""
    vocab: int
    rms_eps: float
    cache_dtype: Literal["fp16", "fp32"] = "fp16"
    threads: int = 1
    attention_scale: float | None = None
    """Factor of the scores; 1 / sqrt(head_dim) if None."""
    use_amx: bool = True
    """Use AMX where the processor and the system offer it; it changes speed, not results."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [outputs, inputs]; query and key rows are in half-rotation order (not GGUF's pairs)."""

    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    attention_norm: Float32
    mlp_norm: Float32
    q_bias: Float32 | None = None
    k_bias: Float32 | None = None
    v_bias: Float32 | None = None
    o_bias: Float32 | None = None
    q_norm: Float32 | None = None
    """Per-head RMS norm [head_dim] before the rotation (Qwen3)."""
    k_norm: Float32 | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    layers: tuple[LayerWeights, ...]
    embedding: PackedMatrix
    """[vocab, hidden]; the same object as `head` in a tied model."""
    head: PackedMatrix
    final_norm: Float32
    cosine: Float32
    """[positions, rotary_dim / 2], scaled as the model's RoPE type demands; its rows bound the positions."""
    sine: Float32


class NativeDecoder:
    """A model ready to compute steps. Holds references to the weights' arrays, which may be memory maps.

    One thread may call it at a time. `close` ends its threads; garbage collection does too.
    """

    def __init__(self, library: NativeLibrary, config: DecoderConfig, weights: DecoderWeights) -> None:
        """Raises ModelError if the weights do not fit the configuration or it is one the kernels do not serve."""
        _check_model(config, weights)
        self.config = config
        self.layers = len(weights.layers)
        self.positions = weights.cosine.shape[0]
        self._dll = library.dll
        self._weights = weights  # the library keeps pointers into these arrays
        self._handle: int | None = None
        layers = (LayerStruct * self.layers)()
        for to, layer in zip(layers, weights.layers, strict=True):
            for name in MATRICES:
                setattr(to, name, matrix_struct(getattr(layer, name)))
            for name in VECTORS:
                vector = getattr(layer, name)
                setattr(to, name, None if vector is None else address(vector))
        scale = config.attention_scale
        model = ModelStruct(
            layers=self.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rotary_dim=2 * weights.cosine.shape[1],
            ffn=config.ffn,
            vocab=config.vocab,
            positions=self.positions,
            half_cache=int(config.cache_dtype == "fp16"),
            threads=config.threads,
            use_amx=int(config.use_amx),
            eps=config.rms_eps,
            attention_scale=config.head_dim**-0.5 if scale is None else scale,
            embedding=matrix_struct(weights.embedding),
            head=matrix_struct(weights.head),
            final_norm=address(weights.final_norm),
            cosine=address(weights.cosine),
            sine=address(weights.sine),
            layer=ctypes.cast(layers, ctypes.c_void_p),
        )
        self._handle = self._dll.lt_decoder_create(ctypes.byref(model))
        if self._handle is None:
            raise LongturnError(f"the CPU decoder could not start {config.threads} threads")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of 128 tokens: all layers, keys and values."""
        return page_bytes(self.config, self.layers)

    def new_cache(self, pages: int) -> CacheArray:
        """An empty cache of `pages` pages (page 0 included); memory is taken as pages are written."""
        c = self.config
        dtype = np.float16 if c.cache_dtype == "fp16" else np.float32
        return np.zeros((pages, self.layers, 2, c.kv_heads, PAGE_TOKENS * c.head_dim), dtype)

    def forward(
        self,
        tokens: Int32,
        positions: Int32,
        rows: Int32,
        page_tables: Int32,
        outputs: Int32,
        cache: CacheArray,
        *,
        logits: bool = True,
        argmax: bool = False,
    ) -> tuple[Float32 | None, Int32 | None]:
        """Compute one step: write its tokens' keys and values to the cache, and return what `outputs` asks for.

        Tokens of one row must be neighbours with consecutive positions; keys and values of all lower positions of the
        row must be in its pages already. Several rows may share pages that none of them writes. A row of padding may
        point at page 0; its results mean nothing and disturb no other row.

        Args:
            tokens: int32 [T] token ids.
            positions: int32 [T] position of each token in its sequence.
            rows: int32 [T] row of `page_tables` that each token belongs to.
            page_tables: int32 [R, max_pages] page ids; entries past a row's last computed position are not read.
            outputs: int32 [n] indexes of tokens (0 .. T-1) whose next-token logits are wanted; may be empty.
            cache: from `new_cache`, or any array of that shape and dtype (a memory map for example).
            logits: return the logits.
            argmax: return the most likely token of each output, the lowest id of equals, -1 where all logits are NaN.

        Returns:
            (float32 [n, vocab] or None, int32 [n] or None).

        Raises:
            ConfigError: an array has the wrong shape or dtype, or an id, position or page is out of range.
        """
        if self._handle is None:
            raise LongturnError("the CPU decoder is closed")
        c = self.config
        count = tokens.shape[0]
        expect("tokens", tokens, np.int32, (count,))
        expect("positions", positions, np.int32, (count,))
        expect("rows", rows, np.int32, (count,))
        expect("page_tables", page_tables, np.int32, page_tables.shape[:1] + page_tables.shape[1:2])
        expect("outputs", outputs, np.int32, (outputs.shape[0],))
        dtype = np.float16 if c.cache_dtype == "fp16" else np.float32
        expect("cache", cache, dtype, (cache.shape[0], self.layers, 2, c.kv_heads, PAGE_TOKENS * c.head_dim))
        n = outputs.shape[0]
        if n and not (0 <= int(outputs.min()) and int(outputs.max()) < count):
            raise ConfigError(f"'outputs' must index the step's {count} tokens")
        all_logits = np.empty((n, c.vocab), np.float32) if logits else None
        best = np.empty(n, np.int32) if argmax else None
        step = StepStruct(
            tokens=count,
            rows=page_tables.shape[0],
            max_pages=page_tables.shape[1],
            pages=cache.shape[0],
            outputs=n if logits or argmax else 0,
            token=address(tokens),
            position=address(positions),
            row=address(rows),
            page_table=address(page_tables),
            output=address(outputs),
            cache=address(cache),
            logits=None if all_logits is None else address(all_logits),
            argmax=None if best is None else address(best),
        )
        status = self._dll.lt_decoder_forward(self._handle, ctypes.byref(step))
        if status < 0:
            raise LongturnError(f"out of memory in a step of {count} tokens")
        if status > 0:
            i = status - 1
            raise ConfigError(
                f"token {i} of the step is out of range: id {tokens[i]} (of {c.vocab}), position {positions[i]} "
                f"(of {self.positions}), row {rows[i]} of {page_tables.shape[0]} with {page_tables.shape[1]} pages"
            )
        return all_logits, best

    def close(self) -> None:
        """End the threads and free the memory; the decoder cannot be used after that."""
        if self._handle is not None:
            self._dll.lt_decoder_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


def page_bytes(config: DecoderConfig, layers: int) -> int:
    """Bytes of one cache page for a model of `layers` layers."""
    element = 2 if config.cache_dtype == "fp16" else 4
    return layers * 2 * config.kv_heads * PAGE_TOKENS * config.head_dim * element


def _check_model(c: DecoderConfig, w: DecoderWeights) -> None:
    for name, value, unit in (
        ("hidden", c.hidden, 32),
        ("ffn", c.ffn, 32),
        ("head_dim", c.head_dim, 16),
        ("heads * head_dim", c.heads * c.head_dim, 32),
        ("heads", c.heads, c.kv_heads),
    ):
        if value <= 0 or value % unit != 0:
            raise ModelError(f"the CPU kernels need {name} in multiples of {unit}, not {value}")
    if c.threads < 1:
        raise ConfigError(f"threads must be at least 1, not {c.threads}")
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"q": (q, c.hidden), "k": (kv, c.hidden), "v": (kv, c.hidden), "o": (c.hidden, q)}
    shapes |= {"gate": (c.ffn, c.hidden), "up": (c.ffn, c.hidden), "down": (c.hidden, c.ffn)}
    widths = {"attention_norm": c.hidden, "mlp_norm": c.hidden, "q_bias": q, "k_bias": kv, "v_bias": kv}
    widths |= {"o_bias": c.hidden, "q_norm": c.head_dim, "k_norm": c.head_dim}
    for i, layer in enumerate(w.layers):
        for name, shape in shapes.items():
            m: PackedMatrix = getattr(layer, name)
            if (m.rows, m.cols) != shape:
                raise ModelError(f"layer {i}: '{name}' is {m.rows} x {m.cols}, not {shape[0]} x {shape[1]}")
        for name, width in widths.items():
            vector = getattr(layer, name)
            if vector is not None:
                _expect_weight(f"layer {i}: '{name}'", vector, (width,))
    for name, m in (("embedding", w.embedding), ("head", w.head)):
        if (m.rows, m.cols) != (c.vocab, c.hidden):
            raise ModelError(f"'{name}' is {m.rows} x {m.cols}, not {c.vocab} x {c.hidden}")
    _expect_weight("'final_norm'", w.final_norm, (c.hidden,))
    half = w.cosine.shape[-1]
    if w.cosine.ndim != 2 or not 0 < 2 * half <= c.head_dim:
        raise ModelError(f"rotary tables of shape {w.cosine.shape} do not fit heads of {c.head_dim}")
    _expect_weight("'cosine'", w.cosine, w.cosine.shape)
    _expect_weight("'sine'", w.sine, w.cosine.shape)


def _expect_weight(name: str, array: Float32, shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ModelError(f"{name} must be contiguous float32 {shape}, not {array.dtype} {array.shape}")
