"""Check and time the kernels for many tokens on a GPU.

    PYTHONPATH=src:benchmarks:. python benchmarks/gpu_prefill.py check triton formats packed kernels sweep prefill
        turn [--preset slice8]

`check` compares with fp32 references at real widths; `experts` does so for experts of long steps alone, `gluon` and
`triton` for sparse attention alone, in Gluon as where it fits and in Triton as elsewhere, `formats` for caches of fewer
bits and `packed` for experts on quantised weights, and these two time them; `kernels` times each kernel of a layer;
`sweep` times plans of the heavy ones; `prefill` runs a whole prompt in chunks, `turn` one chunk against a long cached
context.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import gpu_required  # noqa: F401  (ends here without a GPU)

# isort: split
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gpu_decode_stack import (
    EXPERTS,
    PRESETS,
    ROTARY_DIM,
    SCALING,
    STREAM_BYTES_PER_S,
    TOP_EXPERTS,
    Formats,
    Model,
    Preset,
    random_cache,
    random_layer,
    shortened,
)  # fmt: skip
from gpu_many_check import FORMATS, check, check_experts, check_formats, check_packed
from gpu_many_stack import ManyPlans, ManyStack, flops_and_bytes
from gpu_timing import kernel_spans
from longturn.kernels import msa_many_hopper
from longturn.kernels.moe_many import MoeManyPlan, MoeManyScratch, moe_many_tokens
from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaShape
from longturn.kernels.packed_weights import WeightFormat, as_packed
from longturn.kernels.pages import PageLayout
from longturn.kernels.unpack_weights import unpack

GEMM_FLOPS = 754e12
"""bf16 products of 8192^3 by the vendor's library on an H200, as measured."""


