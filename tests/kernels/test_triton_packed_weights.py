"""Packed NVFP4 and MXFP8 weights against the formats' references, and the kernels that read them in Triton's
interpreter."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

import triton
import triton.language as tl

from longturn.kernels.moe_few import MoePlan, MoeScratch, moe_few_tokens
from longturn.kernels.moe_one import moe_one_token
from longturn.kernels.packed_weights import (
    GROUP,
    SCALE_BITS,
    PackedWeight,
    WeightFormat,
    join_rows,
    pack_mxfp8,
    pack_nvfp4,
    random_packed,
)
from longturn.kernels.packed_weights_decode import ASSEMBLY, decode, load_scales, part_columns
from longturn.kernels.small_linear import LinearPlan, small_linear
from longturn.ops import mxfp8, nvfp4
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, expert, moe, route

FORMATS = [WeightFormat.NVFP4, WeightFormat.MXFP8]


def rand(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def packed(form: WeightFormat, *shape: int, seed: int, scale: float = 1.0) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight in a format, and what the format's reference says it is."""
    weight = rand(*shape, seed=seed, scale=scale).flatten(0, -2)
    if form is WeightFormat.NVFP4:
        q = nvfp4.quantize_weight(weight)
        made = pack_nvfp4(q.packed, q.scales, 1.0 / q.global_scale)
        reference = q.dequantize()
    elif form is WeightFormat.MXFP8:
        m = mxfp8.quantize_weight(weight)
        made, reference = pack_mxfp8(m.values, m.scales), m.dequantize()
    else:
        return PackedWeight.plain(weight.view(*shape)), weight.view(*shape)
    lead = shape[:-1]
    return (
        PackedWeight(
            form, made.words.view(*lead, -1), made.scales.view(*lead, -1), made.row_scales.view(*lead)
        ),
        reference.view(*shape),
    )  # fmt: skip


