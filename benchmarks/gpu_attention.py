"""Check and time the sparse-attention decode kernels on a GPU: plans, and formats of the cache.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_attention.py check plans formats [--points 1,4096 8,32768 ...]

`check`: fp8 and NVFP4 caches against the same kernels fed the dequantised bytes, and what is written against
`ops.kv_lane`. `plans`: a shortened mini60 step under several plans. `formats`: the attention kernels of 8 layers of
slice8 alone, by format of the cache.
"""

from __future__ import annotations

import argparse
import time
import traceback
from dataclasses import replace

import gpu_required  # noqa: F401  (ends here without a GPU)

# isort: split
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_decode_stack import (
    HEAD_DIM,
    PRESETS,
    STREAM_BYTES_PER_S,
    DecodeStack,
    Model,
    Tuning,
    random_cache,
    shortened,
)
from longturn.kernels.kv_formats import lane_views, widen_e2m1, widen_words_e2m1, widen_words_fp8
from longturn.kernels.msa_plan import MsaPlan
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.ops.msa import select_blocks
from longturn.ops.nvfp4 import dequantize_lane, quantize_lane, scale_e2m1

FP8 = torch.float8_e4m3fn
FORMATS = {
    "bf16": (KvFormat.PLAIN, KvFormat.PLAIN),
    "fp8": (KvFormat.FP8, KvFormat.FP8),
    "nvfp4, fp8 index": (KvFormat.NVFP4, KvFormat.FP8),
}


