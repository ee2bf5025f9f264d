"""fp8 and NVFP4 caches in the decode kernels, in Triton's interpreter: against the same kernels fed the dequantised
bytes, and against `ops.kv_lane` for what is written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from longturn.kernels.kv_formats import (
    FP8_LOW,
    e2m1_codes,
    fp8_halves,
    lane_views,
    widen_e2m1,
    widen_words_e2m1,
    widen_words_fp8,
)
from longturn.kernels.msa_decode import msa_decode
from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaPlan, MsaScratch, MsaShape
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.ops.kv_lane import FP8, NVFP4
from longturn.ops.nvfp4 import dequantize_lane, pack_e2m1, quantize_lane, scale_e2m1

PLAIN_LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, index_dim=32)
Q_HEADS, LAYER, PAGES = 8, 1, 40
FORMATS = [(KvFormat.FP8, KvFormat.FP8), (KvFormat.NVFP4, KvFormat.FP8), (KvFormat.PLAIN, KvFormat.FP8)]


@triton.jit
def _widen(codes, scales, even, odd, ROWS: tl.constexpr, D: tl.constexpr):
    row, half = tl.arange(0, ROWS)[:, None], tl.arange(0, D // 2)[None, :]
    code = tl.load(codes + row * (D // 2) + half)
    a, b = widen_e2m1(code, tl.load(scales + row * (D // 16) + tl.arange(0, D // 16)[None, :]), ROWS, D, False)
    tl.store(even + row * (D // 2) + half, a)
    tl.store(odd + row * (D // 2) + half, b)


def test_widening_is_exact_for_every_code_and_scale() -> None:
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | (15 - code) << 4).expand(256, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 2).contiguous()
    scales[[127, 255]] = 0  # NaN, which the interpreter's conversion does not know
    even, odd = torch.empty(256, 16, dtype=torch.float16), torch.empty(256, 16, dtype=torch.float16)
    _widen[(1,)](codes, scales.view(FP8), even, odd, ROWS=256, D=32)
    want = scale_e2m1(codes, scales.view(FP8).float())
    torch.testing.assert_close(even.float() * 128, want[:, 0::2], rtol=0, atol=0)
    torch.testing.assert_close(odd.float() * 128, want[:, 1::2], rtol=0, atol=0)


@triton.jit
def _widen_words(words, scales, e2m1, e4m3, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, D // 4)[None, :]
    tile = tl.load(words + row * (D // 4) + word)
    parts = widen_words_e2m1(tile, tl.load(scales + row * (D // 16) + tl.arange(0, D // 16)[None, :]), ROWS, D, False)
    for j in tl.static_range(4):
        tl.store(e2m1 + row * D + 4 * word + j, parts[j])
    pair = widen_words_fp8(tile, False)
    for j in tl.static_range(2):
        tl.store(e4m3 + row * (D // 2) + 2 * word + j, pair[j])


def test_widening_of_words_is_exact_for_every_code_and_scale() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    byte[[127, 255]] = 0  # NaN, which the interpreter's conversion does not know
    codes = byte[:, None] ^ torch.arange(16, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = byte[:, None].expand(256, 2).contiguous()
    e2m1, e4m3 = torch.empty(256, 32, dtype=torch.float16), torch.empty(256, 16, dtype=torch.float16)
    _widen_words[(1,)](codes.view(torch.int16), scales.view(FP8), e2m1, e4m3, ROWS=256, D=32)
    assert torch.equal(e2m1.float() * 128, scale_e2m1(codes, scales.view(FP8).float()))
    assert torch.equal(e4m3.float(), codes.view(FP8).float())


@triton.jit
def _halves(x, high, low, factor, R: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :]
    first, second, grow = fp8_halves(tl.load(x + at))
    tl.store(high + at, first)
    tl.store(low + at, second)
    tl.store(factor + tl.arange(0, R), grow)


def test_two_fp8_numbers_hold_eight_bits() -> None:
    """Every bf16 mantissa over 12 binades, in rows of sizes far apart; zeros, and a row with NaN."""
    x = (torch.arange(128) + 128.0).repeat(16, 1) * 2.0 ** -torch.arange(12).repeat(16, 11)[:, :128]
    x *= torch.where(torch.arange(128) % 3 == 0, -1.0, 1.0)
    x *= 2.0 ** torch.linspace(-90, 90, 16).round()[:, None]
    x[4] = 0.0
    high, low = torch.empty(16, 128, dtype=FP8), torch.empty(16, 128, dtype=FP8)
    factor = torch.empty(16)
    _halves[(1,)](x, high, low, factor, R=16, D=128)
    assert torch.equal((high.float() + low.float() * float(FP8_LOW.value)) * factor[:, None], x)
    x[5, 6] = float("nan")
    _halves[(1,)](x, high, low, factor, R=16, D=128)
    assert factor.isnan().tolist() == [n == 5 for n in range(16)]


@triton.jit
def _codes(x, codes, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(codes + at, e2m1_codes(tl.load(x + at)))


def test_codes_are_rounded_as_the_reference_rounds() -> None:
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 100.0])
    x = torch.cat((steps, steps.nextafter(torch.tensor(0.0)), steps.nextafter(torch.tensor(99.0)), torch.randn(34) * 4))
    x = torch.cat((x, -x))[:128]
    codes = torch.empty(128, dtype=torch.uint8)
    _codes[(1,)](x, codes, N=128)
    packed = pack_e2m1(x)
    assert torch.equal(codes, torch.stack((packed & 15, packed >> 4), 1).flatten())


def lanes(cache: torch.Tensor, layout: PageLayout) -> dict[str, torch.Tensor]:
    """Views [pages, ...] of the layer under test, in the types that are stored."""
    at = lane_views(cache, layout, LAYER)
    kv, d = layout.kv_heads, layout.head_dim

    def cut(flat: torch.Tensor, stride: int, begin: int, *shape: int) -> torch.Tensor:
        return flat.view(-1).as_strided((PAGES, int(np.prod(shape))), (stride, 1), begin).view(PAGES, *shape)

    width = d // 2 if layout.kv_format == KvFormat.NVFP4 else d
    out = {
        "key": cut(at.kv, at.kv_stride, at.key, kv, 128, width),
        "value": cut(at.kv, at.kv_stride, at.value, kv, 128, width),
        "index": cut(at.index, at.index_stride, at.index_key, 1, 128, d),
    }
    if layout.kv_format == KvFormat.NVFP4:
        out["key_scale"] = cut(at.scales, at.scale_stride, at.key_scale, kv, 128, d // 16)
        out["value_scale"] = cut(at.scales, at.scale_stride, at.value_scale, kv, 128, d // 16)
    return out


def floats(cache: torch.Tensor, layout: PageLayout) -> dict[str, torch.Tensor]:
    """What the layer under test holds, dequantised."""
    have = lanes(cache, layout)
    if layout.kv_format != KvFormat.NVFP4:
        return {name: lane.float() for name, lane in have.items()}
    both = {name: dequantize_lane(have[name], have[f"{name}_scale"]) for name in ("key", "value")}
    return both | {"index": have["index"].float()}


def fill(cache: torch.Tensor, layout: PageLayout, gen: torch.Generator) -> None:
    """Random keys and values, quantised; the null page is NaN."""
    have = lanes(cache, layout)
    for name in ("key", "value"):
        values = torch.randn(PAGES, layout.kv_heads, 128, layout.head_dim, generator=gen)
        if layout.kv_format == KvFormat.NVFP4:
            codes, scales = quantize_lane(values)
            have[name].copy_(codes)
            have[f"{name}_scale"].view(torch.uint8).copy_(scales.view(torch.uint8))
            have[f"{name}_scale"].view(torch.uint8)[0] = 0x7E
        else:
            have[name].copy_(values.to(have[name].dtype))
            have[name][0] = float("nan")
    have["index"].copy_(torch.randn(PAGES, 1, 128, layout.head_dim, generator=gen).to(have["index"].dtype))
    have["index"][0] = float("nan")


class Step:
    """Rows at short contexts, of which 4 blocks are chosen, and caches of both layouts."""

    def __init__(self, formats: tuple[KvFormat, KvFormat], positions: list[int], seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.formats, self.positions = formats, positions
        self.layout = replace(PLAIN_LAYOUT, kv_format=formats[0], index_format=formats[1], plain_bytes=4)
        self.cache = torch.zeros(PAGES, self.layout.page_stride, dtype=torch.uint8)
        fill(self.cache, self.layout, gen)
        self.plain = torch.zeros(PAGES, PLAIN_LAYOUT.page_stride)
        for name, values in floats(self.cache, self.layout).items():
            lanes(self.plain, PLAIN_LAYOUT)[name].copy_(values)
        rows, blocks = len(positions), 8
        self.table = torch.zeros(rows, blocks, dtype=torch.int32)
        order = torch.randperm(PAGES - 1, generator=gen).int() + 1
        for r, position in enumerate(positions):
            if position >= 0:
                self.table[r, : position // 128] = order[: position // 128]
                self.table[r, position // 128] = order[-1 - r]
        self.norms = MsaNorms(*(torch.randn(32, generator=gen) * 0.2 for _ in range(4)))
        self.shape = MsaShape(Q_HEADS, self.layout, rotary_dim=16, max_blocks=blocks, top_blocks=4)
        self.projected = torch.randn(rows, self.shape.projected_width, generator=gen)
        angle = torch.randn(rows, 16, generator=gen)
        cos = torch.cat((angle.cos(), torch.ones(rows, 16)), 1)
        sin = torch.cat((angle.sin(), torch.zeros(rows, 16)), 1)
        self.rows = DecodeRows(torch.tensor(positions, dtype=torch.int32), self.table, cos, sin)

    def run(self, plan: MsaPlan, plain: bool) -> torch.Tensor:
        out = torch.full((len(self.positions), Q_HEADS * 32), float("nan"))
        shape = replace(self.shape, layout=PLAIN_LAYOUT) if plain else self.shape
        scratch = MsaScratch.allocate(len(self.positions), shape, plan, torch.device("cpu"))
        for buffer in (scratch.scores, scratch.partial, scratch.partial_max, scratch.partial_sum):
            buffer.fill_(float("nan"))
        cache = self.plain if plain else self.cache
        msa_decode(self.projected, self.rows, self.norms, cache, LAYER, out, shape, plan, scratch)
        return out


@pytest.mark.parametrize("formats", FORMATS)
def test_a_token_is_written_as_the_references_quantise_it(formats: tuple[KvFormat, KvFormat]) -> None:
    step = Step(formats, [0, -1, 127, 128], 1)
    before = step.cache.clone()
    step.run(MsaPlan(chunks=2, splits=4, tile=128), plain=False)
    step.run(MsaPlan(chunks=2, splits=4, tile=128), plain=True)
    stored, exact = floats(step.cache, step.layout), lanes(step.plain, PLAIN_LAYOUT)
    written = 0
    for r, position in enumerate(step.positions):
        if position < 0:
            continue
        page, slot = int(step.table[r, position // 128]), position % 128
        for name, values in stored.items():
            new = exact[name][page, :, slot]
            form = formats[1] if name == "index" else formats[0]
            if form == KvFormat.NVFP4:
                new = dequantize_lane(*quantize_lane(new))
            elif form == KvFormat.FP8:
                new = new.to(FP8).float()
            torch.testing.assert_close(values[page, :, slot], new, rtol=1e-6, atol=1e-6)
        written += 1
    changed = (step.cache != before).any(1)
    assert changed.sum() == written and not (step.cache != before)[:, : step.layout.key_offset(LAYER)].any()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("plan", [MsaPlan(chunks=8, splits=4, tile=128), MsaPlan(3, splits=2, tile=64, fused_blocks=0)])
def test_decode_is_the_same_kernel_on_dequantised_bytes(formats: tuple[KvFormat, KvFormat], plan: MsaPlan) -> None:
    step = Step(formats, [900, -1, 130], 2)
    # The new token is one that every type holds exactly: K and index key 0, V of e2m1 values.
    step.norms.key.fill_(-1.0)
    step.norms.index_key.fill_(-1.0)
    first, kv = (Q_HEADS + 2) * 32, 2 * 32
    step.projected[:, first : first + kv] = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0]).repeat(8)
    got, want = step.run(plan, plain=False), step.run(plan, plain=True)
    torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)
    assert torch.equal(got[1], torch.zeros_like(got[1])) and got[0].norm() > 1


def test_a_page_has_the_size_of_the_models_cache() -> None:
    config: Any = SimpleNamespace(kv_heads=4, head_dim=128, index_dim=128, sparse_layers=(True,) * 3)
    layout = PageLayout(layers=3, kv_heads=4)
    sizes = {}
    for form, dtype in ((KvFormat.FP8, FP8), (KvFormat.NVFP4, NVFP4)):
        sizes[form] = minimax_m3_kv(config, dtype).page_bytes
        assert replace(layout, kv_format=form, index_format=KvFormat.FP8).page_stride == sizes[form]
    assert layout.page_stride * 2 == minimax_m3_kv(config, torch.bfloat16).page_bytes
    assert layout.page_stride * 2 / sizes[KvFormat.NVFP4] > 3.2
