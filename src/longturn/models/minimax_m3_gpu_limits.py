"""What of MiniMax-M3 the GPU kernels take, and how much memory it needs there."""

from __future__ import annotations

from longturn.config import PAGE_TOKENS
from longturn.models.minimax_m3_config import MiniMaxM3Config

LARGEST_BATCH = 64
"""Rows of a decode step that the kernels for few tokens take."""


def why_not_on_gpu(c: MiniMaxM3Config) -> str | None:
    """What the kernels cannot do of this model; None if nothing."""
    reasons = (
        (c.head_dim != 128, f"head_dim {c.head_dim} (128 is)"),
        (not any(c.sparse_layers), "no layer with sparse attention"),
        (c.index_dim != c.head_dim, f"an index of {c.index_dim} channels beside heads of {c.head_dim}"),
        (c.selection.local < 1, "no local block"),
        (not _power_of_two(c.selection.top), f"{c.selection.top} blocks a query (a power of two is)"),
        (not any(c.moe_layers), "no layer with experts"),
        (not _power_of_two(c.experts), f"{c.experts} experts (a power of two is)"),
        (not _power_of_two(c.top_experts), f"{c.top_experts} experts a token (a power of two is)"),
        (c.shared_ffn != c.expert_ffn, f"a shared expert of width {c.shared_ffn} beside experts of {c.expert_ffn}"),
        (c.rope.scale != 1.0, "scaled rotary embedding"),
        (c.heads // c.kv_heads > 16, f"{c.heads // c.kv_heads} query heads a key/value head (16 at most are)"),
    )
    found = [text for wrong, text in reasons if wrong]
    return f"not supported by the GPU kernels: {found[0]}" if found else None


NVFP4_BYTES = 0.57
"""Of one value of a quantised expert, scales counted; MXFP8 experts take twice that."""


def weight_bytes(c: MiniMaxM3Config, expert_value_bytes: float = 2.0) -> int:
    """Bytes of all weights: bf16, routed experts of `expert_value_bytes` a value, routers fp32."""
    moe_layers, sparse_layers = sum(c.moe_layers), sum(c.sparse_layers)
    values = c.layers * (2 * c.q_width + 2 * c.kv_width) * c.hidden
    values += sparse_layers * (c.index_q_width + c.index_dim) * c.hidden
    values += (1 if c.tied else 2) * c.vocab_size * c.hidden
    values += (c.layers - moe_layers) * 3 * c.hidden * c.dense_ffn
    values += moe_layers * 3 * c.hidden * c.shared_ffn
    routed = moe_layers * expert_values(c) * expert_value_bytes
    return 2 * values + int(routed) + 4 * moe_layers * c.experts * (c.hidden + 1)


def expert_values(c: MiniMaxM3Config) -> int:
    """Values of one layer's routed experts."""
    return 3 * c.hidden * c.experts * c.expert_ffn


def scratch_bytes(c: MiniMaxM3Config, tokens: int, max_context_tokens: int, *, packed_experts: bool = False) -> int:
    """About what steps of up to `tokens` tokens take beside weights and cache, generously. Quantised experts are
    unpacked for steps of many tokens, a layer at a time.

    Every size runs once before it is captured, so that scratch exists twice for a while.
    """
    choices = tokens * c.top_experts
    attention = tokens * c.heads * c.selection.top * (c.head_dim + 2) * 2
    scores = tokens * c.kv_heads * -(-max_context_tokens // PAGE_TOKENS) * 4
    parts = max((tokens + choices) * c.hidden, 2 * tokens * max(c.expert_ffn, c.dense_ffn))
    moe = (choices + 128 * c.experts + 2 * tokens) * c.expert_ffn * 2 + parts * 2
    moe += tokens * (8 * c.experts * 4 + c.dense_ffn * 2)
    rows = tokens * (8 * c.hidden + 3 * c.q_width + 4 * c.kv_width) * 2
    logits = 3 * LARGEST_BATCH * c.vocab_size * 4
    unpacked = 2 * expert_values(c) if packed_experts else 0
    return 2 * (attention + scores + moe + rows + logits + unpacked)


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