class CompileOnly:
    """Stands for the driver in processes that only compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def precompile(jobs: list[tuple[str, int, int, ManyPlans | None]]) -> None:
    """Compile every plan's kernels into Triton's disk cache, in a few processes that never touch the device.

    A job is preset, tokens, context, plans. Must come before this process first uses CUDA, since it forks.
    """
    begin = time.time()
    with multiprocessing.get_context("fork").Pool(min(14, len(jobs))) as pool:
        pool.starmap(_compile, jobs, chunksize=1)
    print(f"compiled {len(jobs)} plans in {time.time() - begin:.1f} s", flush=True)


def _compile(name: str, tokens: int, context: int, plans: ManyPlans | None) -> None:
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(CompileOnly())
    # Tensors here are the CPU's, so that the kernels for Hopper would not be chosen.
    msa_many_hopper.scores_fit = msa_many_hopper.attend_fits = lambda *a: True  # type: ignore[assignment]
    run = JITFunction.run
    JITFunction.run = lambda self, *a, **k: run(self, *a, **{**k, "warmup": True})  # type: ignore[method-assign]
    preset = shortened(PRESETS[name], 1)
    layout = PageLayout(preset.layers, preset.kv_heads)
    cache = torch.empty((context + tokens + 128) // 128 * layout.page_stride, dtype=torch.bfloat16)
    model = Model(
        preset, torch.empty(1, preset.hidden, dtype=torch.bfloat16), (), torch.empty(0), torch.empty(0), torch.empty(32)
    )
    stack = object.__new__(ManyStack)
    torch.cuda.CUDAGraph = lambda: None  # type: ignore[assignment,misc]
    stack.__init__(model, cache, tokens, context + tokens, plans)  # type: ignore[misc]
    few = replace(preset, inter=preset.inter)
    layer = replace(random_layer(replace(few, dense=few.inter), True, "cpu"), top=TOP_EXPERTS)
    layer = replace(layer, router=torch.empty(EXPERTS, preset.hidden))
    try:
        msa_many_tokens(
            stack.projected, stack.step, layer.heads, cache, 0, stack.attention, stack.shape, stack.plans.msa,
            stack.msa, pdl=stack.plans.pdl,
        )  # fmt: skip
        stack.mix(layer)
    except Exception as error:
        print(f"precompile {name} {tokens} {plans}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def kernel_times(launch: Callable[[], None], repeats: int = 5) -> dict[str, float]:
    """Mean device microseconds of each kernel name."""
    launch()
    times: dict[str, float] = defaultdict(float)
    for begin, end, kernel in kernel_spans(launch, repeats):
        times[kernel[:34]] += (end - begin) / repeats
    return dict(times)


def layer_stack(
    name: str, tokens: int, context: int, plans: ManyPlans | None = None, layout: PageLayout | None = None
) -> tuple[ManyStack, Preset]:
    p = shortened(PRESETS[name], 2)
    model = Model.random(p)
    pages = (context + tokens) // 128 + 40
    if layout is None:
        cache = random_cache(p, pages)
    else:
        # Random codes; scales and fp8 numbers of at most 1.75, since all 256 bytes would have NaN among them.
        cache = torch.randint(0, 64, (pages, layout.page_stride), dtype=torch.uint8, device="cuda")
    stack = ManyStack(model, cache, tokens, context + tokens, plans, layout)
    stack.seek(context)
    stack.begin()
    return stack, p


def kernels(name: str, points: list[tuple[int, int]]) -> list[str]:
    """Time of each kernel of one routed layer, against the larger of its two floors."""
    lines = []
    for tokens, context in points:
        stack, p = layer_stack(name, tokens, context)
        stack.plans = replace(stack.plans, pdl=False)  # overlapped, each kernel would seem to take longer
        layer = stack.model.layers[1]

        def one(stack: ManyStack = stack, layer: object = layer) -> None:
            stack.attend(1, layer)  # type: ignore[arg-type]
            stack.mix(layer)  # type: ignore[arg-type]

        times = kernel_times(one)
        floors = {
            part: max(f / GEMM_FLOPS, b / STREAM_BYTES_PER_S) * 1e6
            for part, (f, b) in flops_and_bytes(p, tokens, context).items()
        }
        line = f"kernels {name} T={tokens} context={context}: sum {sum(times.values()):.0f} us | "
        line += " ".join(f"{k} {v:.1f}" for k, v in sorted(times.items(), key=lambda i: -i[1]))
        line += " | floors " + " ".join(f"{k} {v:.1f}" for k, v in floors.items())
        lines.append(line)
        print(line, flush=True)
        del stack
        torch.cuda.empty_cache()
    return lines


def format_kernels(name: str, points: list[tuple[int, int]]) -> list[str]:
    """Time of each attention kernel over caches of fewer bits."""
    lines = []
    for tokens, context in points:
        for kv_format, index_format in FORMATS[:2]:
            layout = PageLayout(2, PRESETS[name].kv_heads, kv_format=kv_format, index_format=index_format)
            stack, _ = layer_stack(name, tokens, context, layout=layout)
            stack.plans = replace(stack.plans, pdl=False)
            times = kernel_times(lambda stack=stack: stack.attend(1, stack.model.layers[1]), 3)  # type: ignore[misc]
            heavy = ("_queries", "block_scores", "attend_lists", "combine_parts")
            shown = " ".join(f"{k} {v:.1f}" for k, v in times.items() if k.startswith(heavy))
            lines.append(f"formats {name} T={tokens} context={context} {kv_format}/{index_format}: {shown} us")
            print(lines[-1], flush=True)
            del stack
            torch.cuda.empty_cache()
    return lines


def default_plans(name: str, tokens: int, context: int) -> ManyPlans:
    p = PRESETS[name]
    shape = MsaShape(p.q_heads, PageLayout(2, p.kv_heads), ROTARY_DIM, (context + tokens) // 128 + 1)
    return ManyPlans(MsaManyPlan.default(shape, tokens), MoeManyPlan.default(tokens, EXPERTS, TOP_EXPERTS))


def packed(name: str, points: list[tuple[int, int]]) -> list[str]:
    """Experts on NVFP4 and MXFP8 weights as they are, and unpacked first."""
    lines = []
    p = shortened(PRESETS[name], 2)
    layer = random_layer(p, False, formats=Formats(WeightFormat.NVFP4, WeightFormat.MXFP8))
    weights = [as_packed(w) for w in (layer.w13, layer.w2, layer.shared_w13, layer.shared_w2)]
    plain = [torch.empty(w.shape, dtype=torch.bfloat16, device="cuda") for w in weights]
    for tokens, _ in points:
        x = torch.randn(tokens, p.hidden, device="cuda").bfloat16()
        scratch = MoeManyScratch.allocate(tokens, EXPERTS, TOP_EXPERTS, p.hidden, p.inter, x)
        positions = torch.arange(tokens, dtype=torch.int32, device="cuda")

        def mix(unpacked: bool) -> None:
            for weight, to in zip(weights, plain, strict=True) if unpacked else ():
                unpack(weight, to)
            moe_many_tokens(
                x, positions, layer.post_norm, layer.router, layer.bias, *(plain if unpacked else weights), scratch,  # noqa: B023
                top_experts=TOP_EXPERTS, scaling_factor=SCALING,
            )  # fmt: skip

        for unpacked in (False, True):
            times = kernel_times(lambda unpacked=unpacked: mix(unpacked), 3)  # type: ignore[misc]
            shown = " ".join(f"{k} {v:.1f}" for k, v in times.items() if k.startswith(("experts_", "_unpack")))
            lines.append(f"packed {name} T={tokens}: sum {sum(times.values()):.0f} us | {shown}")
            print(lines[-1], flush=True)
    return lines


def variants(name: str, tokens: int, context: int) -> Iterator[tuple[str, str, ManyPlans]]:
    """(kernel, label, plans): one kernel's plan changed at a time."""
    base = default_plans(name, tokens, context)
    for hopper in (False, True):
        msa = replace(base.msa, hopper_scores=hopper)
        label = "gluon" if hopper else "triton"
        yield "block_scores", label, replace(base, msa=msa, pdl=False)
    for hopper, piece in ((False, base.msa.piece), (True, 32), (True, 64), (True, 128)):
        msa = replace(base.msa, hopper_attend=hopper, piece=piece)
        label = f"{'gluon' if hopper else 'triton'}, pieces of {piece}"
        yield "attend_lists", label, replace(base, msa=msa, pdl=False)
    for tile, least, columns, block, stages, warps in IN_PLANS.get(tokens, []):
        moe_plan = replace(
            base.moe, tile=tile, least=least, in_columns=columns, in_block=block, in_stages=stages, in_warps=warps,
            down_columns=2 * columns, down_block=block, down_stages=stages, down_warps=warps,
        )  # fmt: skip
        label = f"{tile}/{least}x2x{columns} k{block} s{stages} w{warps}"
        yield "experts_", label, replace(base, moe=moe_plan, pdl=False)


