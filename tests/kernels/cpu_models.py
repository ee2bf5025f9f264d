"""Random packed models, and a plain numpy decoder that shares no code with the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longturn.kernels.cpu.native import DecoderConfig, DecoderWeights, LayerWeights
from longturn.kernels.cpu.packing import PackedMatrix, pack_blocks

Array = npt.NDArray[Any]


def i32(values: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def random_blocks(rng: np.random.Generator, kind: str, rows: int, cols: int, size: float = 0.1) -> Array:
    """GGUF blocks with every bit pattern of quants and moderate scales."""
    count = cols // 32
    width = 20 if kind == "q4_1" else 34
    blocks = rng.integers(0, 256, (rows, count, width), dtype=np.uint8)
    d = (rng.uniform(0.3, 1.0, (rows, count, 1)) * (size / 7.5 if kind == "q4_1" else size / 127)).astype(np.float16)
    blocks[..., :2] = d.view(np.uint8)
    if kind == "q4_1":
        m = (-7.5 * d.astype(np.float32) * rng.uniform(0.8, 1.2, d.shape)).astype(np.float16)
        blocks[..., 2:4] = m.view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantise(kind: str, blocks: Array) -> Array:
    """float64 [rows, cols] of GGUF blocks, written from the format's description."""
    rows = blocks.shape[0]
    if kind == "q4_1":
        b = blocks.reshape(rows, -1, 20)
        d = b[..., 0:2].copy().view(np.float16).astype(np.float64)
        m = b[..., 2:4].copy().view(np.float16).astype(np.float64)
        q = np.concatenate([b[..., 4:] & 15, b[..., 4:] >> 4], axis=-1).astype(np.float64)
        return (q * d + m).reshape(rows, -1)
    b = blocks.reshape(rows, -1, 34)
    d = b[..., 0:2].copy().view(np.float16).astype(np.float64)
    return (b[..., 2:].copy().view(np.int8).astype(np.float64) * d).reshape(rows, -1)


def quantise_activations(x: Array) -> Array:
    """What the kernels' 12-bit activation blocks stand for, in float64 (the scale as the kernels' fp32 has it)."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(2032), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse).astype(np.float64)
    return (q * (top / np.float32(2032)).astype(np.float64)).reshape(x.shape)


class TinyModel:
    """A random model in packed form and in float64."""

    def __init__(
        self,
        seed: int,
        *,
        layers: int = 3,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 32,
        hidden: int = 96,
        ffn: int = 160,
        vocab: int = 203,
        positions: int = 1200,
        rotary_dim: int | None = None,
        biases: bool = False,
        head_norms: bool = False,
        tied: bool = True,
        kind: str = "q4_1",
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, 1e-5
        self.hidden, self.ffn, self.vocab, self.kind = hidden, ffn, vocab, kind

        def matrix(kind: str, rows: int, cols: int, size: float) -> tuple[PackedMatrix, Array]:
            blocks = random_blocks(rng, kind, rows, cols, size)
            return pack_blocks(kind, blocks), dequantise(kind, blocks)  # type: ignore[arg-type]

        def vector(n: int, centre: float) -> npt.NDArray[np.float32]:
            return (centre + 0.2 * rng.standard_normal(n)).astype(np.float32)

        q, kv = heads * head_dim, kv_heads * head_dim
        shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        self.plain: list[dict[str, Array]] = []
        packed_layers = []
        for _ in range(layers):
            packed: dict[str, Any] = {}
            plain: dict[str, Array] = {}
            for name, (rows, cols) in shapes.items():
                packed[name], plain[name] = matrix(kind, rows, cols, 2.0 / cols**0.5)
            vectors = {"attention_norm": (hidden, 1.0), "mlp_norm": (hidden, 1.0)}
            if biases:
                vectors |= {"q_bias": (q, 0.0), "k_bias": (kv, 0.0), "v_bias": (kv, 0.0), "o_bias": (hidden, 0.0)}
            if head_norms:
                vectors |= {"q_norm": (head_dim, 1.0), "k_norm": (head_dim, 1.0)}
            for name, (n, centre) in vectors.items():
                packed[name] = vector(n, centre)
                plain[name] = packed[name].astype(np.float64)
            packed_layers.append(LayerWeights(**packed))
            self.plain.append(plain)
        embedding, self.embedding = matrix("q8_0", vocab, hidden, 1.0)
        head, self.head = (embedding, self.embedding) if tied else matrix("q8_0", vocab, hidden, 1.0)
        final = vector(hidden, 1.0)
        self.final = final.astype(np.float64)
        rotary_dim = rotary_dim or head_dim
        angles = np.outer(np.arange(positions), 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim))
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.cosine, self.sine = cosine.astype(np.float64), sine.astype(np.float64)
        self.weights = DecoderWeights(tuple(packed_layers), embedding, head, final, cosine, sine)

    def config(self, *, threads: int = 1, cache: str = "fp32", use_amx: bool = True) -> DecoderConfig:
        return DecoderConfig(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn, self.vocab, self.eps,
            cache_dtype=cache, threads=threads, use_amx=use_amx,  # type: ignore[arg-type]
        )  # fmt: skip

    def logits(self, tokens: Array, *, quantised: bool) -> Array:
        """float64 [tokens, vocab] of one sequence; `quantised` rounds each product's input as the kernels do."""
        act = quantise_activations if quantised else (lambda x: x)

        def norm(x: Array, w: Array) -> Array:
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * w

        def rotate(x: Array) -> Array:
            half = self.cosine.shape[1]
            c, s = self.cosine[: len(x), None], self.sine[: len(x), None]
            a, b = x[..., :half], x[..., half : 2 * half]
            return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)

        x = self.embedding[tokens]
        n = len(tokens)
        mask = np.triu(np.full((n, n), -np.inf), 1)
        for p in self.plain:
            h = act(norm(x, p["attention_norm"]))
            q, k, v = (h @ p[i].T + p.get(f"{i}_bias", 0.0) for i in "qkv")
            q = q.reshape(n, self.heads, -1)
            k, v = k.reshape(n, self.kv_heads, -1), v.reshape(n, self.kv_heads, -1)
            if "q_norm" in p:
                q, k = norm(q, p["q_norm"]), norm(k, p["k_norm"])
            q, k = rotate(q), rotate(k)
            share = self.heads // self.kv_heads
            k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
            scores = np.einsum("thd,shd->hts", q, k) / self.head_dim**0.5 + mask
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out = np.einsum("hts,shd->thd", weights, v).reshape(n, -1)
            x = x + act(out) @ p["o"].T + p.get("o_bias", 0.0)
            h = act(norm(x, p["mlp_norm"]))
            gate, up = h @ p["gate"].T, h @ p["up"].T
            x = x + act(gate / (1 + np.exp(-gate)) * up) @ p["down"].T
        return act(norm(x, self.final)) @ self.head.T
