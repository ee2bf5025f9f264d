"""NVFP4 experts of a few tokens, and the shared one in MXFP8, in one launch that never stops streaming weights.

One program a multiprocessor takes tiles of 64 rows of both products, expert after expert: an even share of most of
them, and of the rest as many as it gets weights for. A warp fetches (moe_stream_fetch.py), eight compute
(moe_stream_kernel.py). Between the two products is a barrier of the grid; weights go on coming meanwhile.

An expert with one token, as most are when few tokens choose among many, leaves seven of the tensor cores' eight columns
idle. Its products have a group of NVFP4 as a column each, x being 0 in all other groups: codes are multiplied without
their factors, which meet sums of 16 products instead of every weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longturn.kernels.moe_stream_fetch import scales_tile, words_tile
from longturn.kernels.moe_stream_kernel import _stream_experts
from longturn.kernels.moe_stream_parts import SLOT_BYTES, SLOT_SCALE_BYTES, TILE_ROWS, WARPS
from longturn.kernels.packed_weights import GROUP, PackedWeight, WeightFormat

_PROGRAMS = 132
"""Multiprocessors of an H200 or H100 SXM. All programs wait for each other, so that a card must have as many."""
_SHARED_BYTES = 226 * 1024
"""Of a program on compute capability 9.0, less what barriers and the compiler take."""
_SUM_BYTES = WARPS * TILE_ROWS * 8 * 4
_LEAST_SLOTS, _MOST_SLOTS = 3, 6
_MOST_TOKENS, _MOST_PAIRS = 8, 32


def stream_slots(normed: Tensor, pairs: int, routed: PackedWeight, shared: PackedWeight, inter: int) -> int:
    """Turns of weights that `stream_experts` would keep on the chip; 0 if it cannot do it.

    It takes up to eight tokens in fp16, whose rows are copied to shared memory, and 32 pairs, one for each lane of a
    warp, on a card of compute capability 9.0 that runs all its programs at once.
    """
    tokens, width = normed.shape
    if (routed.format, shared.format) != (WeightFormat.NVFP4, WeightFormat.MXFP8):
        return 0
    if tokens > _MOST_TOKENS or not 0 < pairs <= _MOST_PAIRS or width % 1024 or inter % 1024 or inter > width:
        return 0
    device = normed.device
    if not normed.is_cuda or normed.dtype != torch.float16 or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    # Kernels are noted on `meta`, which stands for a card that has them.
    if device.type == "cuda" and torch.cuda.get_device_properties(device).multi_processor_count < _PROGRAMS:
        return 0
    room = _SHARED_BYTES - 2 * _MOST_TOKENS * width - _SUM_BYTES
    slots = min(room // (SLOT_BYTES + SLOT_SCALE_BYTES), _MOST_SLOTS)
    return slots if slots >= _LEAST_SLOTS else 0


def _boxes(weight: PackedWeight) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Words and scales of a weight as the copy engine takes them."""
    *lead, width = weight.shape
    rows = 1
    for extent in lead:
        rows *= extent
    words = width // weight.format
    scales = width // GROUP[weight.format]
    turn = 64 if weight.format is WeightFormat.NVFP4 else 16
    return (
        TensorDescriptor(weight.words, [words // 64, rows, 64], [64, words, 1], [4, 32, 64], words_tile()),
        TensorDescriptor(weight.scales, [rows, scales], [scales, 1], [32, turn], scales_tile(turn)),
    )


def stream_experts(
    normed: Tensor, experts: Tensor, w13: PackedWeight, w2: PackedWeight, shared_w13: PackedWeight,
    shared_w2: PackedWeight, hidden: Tensor, parts: Tensor, counters: Tensor, slots: int, *, top: int,
    alpha: float, beta: float, limit: float, flags: dict[str, Any],
) -> None:  # fmt: skip
    """Experts' parts of the output of normed [T, n] fp16, as `stream_slots` takes them: parts fp32 [T * top + T, n].

    experts int32 [T * top], -1 for a padded row's, whose parts are not written; hidden fp16, room for
    [T * top + T, i]; counters int32 [4], 0 before. `flags` are PDL and the launch's own.
    """
    tokens, width = normed.shape
    pairs = experts.shape[0]
    _stream_experts[(_PROGRAMS,)](
        *_boxes(w13), w13.row_scales, *_boxes(w2), w2.row_scales, *_boxes(shared_w13), shared_w13.row_scales,
        *_boxes(shared_w2), shared_w2.row_scales, normed, experts, hidden, parts, counters, tokens,
        PAIRS=pairs, TOP=top, K=width, INTER=w2.shape[-1], SLOTS=slots, PROGRAMS=_PROGRAMS,
        ALPHA=alpha, BETA=beta, LIMIT=limit, num_warps=WARPS, **flags,
    )  # fmt: skip