IN_PLANS = {
    2048: [(64, 64, 64, 64, 3, 4), (64, 32, 64, 64, 3, 4), (64, 16, 64, 64, 3, 4)],
    8192: [(128, 128, 128, 64, 4, 8), (128, 64, 128, 64, 4, 8), (128, 32, 128, 64, 4, 8), (128, 64, 64, 64, 3, 4)],
    16384: [(128, 64, 128, 64, 4, 8)],
}  # fmt: skip
"""Expert tiles to try: tokens, tokens of a short tile, columns of gate (and of up; twice that for down), columns of K,
stages, warps."""


def sweep(name: str, points: list[tuple[int, int]]) -> list[str]:
    lines = []
    for tokens, context in points:
        stack, _ = layer_stack(name, tokens, context)
        layer = stack.model.layers[1]
        stack.attend(1, layer)
        for kernel, label, plans in variants(name, tokens, context):
            part = "mix" if kernel == "experts_" else "attend"
            if plans.msa.piece != stack.plans.msa.piece:
                stack.msa = MsaManyScratch.allocate(
                    tokens, stack.cache.numel() // stack.layout.page_stride, stack.shape, plans.msa, stack.cache
                )
            stack.plans = plans

            def one(stack: ManyStack = stack, part: str = part, layer: object = layer) -> None:
                stack.mix(layer) if part == "mix" else stack.attend(1, layer)  # type: ignore[func-returns-value,arg-type]

            try:
                times = kernel_times(one, 3)
            except Exception as error:
                print(f"sweep {name} T={tokens} {label}: {type(error).__name__}: {str(error)[:160]}", flush=True)
                continue
            found = " ".join(f"{k} {v:.1f}" for k, v in times.items() if k.startswith(kernel))
            lines.append(f"sweep {name} T={tokens} context={context} {label:24}: {found} us")
            print(lines[-1], flush=True)
        del stack
        torch.cuda.empty_cache()
    return lines


