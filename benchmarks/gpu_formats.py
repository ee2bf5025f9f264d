"""Check and time the decode kernels with quantised weights on a GPU, and bf16 products at several tokens.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_formats.py decode check linear experts table [--preset slice8]

`decode` compares every code and scale with the format's definition, `check` and `races` a short stack with fp32 and
with itself, `linear` and `experts` time single kernels over enough weights that none stay in L2, `profile` each kernel
of a layer, and `table` times whole steps: bf16, quantised weights, and quantised weights with an NVFP4 cache and fp8
index keys. `--jobs N` compiles everything in N processes first. Short lines as it goes, a summary last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_decode_stack import (
    EXPERTS,
    PRESETS,
    SCALING,
    TOP_EXPERTS,
    VALUE_BYTES,
    DecodeStack,
    Formats,
    Model,
    Tuning,
    random_cache,
    shortened,
)
from gpu_formats_whole import (
    BF16,
    BY_LAUNCHES,
    BY_REGISTERS,
    FOUR_WARPS,
    NO_RING,
    NOT_STREAMED,
    POINTS,
    QUANTISED,
    TILES_OF_TWO,
    Way,
    profile,
    stack_of,
    table,
    ways,
)
from gpu_kernels import check, pages_for
from gpu_timing import graph_times_us
from longturn.kernels.moe_few import MoePlan, MoeScratch, moe_few_tokens
from longturn.kernels.packed_linear_rows import ring_plan
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, pack_mxfp8, pack_nvfp4, random_packed
from longturn.kernels.packed_weights_decode import decode, load_scales, part_columns
from longturn.kernels.small_linear import LinearPlan, small_linear

PLAIN, MXFP8, NVFP4 = WeightFormat.PLAIN, WeightFormat.MXFP8, WeightFormat.NVFP4
STREAM_BYTES_PER_US = 4.4e6
SLICES = LinearPlan(slices=True)
STREAMED = [
    LinearPlan(stream_slices=slices, stream_row_warps=row_warps, stream_words=words)
    for slices, row_warps, words in ((4, 1, 128), (2, 2, 128), (4, 1, 64))
]
"""Ways in which one token's products are dealt out, the defaults of both formats among them."""
CHECKED = (QUANTISED, Formats(NVFP4, NVFP4))
Job = tuple[str, list[Callable[[], None]], float]
"""Label, launches over different weights, bytes that one of them must read."""