def every_nvfp4() -> tuple[torch.Tensor, torch.Tensor]:
    """All byte values in each row, and all e4m3 bytes as the rows' scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    return codes, scales


def every_mxfp8() -> tuple[torch.Tensor, torch.Tensor]:
    """All e4m3 values that are numbers in each row, and scales of 2^-127 to 2^112 (with 448 still fp32) below one of
    their row that is up to 2^21 larger."""
    values = torch.arange(256, dtype=torch.uint8).repeat(240, 1)
    values[(values & 0x7F) == 0x7F] = 0
    scales = torch.arange(240, dtype=torch.uint8)[:, None].repeat(1, 8)
    scales[:, 0] = (scales[:, 0].int() + torch.arange(240) % 22).clamp(max=239).to(torch.uint8)
    return values.view(torch.float8_e4m3fn), scales


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_every_nvfp4_code_and_scale_is_exact() -> None:
    codes, scales = every_nvfp4()
    reference = nvfp4.Nvfp4Weight(codes, scales, torch.ones(1), global_divides=False).dequantize()
    same(pack_nvfp4(codes, scales, 1.0).dequantised(), reference)


def test_every_mxfp8_value_is_exact() -> None:
    values, scales = every_mxfp8()
    same(pack_mxfp8(values, scales).dequantised(), mxfp8.Mxfp8Weight(values, scales).dequantize())


def test_nan_makes_its_row_nan() -> None:
    q = nvfp4.quantize_weight(rand(3, 64, seed=1))
    scales = q.scales.view(torch.uint8).clone()
    scales[1, 2] = 0x7F
    got = pack_nvfp4(q.packed, scales.view(torch.float8_e4m3fn), 1.0).dequantised().isnan().all(dim=1)
    assert got.tolist() == [False, True, False]
    m = mxfp8.quantize_weight(rand(3, 64, seed=1))
    bad, values = m.scales.clone(), m.values.view(torch.uint8).clone()
    bad[0, 1], values[2, 5] = 255, 0xFF
    got = pack_mxfp8(values.view(torch.float8_e4m3fn), bad).dequantised().isnan().all(dim=1)
    assert got.tolist() == [True, False, True]


def test_joined_rows_keep_their_global_scales() -> None:
    parts = [nvfp4.quantize_weight(rand(5, 64, seed=n), largest=9.0 * n) for n in (1, 2)]
    joined = join_rows([pack_nvfp4(q.packed, q.scales, 1 / q.global_scale) for q in parts])
    torch.testing.assert_close(joined.dequantised(), torch.cat([q.dequantize() for q in parts]), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="MXFP8, NVFP4"):
        join_rows([joined, packed(WeightFormat.MXFP8, 2, 64, seed=1)[0]])


def test_experts_are_filled_one_by_one() -> None:
    one, reference = packed(WeightFormat.NVFP4, 4, 64, seed=3)
    stacked = PackedWeight.allocate(WeightFormat.NVFP4, 3, 4, 64, device="cpu")
    stacked[1].copy_(one)
    torch.testing.assert_close(stacked.dequantised()[1], reference, rtol=1e-6, atol=0)
    assert stacked.shape == (3, 4, 64)
    with pytest.raises(ValueError, match="cannot copy"):
        stacked[0].copy_(stacked)


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_have_the_wanted_spread(form: WeightFormat) -> None:
    weight = random_packed(form, 2, 64, 512, scale=0.02, device="cpu").dequantised()
    assert 0.015 < weight.std() < 0.025


@triton.jit
def _decode_all(words, scales, out, ROWS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    row, word = tl.arange(0, ROWS), tl.arange(0, K // PARTS)
    row = row + tl.program_id(0) * ROWS
    tile = tl.load(words + row[:, None] * (K // PARTS) + word[None, :])
    parts = decode(tile, load_scales(scales, row, 0, row >= 0, K // PARTS, PARTS, K), PARTS, False)
    for j in tl.static_range(PARTS):
        tl.store(out + row[:, None] * K + part_columns(word, j, PARTS)[None, :], parts[j])


@pytest.mark.parametrize("form", FORMATS)
def test_kernels_decode_every_value_exactly(form: WeightFormat) -> None:
    weight = pack_nvfp4(*every_nvfp4(), 1.0) if form is WeightFormat.NVFP4 else pack_mxfp8(*every_mxfp8())
    rows, width = weight.shape
    out = torch.full((rows, width), float("nan"))
    _decode_all[(rows // 16,)](weight.words, weight.scales, out, ROWS=16, K=width, PARTS=int(form))
    expected = PackedWeight(form, weight.words, weight.scales, torch.ones(rows)).dequantised()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "warps"), [(1, 4), (3, 4), (3, 2), (17, 4)])
@pytest.mark.parametrize(("norm", "residual", "width"), [(True, False, 192), (False, True, 256), (True, True, 128)])
def test_small_linear(form: WeightFormat, tokens: int, warps: int, norm: bool, residual: bool, width: int) -> None:
    weight, dense = packed(form, 70, width, seed=2)
    x, norm_weight, base = rand(tokens, width, seed=1), rand(width, seed=3, scale=0.3), rand(tokens, 70, seed=4)
    expected = (gemma_rms_norm(x, norm_weight, 1e-6) if norm else x) @ dense.T + (base if residual else 0)
    out = torch.full((tokens, 70), float("nan"))
    small_linear(
        x, weight, out, norm_weight=norm_weight if norm else None, normed=torch.full_like(x, float("nan")),
        residual=base if residual else None, plan=LinearPlan(rows=16, tile_rows=32, warps=warps),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_plain_weights_in_slices() -> None:
    x, weight, base = rand(5, 256, seed=1), rand(70, 256, seed=2), rand(5, 70, seed=3)
    out = torch.full((5, 70), float("nan"))
    small_linear(x, weight, out, residual=base, plan=LinearPlan(slices=True))
    torch.testing.assert_close(out, base + x @ weight.T, rtol=1e-4, atol=1e-3)


def fp16_halves(register: np.ndarray) -> np.ndarray:
    """fp16 [2, n] of registers uint32 [n], the low half first."""
    register = np.atleast_1d(register)
    return np.stack([register & 0xFFFF, register >> 16]).astype(np.uint16).view(np.float16)


def fp16_register(halves: np.ndarray) -> np.ndarray:
    low, high = halves.astype(np.float16).view(np.uint16).astype(np.uint32)
    return low | high << np.uint32(16)


def run_ptx(text: str, words: np.ndarray, factors: np.ndarray) -> list[np.ndarray]:
    """The outputs of one of the decoders' assembly texts, by a small interpreter of the instructions it uses.

    Inputs are read only as long as no output shares their register, which the constraints must promise ("=&r").
    """
    outputs = len(set(re.findall(r"\$\d+", text))) - 2
    registers = {f"${outputs}": words, f"${outputs + 1}": factors}
    for line in text[1:-1].split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, arguments = line.strip().split(" ", 1)
        if arguments.startswith("{"):  # two 16-bit registers of one
            low, high = arguments[1 : arguments.index("}")].split(", ")
            whole = registers[arguments.split("}, ")[1]]
            registers[low], registers[high] = whole & np.uint32(0xFFFF), whole >> np.uint32(16)
            continue
        to, *of = [argument.strip() for argument in arguments.split(",")]
        a, *rest = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in of]
        if operation == "mul.rn.f16x2":
            registers[to] = fp16_register(fp16_halves(a) * fp16_halves(rest[0]))
        elif operation == "cvt.rn.f16x2.e4m3x2":
            bytes_ = np.stack([a & 0xFF, a >> 8]).astype(np.uint8)
            registers[to] = fp16_register(torch.from_numpy(bytes_).view(torch.float8_e4m3fn).to(torch.float32).numpy())
        elif operation == "cvt.f32.f16":
            registers[to] = fp16_halves(a)[0].astype(np.float32).view(np.uint32)
        elif operation == "prmt.b32":
            assert not rest[0] and rest[1] == 0x3120
            inner = ((a & 0xFF00) << np.uint32(8)) | ((a & 0xFF0000) >> np.uint32(8))
            registers[to] = (a & np.uint32(0xFF0000FF)) | inner
        elif operation == "lop3.b32":
            assert rest[2] == 0x28
            registers[to] = (a ^ rest[0]) & rest[1]
        else:
            step = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "shl.b32": np.left_shift}[operation]
            registers[to] = step(a, rest[0]).astype(np.uint32)
    return [registers[f"${n}"] for n in range(outputs)]


@pytest.mark.parametrize("form", FORMATS)
def test_the_assembly_decodes_every_word(form: WeightFormat) -> None:
    """The interpreter of Triton cannot run it, so it is run here: all words, next to all kinds of neighbours."""
    word = np.arange(1 << 16, dtype=np.uint32)
    other = (word * np.uint32(40503)) & np.uint32(0xFFFF)  # odd, so every word is some word's neighbour
    multiplier, addend = SCALE_BITS[form]
    for byte, next_byte in ((0, 143), (77, 8), (143, 0)) if form is WeightFormat.NVFP4 else ((22, 9), (1, 22)):
        bits = [np.uint32(b * multiplier + addend) for b in (byte, next_byte)]
        pair, factor = word | other << np.uint32(16), bits[0] | bits[1] << np.uint32(16)
        narrow, wide = ASSEMBLY[form]
        halves = run_ptx(narrow, pair, factor)
        single = run_ptx(wide, pair, factor)
        for half, which, b in ((0, word, byte), (1, other, next_byte)):
            count = 1 << 16
            # One group a row, and this word first in it; the other words of the group are zero.
            words = torch.zeros(count, GROUP[form] // int(form), dtype=torch.int16)
            words[:, 0] = torch.from_numpy(which.astype(np.uint16).view(np.int16))
            scales = torch.full((count, 1), b, dtype=torch.uint8)
            expected = PackedWeight(form, words, scales, torch.ones(count)).dequantised()
            for part in range(int(form)):
                value = expected[:, part * (GROUP[form] // int(form))].numpy()
                np.testing.assert_array_equal(fp16_halves(halves[part])[half], value)
                np.testing.assert_array_equal(single[2 * part + half].view(np.float32), value)


MIXES = [(WeightFormat.NVFP4, WeightFormat.MXFP8), (WeightFormat.NVFP4, WeightFormat.NVFP4),
         (WeightFormat.MXFP8, WeightFormat.PLAIN)]  # fmt: skip
"""Formats of routed and shared experts: M3.1-Flash's first."""