def whole(name: str, prompt: int, chunks: list[int], turn: bool) -> list[str]:
    """A whole prompt in chunks by one graph each; or, if `turn`, 512 new tokens after `prompt` cached ones."""
    p = PRESETS[name]
    model = Model.random(p)
    cache = random_cache(p, (prompt + 1024) // 128 + 2)
    lines = []
    for tokens in chunks:
        stack = ManyStack(model, cache, tokens, prompt + 512)
        stack.seek(0)
        stack.capture()
        starts = [prompt] * 3 if turn else list(range(0, prompt, tokens))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(starts) + 1)]
        for start, event in zip(starts, events, strict=False):
            stack.seek(start)
            event.record()
            stack.graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        each = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        if turn:
            every = " ".join(f"{e:.2f}" for e in each)
            lines.append(f"turn {name} {tokens} new after {prompt}: {sorted(each)[1]:.2f} ms ({every})")
        else:
            rate = prompt / sum(each) * 1e3
            lines.append(
                f"prefill {name} {prompt} in chunks of {tokens}: {rate:.0f} tok/s, first chunk {each[0]:.1f} ms, "
                f"last {each[-1]:.1f} ms"
            )
        print(lines[-1], flush=True)
        del stack
        torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    choices = ["check", "experts", "gluon", "triton", "formats", "packed", "kernels", "sweep", "prefill", "turn"]
    parser.add_argument("commands", nargs="+", choices=choices)
    parser.add_argument("--preset", default="mini60", choices=sorted(PRESETS))
    parser.add_argument("--points", nargs="*", default=["512,131072", "2048,65536", "8192,65536"])
    parser.add_argument("--prompt", type=int, default=131072)
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache, so that a later call starts")
    parser.add_argument("--triton", action="store_true", help="sparse attention by the Triton kernels throughout")
    arguments = parser.parse_args()
    if arguments.triton:
        make = MsaManyPlan.default
        MsaManyPlan.default = staticmethod(  # type: ignore[method-assign]
            lambda *a: replace(make(*a), hopper_scores=False, hopper_attend=False)
        )
    name = arguments.preset
    points = [(int(tokens), int(context)) for tokens, context in (point.split(",") for point in arguments.points)]
    jobs: list[tuple[str, int, int, ManyPlans | None]] = []
    for tokens, context in points if "kernels" in arguments.commands else []:
        jobs.append((name, tokens, context, replace(default_plans(name, tokens, context), pdl=False)))
    if "prefill" in arguments.commands:
        jobs += [(name, tokens, arguments.prompt + 512 - tokens, None) for tokens in arguments.chunks]
    if "turn" in arguments.commands:
        jobs.append((name, 512, arguments.prompt, None))
    if "sweep" in arguments.commands:
        jobs += [(name, *point, plans) for point in points for _, _, plans in variants(name, *point)]
    if jobs:
        precompile(jobs)
    if arguments.compile_only:
        return
    torch.manual_seed(time.time_ns() % 2**31)
    lines: list[str] = []
    for command in arguments.commands:
        begin = time.time()
        if command == "check":
            lines += check(name, hopper=True)
        elif command == "experts":
            lines += [line for tokens in (4224, 8192) for line in check_experts(name, tokens)]
        elif command in ("gluon", "triton"):
            lines += check(name, hopper=command == "gluon", experts=False)
        elif command == "packed":
            lines += [check_packed(name, tokens) for tokens, _ in points] + packed(name, points)
        elif command == "formats":
            lines += check_formats(name) + format_kernels(name, points)
        elif command == "kernels":
            lines += kernels(name, points)
        elif command == "sweep":
            lines += sweep(name, points)
        elif command == "prefill":
            lines += whole(name, arguments.prompt, arguments.chunks, turn=False)
        elif command == "turn":
            lines += whole(name, arguments.prompt, [512], turn=True)
        torch.cuda.empty_cache()
        print(f"{command}: {time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
