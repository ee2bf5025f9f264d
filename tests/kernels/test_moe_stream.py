"""Experts of a few tokens in one launch that streams weights: which it takes, how tiles lie, and the kernel on a Hopper
card."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.moe_stream import stream_experts, stream_slots
from longturn.kernels.moe_stream_parts import (
    SLOT_BYTES,
    SLOT_SCALE_BYTES,
    mxfp8_scales_shared,
    nvfp4_scales_shared,
    words_shared,
)
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, pack_mxfp8, pack_nvfp4, random_packed
from longturn.ops.moe import SwigluOai, swiglu_oai

NVFP4, MXFP8 = WeightFormat.NVFP4, WeightFormat.MXFP8
EXPERTS, TOP = 16, 4
on_hopper = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


def at(offset: int, bases: list[list[int]]) -> tuple[int, ...]:
    """Coordinates of an element of shared memory."""
    found = [0, 0, 0]
    for bit, base in enumerate(bases):
        if offset >> bit & 1:
            found = [a ^ b for a, b in zip(found, base, strict=True)]
    return tuple(found)


def test_words_lie_where_the_copy_engine_puts_them() -> None:
    """Two boxes of [4 pieces, 32 rows, 128 bytes], 16 bytes each xored by the row's low three bits."""
    for half, piece, row, chunk in product(range(2), range(4), range(32), range(8)):
        first = ((half * 4 + piece) * 32 + row) * 128 + (chunk ^ row % 8) * 16
        lane, which = divmod(chunk, 2)
        for word in range(8):
            found = at(first // 2 + word, words_shared().offset_bases)
            assert found == (2 * piece + which, 32 * half + row, 8 * lane + word)


def test_a_quarter_of_a_warp_meets_all_banks() -> None:
    where = {at(offset, words_shared().offset_bases): offset * 2 // 16 for offset in range(0, SLOT_BYTES // 2, 8)}
    for s in range(8):
        for row in range(0, 64, 2):
            assert sorted(where[s, row + n // 4, 8 * (n % 4)] % 8 for n in range(8)) == list(range(8))


def test_scales_lie_where_the_copy_engine_puts_them() -> None:
    """NVFP4: rows of 64 bytes, 16 each xored by bits 1 and 2 of the row; MXFP8: rows of 16 bytes."""
    for row in range(64):
        for byte in range(64):
            piece, group = divmod(byte, 16)
            offset = row * 64 + (piece ^ row >> 1 & 3) * 16 + group
            lane, which, column = group // 4, group // 2 % 2, group % 2
            assert at(offset, nvfp4_scales_shared().offset_bases) == (2 * piece + which, row, 2 * lane + column)
        for byte in range(16):
            assert at(row * 16 + byte, mxfp8_scales_shared().offset_bases) == (byte // 4, row, byte % 4)
    assert 64 * 64 == SLOT_SCALE_BYTES


def test_a_cpu_streams_nothing() -> None:
    routed, shared = (random_packed(form, 4, 1024, scale=1.0, device="cpu") for form in (NVFP4, MXFP8))
    assert stream_slots(torch.zeros(8, 1024, dtype=torch.float16), 32, routed, shared, 1024) == 0


@on_hopper
def test_which_it_takes() -> None:
    routed, shared = (random_packed(form, 4, 1024, scale=1.0, device="cuda") for form in (NVFP4, MXFP8))

    def slots(
        tokens: int, width: int = 6144, inter: int = 3072, pairs: int = 0, first: PackedWeight = routed,
        second: PackedWeight = shared,
    ) -> int:  # fmt: skip
        x = torch.zeros(tokens, width, dtype=torch.float16, device="cuda")
        return stream_slots(x, pairs or 4 * tokens, first, second, inter)

    assert slots(1) == slots(8) == 3
    assert slots(8, 2048, 1024) == 4
    assert slots(9) == 0 and slots(8, pairs=33) == 0
    assert slots(8, 6400) == 0 and slots(8, 2048, 512) == 0 and slots(8, 8192, 1024) == 0
    assert slots(8, first=shared) == 0 and slots(8, second=routed) == 0
    assert stream_slots(torch.zeros(8, 6144, dtype=torch.bfloat16, device="cuda"), 32, routed, shared, 3072) == 0


def expected(
    normed: Tensor, experts: Tensor, w13: PackedWeight, w2: PackedWeight, s13: PackedWeight, s2: PackedWeight
) -> tuple[Tensor, Tensor]:
    """Activations and parts of all pairs and then of the shared expert, fp32; zeros for pairs that are not there."""
    x = normed.float()

    def one(row: Tensor, first: Tensor) -> Tensor:
        gate, up = (first @ row).chunk(2)
        return swiglu_oai(gate, up, SwigluOai())

    inter, width = w2.shape[-1], w2.shape[-2]
    pairs = experts.numel()
    hidden = torch.zeros(pairs + len(x), inter, device="cuda")
    parts = torch.zeros(pairs + len(x), width, device="cuda")
    dense = {e: (w13[e].dequantised(), w2[e].dequantised()) for e in set(experts.tolist()) if e >= 0}
    dense[-1] = (s13.dequantised(), s2.dequantised())
    of_row = [*experts.tolist(), *[-1] * len(x)]
    for row, expert in enumerate(of_row):
        if row < pairs and expert < 0:
            continue
        token = row // TOP if row < pairs else row - pairs
        hidden[row] = one(x[token], dense[expert][0])
        parts[row] = dense[expert][1] @ hidden[row]
    return hidden, parts


def streamed(
    normed: Tensor, experts: Tensor, w13: PackedWeight, w2: PackedWeight, s13: PackedWeight, s2: PackedWeight
) -> tuple[Tensor, Tensor]:
    form = SwigluOai()
    rows, inter, width = experts.numel() + len(normed), w2.shape[-1], normed.shape[1]
    hidden = torch.full((rows, inter), float("nan"), dtype=torch.float16, device="cuda")
    parts = torch.full((rows, width), float("nan"), device="cuda")
    slots = stream_slots(normed, experts.numel(), w13, s13, inter)
    assert slots
    stream_experts(
        normed, experts, w13, w2, s13, s2, hidden, parts, torch.zeros(4, dtype=torch.int32, device="cuda"), slots,
        top=TOP, alpha=form.alpha, beta=form.beta, limit=form.limit, flags={"PDL": False},
    )  # fmt: skip
    return hidden, parts


def layer(width: int, inter: int) -> tuple[PackedWeight, PackedWeight, PackedWeight, PackedWeight]:
    shapes = (
        (NVFP4, (EXPERTS, 2 * inter, width)), (NVFP4, (EXPERTS, width, inter)), (MXFP8, (2 * inter, width)),
        (MXFP8, (width, inter)),
    )  # fmt: skip
    w13, w2, s13, s2 = (random_packed(form, *shape, scale=shape[-1] ** -0.5, device="cuda") for form, shape in shapes)
    return w13, w2, s13, s2


CHOICES = {
    "each its own": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]] * 2,
    "all the same": [[15, 3, 0, 7]] * 8,
    "one, two, three": [[0, 1, 2, 3], [1, 2, 4, 5], [2, 6, 7, 8], [9, 10, 11, 12]] * 2,
    "padded rows": [[-1] * 4, [4, 5, 6, 7], [-1] * 4, [4, 9, 10, 11]] * 2,
    "nobody": [[-1] * 4] * 8,
}


@on_hopper
@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("width", "inter"), [(6144, 3072), (2048, 1024), (1024, 1024), (5120, 2048)])
def test_stream_experts(width: int, inter: int, tokens: int, chosen: str) -> None:
    weights = layer(width, inter)
    normed = torch.randn(tokens, width, device="cuda").half()
    experts = torch.tensor(CHOICES[chosen][:tokens], dtype=torch.int32, device="cuda").flatten()
    hidden, parts = streamed(normed, experts, *weights)
    want_hidden, want_parts = expected(normed, experts, *weights)
    there = torch.cat((experts >= 0, torch.ones(tokens, dtype=torch.bool, device="cuda")))
    for got, want in ((hidden.float()[there], want_hidden[there]), (parts[there], want_parts[there])):
        worst = ((got - want).norm(dim=1) / want.norm(dim=1)).max().item()
        assert worst < 2e-3
    assert parts[~there].isnan().all() and hidden[~there].isnan().all()
    again = streamed(normed, experts, *weights)
    assert torch.equal(again[1][there], parts[there]) and torch.equal(again[0][there], hidden[there])


@on_hopper
@pytest.mark.parametrize("tokens", [1, 8])
def test_every_code_and_scale(tokens: int) -> None:
    """Unit vectors pick single weights of the first product: one token's experts, and those of several."""
    width = inter = 1024
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.repeat(2 * inter, width // 2 // 256)
    scales = byte[:, None].repeat(2 * inter // 256, width // 16)
    scales[(scales & 0x7F) == 0x7F] = 0
    scales[(scales & 0x7F) > 0x50] -= 0x30  # SwiGLU's clamp would hide what is larger
    first = pack_nvfp4(codes, scales.view(torch.float8_e4m3fn), 0.25).to("cuda")
    numbers = byte[(byte & 0x7F) < 0x60].repeat(2)[:256]
    code = numbers.repeat(2 * inter, width // 256).view(torch.float8_e4m3fn)
    shared = pack_mxfp8(code, torch.randint(120, 127, (2 * inter, width // 32), dtype=torch.uint8)).to("cuda")
    _, w2, _, s2 = layer(width, inter)
    words, byte_scales, rows_of = (
        t.expand(EXPERTS, *t.shape).contiguous() for t in (first.words, first.scales, first.row_scales)
    )
    w13 = PackedWeight(NVFP4, words, byte_scales, rows_of)
    dense = [weight.dequantised() for weight in (first, shared)]
    experts = torch.tensor([[3, 2, 1, 0]] * tokens, dtype=torch.int32, device="cuda").flatten()
    for column in range(0, width, tokens if tokens > 1 else 37):
        normed = torch.zeros(tokens, width, dtype=torch.float16, device="cuda")
        which = torch.arange(column, column + tokens, device="cuda")
        normed[torch.arange(tokens, device="cuda"), which] = 1.0
        hidden, _ = streamed(normed, experts, w13, w2, shared, s2)
        for rows, weight in ((hidden[: 4 * tokens : 4], dense[0]), (hidden[4 * tokens :], dense[1])):
            gate, up = weight[:, which].T.chunk(2, dim=1)
            torch.testing.assert_close(rows.float(), swiglu_oai(gate, up, SwigluOai()), rtol=1e-3, atol=1e-6)