@pytest.mark.parametrize(("routed", "shared", "inter"), [(*MIXES[0], 96), (*MIXES[1], 32), (*MIXES[2], 96)])
def test_moe_one_token(routed: WeightFormat, shared: WeightFormat, inter: int) -> None:
    n, experts = 96, 8
    x, norm_weight = rand(1, n, seed=1), rand(n, seed=2, scale=0.3)
    router, bias = rand(experts, n, seed=3, scale=0.1), rand(experts, seed=4)
    (w13, dense13), (w2, dense2) = (
        packed(routed, experts, 2 * inter, n, seed=5, scale=0.2), packed(routed, experts, n, inter, seed=6),
    )  # fmt: skip
    (s13, shared13), (s2, shared2) = packed(shared, 2 * inter, n, seed=7, scale=0.2), packed(shared, n, inter, seed=8)
    y = gemma_rms_norm(x, norm_weight, 1e-6)
    expected = x + moe(y, route(y, router, bias, 4, 2.0), dense13, dense2, shared13, shared2, SwigluOai())
    moe_one_token(
        x, norm_weight, router, bias, w13, w2, s13, s2, torch.full((experts,), float("nan")),
        torch.full((5 * inter,), float("nan")), top_experts=4, scaling_factor=2.0,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("form", FORMATS)
def test_a_dense_layer_of_one_token(form: WeightFormat) -> None:
    x, norm_weight = rand(1, 64, seed=1), rand(64, seed=2, scale=0.3)
    (s13, dense13), (s2, dense2) = packed(form, 2 * 128, 64, seed=7, scale=0.3), packed(form, 64, 128, seed=8)
    expected = x + expert(gemma_rms_norm(x, norm_weight, 1e-6), dense13, dense2, SwigluOai())
    moe_one_token(
        x, norm_weight, rand(16, 64, seed=3), rand(16, seed=4), s13, s2, s13, s2, torch.empty(16),
        torch.full((128,), float("nan")), top_experts=0, scaling_factor=2.0,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("routed", "shared", "tokens", "tile"),
    [(*MIXES[0], 17, 16), (*MIXES[0], 10, 8), (*MIXES[1], 1, 8), (*MIXES[2], 3, 16),
     (WeightFormat.PLAIN, WeightFormat.MXFP8, 2, 16)],
)  # fmt: skip
def test_moe_few_tokens(routed: WeightFormat, shared: WeightFormat, tokens: int, tile: int) -> None:
    n, experts, inter = 128, 8, 64
    x, norm_weight = rand(tokens, n, seed=1), rand(n, seed=2, scale=0.3)
    router, bias = rand(experts, n, seed=3, scale=0.1), rand(experts, seed=4)
    bias[5] = 9.0  # every token chooses expert 5, so with 17 tokens it needs a second tile
    (w13, dense13), (w2, dense2) = (
        packed(routed, experts, 2 * inter, n, seed=5, scale=0.2), packed(routed, experts, n, inter, seed=6),
    )  # fmt: skip
    (s13, shared13), (s2, shared2) = packed(shared, 2 * inter, n, seed=7, scale=0.2), packed(shared, n, inter, seed=8)
    y = gemma_rms_norm(x, norm_weight, 1e-6)
    chosen = moe(y, route(y, router, bias, 4, 2.0), dense13, dense2, shared13, shared2, SwigluOai())
    positions = torch.full((tokens,), 5, dtype=torch.int32)
    if tokens > 1:
        chosen[0] = expert(y[:1], shared13, shared2, SwigluOai())  # row 0 is padding: the shared expert only
        positions[0] = -1
    expected = x + chosen
    scratch = MoeScratch.allocate(tokens, experts, 4, n, inter, x)
    for buffer in (scratch.logits, scratch.normed, scratch.hidden, scratch.parts, scratch.shares):
        buffer.fill_(float("nan"))
    moe_few_tokens(
        x, positions, norm_weight, router, bias, w13, w2, s13, s2, scratch, top_experts=4, scaling_factor=2.0,
        plan=MoePlan(in_rows=32, down_rows=64, token_tile=tile, in_dependent=tokens > 1),
        next_norm=norm_weight if tokens > 3 else None, next_packed=True,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=4e-3)
    if tokens > 3:
        torch.testing.assert_close(scratch.normed, gemma_rms_norm(x, norm_weight, 1e-6), rtol=1e-4, atol=1e-4)