@triton.jit
def _decode_all(words, scales, out, ROWS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    row, word = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K // PARTS)
    tile = tl.load(words + row[:, None] * (K // PARTS) + word[None, :])
    parts = decode(tile, load_scales(scales, row, 0, row >= 0, K // PARTS, PARTS, K), PARTS, True)
    for j in tl.static_range(PARTS):
        tl.store(out + row[:, None] * K + part_columns(word, j, PARTS)[None, :], parts[j].to(tl.float32))


def every_code() -> list[str]:
    """Each byte of codes with each byte of scales, in registers and through the tensor cores, against the formats."""
    byte = torch.arange(256, dtype=torch.uint8, device="cuda")
    numbers = byte[(byte & 0x7F) != 0x7F].repeat(2)[:256]
    weights = {
        NVFP4: pack_nvfp4(byte.repeat(256, 1), byte[:, None].repeat(1, 32).view(torch.float8_e4m3fn), 1.0),
        MXFP8: pack_mxfp8(
            numbers.repeat(256, 1).view(torch.float8_e4m3fn), (byte[:240, None].repeat(1, 8)[torch.arange(256) % 240])
        ),
    }
    lines = []
    for form, weight in weights.items():
        rows, width = weight.shape
        out = torch.full((rows, width), float("nan"), device="cuda")
        _decode_all[(rows // 16,)](weight.words, weight.scales, out, ROWS=16, K=width, PARTS=int(form))
        expected = PackedWeight(form, weight.words, weight.scales, torch.ones(rows, device="cuda")).dequantised()
        same = torch.equal(out, expected)
        # Columns of the identity pick single weights, so the product is the weight times its row's factor, exactly.
        product = torch.full((width, rows), float("nan"), device="cuda")
        unit = torch.eye(width, dtype=torch.bfloat16, device="cuda")
        small_linear(unit, weight, product, plan=LinearPlan(gemv_tokens=0))
        exact = weight.dequantised().T
        dots = torch.equal(product.isnan(), exact.isnan()) and torch.equal(product.nan_to_num(), exact.nan_to_num())
        verdict = "ok" if same and dots else "WRONG"
        lines.append(
            f"decode {form.name}: {rows * width} values, in registers {same}, by tensor cores {dots} {verdict}"
        )
        print(lines[-1], flush=True)
        lines.append(streamed(form, weight))
        print(lines[-1], flush=True)
    return lines


def streamed(form: WeightFormat, weight: PackedWeight) -> str:
    """`weight`, eight times beside itself, times each unit vector as one token: exactly its columns."""
    wide = PackedWeight(form, weight.words.repeat(1, 8), weight.scales.repeat(1, 8), weight.row_scales)
    rows, width = wide.shape
    unit = torch.eye(width, dtype=torch.bfloat16, device="cuda")
    exact = wide.dequantised().T
    same = []
    for plan in STREAMED:
        product = torch.full((width, rows), float("nan"), device="cuda")
        for k in range(width):
            small_linear(unit[k : k + 1], wide, product[k : k + 1], plan=plan)
        nan = torch.equal(product.isnan(), exact.isnan())
        same.append(nan and torch.equal(product.nan_to_num(), exact.nan_to_num()))
    if form is MXFP8:
        # Twice as wide, of which the second half meets zeros.
        twice = PackedWeight(form, wide.words.repeat(1, 2), wide.scales.repeat(1, 2), wide.row_scales)
        padded = torch.cat((unit, torch.zeros_like(unit)), dim=1).half()
        plan, product = ring_plan(padded[:8], twice), torch.full((width, rows), float("nan"), device="cuda")
        for k in range(0, width, 8):
            small_linear(padded[k : k + 8], twice, product[k : k + 8])
        nan = torch.equal(product.isnan(), exact.isnan())
        same.append(plan is not None and nan and torch.equal(product.nan_to_num(), exact.nan_to_num()))
    return f"decode {form.name}: one token streamed, eight through the ring {same} {'ok' if all(same) else 'WRONG'}"


def checks() -> list[tuple[Formats, Tuning, list[list[int]]]]:
    several = [[2048], [0, 129, 2049, 5000], [777, 6000] * 16]
    ways = [(BY_REGISTERS, several[:1]), (NOT_STREAMED, several[:1]), (Tuning(), several)]
    ways += [(TILES_OF_TWO, several[:2]), (Tuning(moe=FOUR_WARPS), several[:2]), (NO_RING, several[1:2])]
    ways += [(BY_LAUNCHES, several[1:2])]
    ways += [(Tuning(), [[500, -1, 40, 6000, 3000, 129, 0, 2049]])]
    plain = (BF16, Tuning(o=SLICES), [[0, 129, 2049, 5000], [1, -1, 777, 6000] * 4])
    return [(f, tuning, contexts) for f in CHECKED for tuning, contexts in ways] + [plain]


def stack_check(name: str) -> list[str]:
    lines = []
    for formats, tuning, contexts in checks():
        label = f"{formats.experts.name}/{formats.others.name}"
        lines += [f"{label} {line}" for line in check(name, True, formats, tuning, contexts)]
    return lines


def races(name: str) -> list[str]:
    """Replays with dependent launch must agree to the bit with eager launches without it."""
    preset = shortened(PRESETS[name], 4)
    model = Model.random(preset, formats=QUANTISED)
    lines = []
    for contexts in ([4000], [129, 2049, 5000, 0], [300, 6000] * 4, [777, 6000] * 8, [777, 6000] * 16):
        cache = random_cache(preset, len(contexts) * (max(contexts) // 128 + 1) + 1)
        plain = DecodeStack(model, cache, contexts, Tuning(pdl=False))
        plain.launch(finish=False)
        stack = DecodeStack(model, cache, contexts)
        stack.rows.page_table.copy_(plain.rows.page_table)
        stack.tokens.copy_(plain.tokens)
        stack.launch(finish=False)
        with torch.cuda.graph(stack.graph):
            stack.launch(finish=False)
        wrong = 0
        for _ in range(50):
            stack.logits.fill_(float("nan"))
            stack.graph.replay()
            wrong += not torch.equal(stack.logits, plain.logits)
        lines.append(f"races {name} quantised rows {len(contexts):2}: {wrong} of 50 replays differ")
        print(lines[-1], flush=True)
    return lines


def time_us(launches: list[Callable[[], None]]) -> float:
    """Mean device time of one launch, all of them in one graph, least of three after one that warms up."""
    return min(graph_times_us(launches, rounds=4, replays=4)[1:])


def linear_plans(form: WeightFormat, tokens: int) -> dict[str, LinearPlan]:
    plans = {"default": LinearPlan()}
    if form is not PLAIN and 1 < tokens <= 8:
        plans["no ring"] = LinearPlan(ring=False)
    if form is PLAIN:
        plans["slices"] = SLICES
        for rows, block, stages in ((16, 256, 3), (32, 256, 4)):
            plans[f"dot {rows}x{block} s{stages}"] = LinearPlan(dot_rows=rows, dot_block=block, dot_stages=stages)
        return plans
    if tokens == 1:
        dealt = (2, 1, 128), (2, 2, 128), (4, 1, 128), (2, 2, 64), (4, 1, 64), (4, 2, 64)
        for slices, row_warps, words in dealt:
            plans[f"stream {slices} x {row_warps}, {words} words"] = LinearPlan(
                stream_slices=slices, stream_row_warps=row_warps, stream_words=words
            )
        return plans | {"shared memory": LinearPlan(stream=False)}
    shapes = ((64, 256, 3, 4), (64, 512, 3, 4), (32, 256, 4, 2), (64, 128, 4, 2), (64, 256, 3, 2), (16, 256, 4, 1))
    for rows, block, stages, warps in shapes:
        plans[f"tile {rows}x{block} s{stages} w{warps}"] = LinearPlan(
            gemv_tokens=0, tile_rows=rows, tile_block=block, tile_stages=stages, warps=warps, ring=False
        )
    return plans


def linear_jobs(name: str, cases: list[tuple[WeightFormat, int]], copies: int) -> list[Job]:
    p = PRESETS[name]
    shapes = {"qkv": (p.projected, p.hidden), "o": (p.hidden, p.q_heads * 128)}
    jobs = []
    for form, tokens in cases:
        for part, (n, k) in shapes.items():
            # One token's norm is folded into its projection or costs a launch.
            norm = torch.zeros(k, dtype=torch.bfloat16, device="cuda") if part == "qkv" and tokens == 1 else None
            weights = [random_packed(form, n, k, scale=k**-0.5, device="cuda") for _ in range(copies)]
            x = torch.randn(tokens, k, device="cuda").to(torch.bfloat16 if form is PLAIN else torch.float16)
            out = torch.empty(tokens, n, dtype=torch.float32, device="cuda")
            for label, plan in linear_plans(form, tokens).items():
                call = partial(small_linear, norm_weight=norm, normed=torch.empty_like(x), plan=plan, pdl=True)
                launches = [partial(call, x, w, out) for w in weights]
                jobs.append((f"{name} {part} {form.name} x{tokens} {label}", launches, VALUE_BYTES[form] * n * k))
    return jobs


def expert_plans(form: WeightFormat) -> dict[str, MoePlan | None]:
    if form is PLAIN:
        return {"default": None, "s3": MoePlan(), "s4": MoePlan(stages=4), "32/64 s4": MoePlan(32, 128, 64, 128, 4, 4)}
    return {
        "default": None, "by launches": BY_LAUNCHES.moe, "four warps": FOUR_WARPS,
        "32/64 w4": MoePlan(32, 256, 64, 256, 3, 4),
        "s4": MoePlan(32, 256, 64, 256, 4, 2, 8), "64/64 w2": MoePlan(64, 256, 64, 256, 3, 2, 8),
        "32/64x128 s4 w2": MoePlan(32, 128, 64, 128, 4, 2, 8), "32/64x128 s6 w2": MoePlan(32, 128, 64, 128, 6, 2, 8),
        "16/32x256 s3 w1": MoePlan(16, 256, 32, 256, 3, 1, 8),
    }  # fmt: skip


def distinct_experts(x: Tensor, router: Tensor) -> int:
    """Experts that rows of x choose: norm and bias of `expert_jobs` are zero."""
    y = x.float() * x.float().square().mean(1, keepdim=True).rsqrt()
    return (y @ router.T).topk(TOP_EXPERTS).indices.unique().numel()


def expert_jobs(name: str, cases: list[tuple[Formats, int]], copies: int) -> list[Job]:
    """All of an MoE layer's launches; the bytes are those of the experts that were chosen. The down projections are so
    small that x, and with it the choice, stays as it is from one launch to the next."""
    p = PRESETS[name]
    h, i = p.hidden, p.inter
    jobs = []
    made: dict[Formats, list[tuple[PackedWeight, ...]]] = {}
    for formats, tokens in cases:
        if formats not in made:
            made.clear()
            made[formats] = [
                tuple(
                    random_packed(form, *shape, scale=scale, device="cuda")
                    for form, shape, scale in (
                        (formats.experts, (EXPERTS, 2 * i, h), h**-0.5), (formats.experts, (EXPERTS, h, i), 1e-6),
                        (formats.others, (2 * i, h), h**-0.5), (formats.others, (h, i), 1e-6),
                    )
                )
                for _ in range(copies)
            ]  # fmt: skip
        x = torch.randn(tokens, h, device="cuda").to(torch.bfloat16)
        norm = torch.zeros(h, dtype=torch.bfloat16, device="cuda")
        positions = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        routers = [torch.randn(EXPERTS, h, device="cuda") * h**-0.5 for _ in range(copies)]
        bias = torch.zeros(EXPERTS, device="cuda")
        scratch = MoeScratch.allocate(tokens, EXPERTS, TOP_EXPERTS, h, i, x)
        distinct = sum(distinct_experts(x, router) for router in routers) / copies
        size = 3 * h * i * (distinct * VALUE_BYTES[formats.experts] + VALUE_BYTES[formats.others])
        for label, plan in expert_plans(formats.experts).items():
            launches = [
                partial(
                    moe_few_tokens, x, positions, norm, router, bias, *weights, scratch, top_experts=TOP_EXPERTS,
                    scaling_factor=SCALING, plan=plan, pdl=True,
                )
                for router, weights in zip(routers, made[formats], strict=True)
            ]  # fmt: skip
            jobs.append((f"{name} moe {formats.experts.name}/{formats.others.name} x{tokens} {label}", launches, size))
    return jobs


def timed(jobs: list[Job]) -> list[str]:
    lines = []
    for label, launches, size in jobs:
        try:
            us = time_us(launches)
        except Exception as error:  # a sweep reports a point that does not compile and goes on
            print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        floor = size / STREAM_BYTES_PER_US
        lines.append(f"{label:50} {us:8.2f} us  floor {floor:7.2f} ({us / floor:4.2f} x)")
        print(lines[-1], flush=True)
    return lines


LINEAR_CASES = {
    "mini60": [(PLAIN, 4), (PLAIN, 16)],
    "slice8": [(MXFP8, 1), (MXFP8, 8)],
}
EXPERT_CASES = {
    "mini60": [(BF16, 16), (BF16, 32)],
    "slice8": [(QUANTISED, 1), (QUANTISED, 8)],
}
COPIES = {"mini60": 12, "slice8": 4}
"""Weights of one shape in a timing, so that L2 holds none of them from one launch to the next."""


def jobs_of(command: str, name: str, copies: int) -> list[Job]:
    if command == "linear":
        return linear_jobs(name, LINEAR_CASES[name], copies)
    return expert_jobs(name, EXPERT_CASES[name], min(copies, 4))


def count_of(command: str, name: str) -> int:
    """Kernels or stacks to compile for a command; `jobs_of` would need a GPU to count."""
    if command == "linear":
        return sum(2 * len(linear_plans(form, tokens)) for form, tokens in LINEAR_CASES[name])
    if command == "experts":
        return sum(len(expert_plans(formats.experts)) for formats, _ in EXPERT_CASES[name])
    return len(checked_rows()) if command == "check" else len(all_ways(name))


def checked_rows() -> list[tuple[Formats, list[int], Tuning]]:
    return [(formats, rows, tuning) for formats, tuning, contexts in checks() for rows in contexts]


def all_ways(name: str) -> list[tuple[Way, int, int]]:
    """bf16's are left out: they are few kernels, and their weights fill the memory of several processes."""
    return [(way, rows, context) for rows, context in POINTS[name] for way in ways(rows) if way.formats != BF16]


def warm(command: str, name: str, index: int, count: int) -> None:
    """Compile every count-th kernel of a command, into the disk cache that all processes share."""
    short = shortened(PRESETS[name], 2)
    if command in ("linear", "experts"):
        for _, launches, _ in jobs_of(command, name, 1)[index::count]:
            launches[0]()
    elif command == "check":
        for formats, contexts, tuning in checked_rows()[index::count]:
            cache = random_cache(short, len(contexts) * (max(contexts) // 128 + 1) + 1)
            DecodeStack(Model.random(short, formats=formats), cache, contexts, tuning).launch()
            del cache
    else:
        for way, rows, context in all_ways(name)[index::count]:
            stack_of(way, Model.random(short, formats=way.formats), {}, rows, context, pages_for(rows, context))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ["decode", "check", "races", "linear", "experts", "profile", "table"]
    parser.add_argument("commands", nargs="+", choices=commands)
    parser.add_argument("--preset", nargs="+", default=["slice8"], choices=sorted(PRESETS))
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    names = arguments.preset
    if arguments.jobs:
        begin = time.time()
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            tasks = [
                pool.submit(warm, command, name, index, min(arguments.jobs, count_of(command, name)))
                for command in arguments.commands if command in ("linear", "experts", "table", "check")
                for name in names for index in range(min(arguments.jobs, count_of(command, name)))
            ]  # fmt: skip
            for task in tasks:
                if task.exception() is not None:
                    print(f"warming: {task.exception()!r}"[:300], flush=True)
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    lines: list[str] = []
    for command in arguments.commands:
        if command == "decode":
            lines += every_code()
        for name in names if command != "decode" else ():
            if command == "check":
                lines += stack_check(name)
            elif command == "races":
                lines += races(name)
            elif command in ("linear", "experts"):
                lines += timed(jobs_of(command, name, COPIES[name]))
            elif command == "profile":
                lines += profile(name, POINTS[name])
            else:
                lines += table(name, POINTS[name], True)
            torch.cuda.empty_cache()
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