def lane(flat: Tensor, stride: int, begin: int, *shape: int) -> Tensor:
    """View [pages, *shape] of a lane of a flat cache."""
    size = 1
    for n in shape:
        size *= n
    return flat.view(-1).as_strided((flat.numel() // stride, size), (stride, 1), begin).unflatten(1, shape)


def layer_lanes(cache: Tensor, layout: PageLayout, layer: int) -> dict[str, Tensor]:
    """Views of one layer's lanes."""
    at, kv = lane_views(cache, layout, layer), layout.kv_heads
    width = HEAD_DIM // 2 if layout.kv_format == KvFormat.NVFP4 else HEAD_DIM
    out = {
        "key": lane(at.kv, at.kv_stride, at.key, kv, 128, width),
        "value": lane(at.kv, at.kv_stride, at.value, kv, 128, width),
        "index": lane(at.index, at.index_stride, at.index_key, 1, 128, HEAD_DIM),
    }
    if layout.kv_format == KvFormat.NVFP4:
        out["key_scale"] = lane(at.scales, at.scale_stride, at.key_scale, kv, 128, HEAD_DIM // 16)
        out["value_scale"] = lane(at.scales, at.scale_stride, at.value_scale, kv, 128, HEAD_DIM // 16)
    return out


def filled_cache(layout: PageLayout, pages: int) -> Tensor:
    """A flat cache of random numbers in the layout's formats, its null page NaN."""
    kind = torch.uint8 if layout.in_bytes else torch.bfloat16
    cache = torch.zeros(pages * layout.page_stride, dtype=kind, device="cuda")
    for layer in range(layout.layers):
        have = layer_lanes(cache, layout, layer)
        for name, view in have.items():
            if name.endswith("_scale"):
                view.view(torch.uint8).random_(0x28, 0x3C)
                view[0] = float("nan")
            elif view.dtype == torch.uint8:
                view.random_(0, 256)
            else:
                for page in view.split(256):
                    page.copy_(torch.randn(page.shape, device="cuda"))
                view[0] = float("nan")
    return cache


def dequantised(cache: Tensor, layout: PageLayout, layer: int) -> dict[str, Tensor]:
    have = layer_lanes(cache, layout, layer)
    if layout.kv_format != KvFormat.NVFP4:
        return {name: view.float() for name, view in have.items()}
    both = {name: dequantize_lane(have[name].contiguous(), have[f"{name}_scale"]) for name in ("key", "value")}
    return both | {"index": have["index"].float()}


class FormatStack(DecodeStack):
    """A decode step over a cache of any format."""

    def __init__(self, model: Model, layout: PageLayout, cache: Tensor, contexts: list[int], tuning: Tuning) -> None:
        pages = cache.numel() // layout.page_stride
        plain = PageLayout(layout.layers, layout.kv_heads)
        super().__init__(model, torch.empty(pages * plain.page_stride, device="meta"), contexts, tuning)
        self.layout, self.cache = layout, cache
        self.shape = replace(self.shape, layout=layout)
        self.projected.normal_()


@triton.jit
def _widen(codes, scales, out, ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """Into out [ROWS, D]: by bytes (PARTS 2), or by words, whose fp8 numbers (PARTS 2 without scales) lie in codes."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D // PARTS)[None, :]
    at = tl.load(codes + row * (D // PARTS) + column)
    scale = tl.load(scales + row * (D // 16) + tl.arange(0, D // 16)[None, :])
    to = out + row * D + PARTS * column
    if PARTS == 4:
        parts = widen_words_e2m1(at, scale, ROWS, D, True)
    elif codes.dtype.element_ty == tl.int16:
        parts = widen_words_fp8(at, True)
    else:
        parts = widen_e2m1(at, scale, ROWS, D, True)
    for j in tl.static_range(PARTS):
        tl.store(to + j, parts[j])


def check_widening() -> str:
    """Every code with every scale, and every e4m3."""
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | (15 - code) << 4).repeat(256, 1).contiguous().cuda()
    byte = torch.arange(256, dtype=torch.uint8)
    scales = byte[:, None].expand(256, 2).contiguous().cuda().view(FP8)
    want = scale_e2m1(codes, scales.float())
    numbers = byte.roll(7).repeat(16, 1).view(256, 16).repeat(1, 2).contiguous().cuda()
    out = torch.empty(3, 256, 32, dtype=torch.float16, device="cuda")
    _widen[(1,)](codes, scales, out[0], ROWS=256, D=32, PARTS=2)
    _widen[(1,)](codes.view(torch.int16), scales, out[1], ROWS=256, D=32, PARTS=4)
    _widen[(1,)](numbers.view(torch.int16), scales, out[2], ROWS=256, D=32, PARTS=2)
    pairs = ((out[0] * 128.0, want), (out[1] * 128.0, want), (out[2], numbers.view(FP8).float()))
    same = [torch.equal(got.float().nan_to_num(7e9), right.nan_to_num(7e9)) for got, right in pairs]
    return f"check widening of every code and scale {same}: {'exact, ok' if all(same) else 'WRONG'}"


def check() -> list[str]:
    """Both formats against a twin whose cache is fp32."""
    lines = [check_widening()]
    print(lines[-1], flush=True)
    preset = replace(PRESETS["slice8"], layers=2, inter=128, dense=256)
    model, plain_layout = Model.random(preset), PageLayout(2, preset.kv_heads)
    for label, (kv, index) in list(FORMATS.items())[1:]:
        layout = PageLayout(2, preset.kv_heads, kv_format=kv, index_format=index)
        for contexts in ([0, -1, 127, 128], [2047, 2048, 2049, 9000], [40000], [777, 6000] * 16):
            blocks = max(contexts) // 128 + 1
            plan = MsaPlan.default(len(contexts), blocks)
            parts = frozenset({"msa"})
            cache = filled_cache(layout, len(contexts) * blocks + 1)
            stack = FormatStack(model, layout, cache, contexts, Tuning(msa=plan, parts=parts))
            small = replace(plan, tile=32, stages=1, score_stages=1, ahead=False)
            plain = torch.zeros((len(contexts) * blocks + 1) * plain_layout.page_stride, device="cuda")
            twin = FormatStack(model, plain_layout, plain, contexts, Tuning(msa=small, parts=parts))
            twin.rows.page_table.copy_(stack.rows.page_table)
            twin.projected.copy_(stack.projected)
            angle = torch.randn(len(contexts), 32, device="cuda").repeat(1, 2)
            for side in (stack, twin):
                side.rows.cos.fill_(1.0)
                side.rows.sin.zero_()
                side.rows.cos[:, :64] = angle.cos()
                side.rows.sin[:, :64] = angle.sin()
            differ = written(stack, twin)
            error, compared = against_dequantised(stack, twin)
            verdict = "ok" if error < 1e-2 and differ < 5e-3 else "WRONG"
            lines.append(
                f"check {label:16} {str(contexts)[:24]:24} rel {error:.1e} over {compared:.0%} of heads, "
                f"{differ:.2%} of what is written differs {verdict}"
            )
            print(lines[-1], flush=True)
    return lines


def written(stack: FormatStack, twin: FormatStack) -> float:
    """Share of the new tokens' numbers that are not what `ops.kv_lane` would store."""
    layer = stack.model.layers[1]
    stack._layer(1, layer)
    twin._layer(1, layer)
    stored, exact = dequantised(stack.cache, stack.layout, 1), dequantised(twin.cache, twin.layout, 1)
    wrong = total = 0
    for r, position in enumerate(stack.start.tolist()):
        if position < 0:
            continue
        page, slot = int(stack.rows.page_table[r, position // 128]), position % 128
        for name, values in stored.items():
            new = exact[name][page, :, slot]
            if name != "index" and stack.layout.kv_format == KvFormat.NVFP4:
                new = dequantize_lane(*quantize_lane(new))
            else:
                new = new.to(FP8).float()
            wrong += int((values[page, :, slot] != new).sum())
            total += new.numel()
    return wrong / total


def against_dequantised(stack: FormatStack, twin: FormatStack) -> tuple[float, float]:
    """Relative error where both choose the same blocks (near ties may fall either way), and the share of heads where
    they do. The new token is one that every type holds exactly: K and index key 0, V of e2m1 values."""
    layer, kv_heads = stack.model.layers[1], stack.layout.kv_heads
    zero = -torch.ones_like(layer.heads.key)
    layer = replace(layer, heads=replace(layer.heads, key=zero, index_key=zero))
    first = (stack.shape.q_heads + kv_heads) * HEAD_DIM
    grid = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0], device="cuda")
    for name, values in dequantised(stack.cache, stack.layout, 1).items():
        layer_lanes(twin.cache, twin.layout, 1)[name].copy_(values)
    outs, chosen = [], []
    live = stack.start >= 0
    for side in (stack, twin):
        side.projected[:, first : first + kv_heads * HEAD_DIM] = grid.repeat(kv_heads * 16)
        side.attention.fill_(float("nan"))
        side._layer(1, layer)
        outs.append(side.attention[live].float().view(-1, kv_heads, stack.attention.shape[1] // kv_heads))
        chosen.append(select_blocks(side.msa.scores[live], side.start[live], 16).sort(-1).values)
    if outs[0].isnan().any():
        return float("nan"), 0.0
    same = (chosen[0] == chosen[1]).all(-1)
    return ((outs[0] - outs[1])[same].norm() / outs[1][same].norm()).item(), same.float().mean().item()


def formats(points: list[tuple[int, int]]) -> list[str]:
    """Microseconds a layer of attention alone, and the bytes' share of it."""
    preset = replace(PRESETS["slice8"], inter=128, dense=256)
    model = Model.random(preset)
    lines = []
    for label, (kv, index) in FORMATS.items():
        layout = PageLayout(preset.layers, preset.kv_heads, kv_format=kv, index_format=index)
        unit = 1 if layout.in_bytes else 2
        most = max(rows * (context // 128 + 1) + 1 for rows, context in points)
        cache = filled_cache(layout, most)
        shapes = ((128, 4), (128, 8)) if kv == KvFormat.PLAIN else ((64, 4), (128, 4))
        for (rows, context), (tile, warps) in ((point, shape) for point in points for shape in shapes):
            plan = replace(MsaPlan.default(rows, context // 128 + 1), tile=tile, warps=warps)
            tuning = Tuning(msa=plan, parts=frozenset({"msa"}))
            stack = FormatStack(model, layout, cache, [context] * rows, tuning)
            stack.capture()
            us = stack.time_ms() * 1e3 / preset.layers
            chosen = rows * min(16, context // 128 + 1) * 2 * (layout.kv_lane + layout.scale_lane)
            scored = rows * context * HEAD_DIM * (2 if index == KvFormat.PLAIN else 1)
            floor = (chosen * unit + scored) / STREAM_BYTES_PER_S * 1e6
            lines.append(
                f"formats {rows:2} x {context:6} {label:16} tile {tile:3} warps {warps} {us:6.2f} us a layer, "
                f"bytes {floor:5.2f}"
            )
            print(lines[-1], flush=True)
        del cache
        torch.cuda.empty_cache()
    return lines


def variants(rows: int, context: int) -> dict[str, MsaPlan]:
    """Plans to compare, the first being what the others change."""
    base = MsaPlan.default(rows, context // 128 + 1)
    out = {"default": base, "no ahead": replace(base, ahead=False), "8 warps": replace(base, warps=8)}
    if rows <= 4:
        out["splits 32 of 64"] = replace(base, splits=32, tile=64)
    return out


def plans(points: list[tuple[int, int]], layers: int) -> list[str]:
    """Milliseconds of a shortened mini60 step, and microseconds of it a layer (head included)."""
    preset = shortened(PRESETS["mini60"], layers)
    model = Model.random(preset)
    cache = random_cache(preset, max(rows * (context // 128 + 1) + 1 for rows, context in points))
    lines = []
    for rows, context in points:
        for label, plan in variants(rows, context).items():
            try:
                stack = DecodeStack(model, cache, [context] * rows, Tuning(msa=plan))
                stack.capture()
                ms = stack.time_ms()
            except Exception as error:  # a variant that does not compile is reported, the others go on
                print(f"{rows}x{context} {label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=-3)
                continue
            us = ms / layers * 1e3
            lines.append(f"plans {rows:2} x {context:6} {label:20} {ms:7.3f} ms {us:7.2f} us a layer")
            print(lines[-1], flush=True)
            del stack
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["check", "plans", "formats"])
    parser.add_argument("--layers", type=int, default=20, help="of the shortened step")
    parser.add_argument("--points", nargs="*", default=["1,4096", "1,131072", "8,32768", "32,32768"])
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    points = [(int(rows), int(context)) for rows, context in (point.split(",") for point in arguments.points)]
    lines = []
    for command in arguments.commands:
        if command == "check":
            lines += check()
        elif command == "plans":
            lines += plans(points, arguments.layers)
        else:
            lines += formats(points)
        torch.cuda.empty_cache()
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
