"""Check and time the decode kernels on a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_kernels.py check order races profile sweep table [--preset slice8]

Prints short lines as it goes and a table last. Numbers in docs/performance.md name the command that made them.
"""

from __future__ import annotations

import argparse
import time
import traceback
from dataclasses import replace

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_decode_stack import (
    PRESETS,
    DecodeStack,
    Formats,
    Model,
    Tuning,
    floor_ms,
    random_cache,
    reference_step,
    shortened,
)
from gpu_launch_order import launch_order
from longturn.executor.gpu.compile import Compilation, Kernel, noting_kernels
from longturn.kernels.moe_few import MoePlan
from longturn.kernels.moe_one import MoeOnePlan
from longturn.kernels.msa_plan import MsaPlan
from longturn.kernels.small_linear import LinearPlan

VLLM_MS = {
    ("mini60", 1, 4096): 6.19, ("mini60", 1, 32768): 6.46, ("mini60", 1, 131072): 6.83, ("mini60", 4, 131072): 18.30,
    ("mini60", 16, 32768): 12.96, ("mini60", 32, 8192): 14.43, ("slice8", 1, 4096): 2.68, ("slice8", 1, 131072): 2.79,
    ("slice8", 8, 32768): 7.72, ("slice8", 32, 32768): 14.07,
}  # fmt: skip
"""vLLM 0.25.1 on the same card, ms (docs/performance.md)."""


def pages_for(rows: int, context: int) -> int:
    return rows * (context // 128 + 1) + 1


CHECKED_CONTEXTS = [
    [0], [127], [128], [2047], [2048], [9000], [0, 129, 2049, 5000], [1, -1] * 8, [777, 6000] * 16,
    [140_000, 5, 3000, 70_000], [20_000, 300] * 8, [9000, 700] * 16,
]  # fmt: skip
RACING_CONTEXTS = [
    [4000], [129, 2049, 5000, 0], [777, 6000] * 8, [777, 6000] * 16, [140_000, 5, 3000, 70_000], [20_000, 300] * 8,
    [9000, 700] * 16,
]  # fmt: skip


def compile_ahead(stacks: list[DecodeStack]) -> None:
    """Compile what these launch, side by side."""
    kernels: list[Kernel] = []
    for stack in stacks:
        with noting_kernels() as noted:
            stack.launch()
        kernels += noted
    Compilation(kernels).wait()


def check(
    name: str, pdl: bool, formats: Formats | None = None, tuning: Tuning | None = None,
    all_contexts: list[list[int]] | None = None,
) -> list[str]:  # fmt: skip
    """Logits of three layers against fp32 over awkward lengths, poisoned buffers, eager and replayed."""
    preset = shortened(PRESETS[name], 3)
    model = Model.random(preset, formats=formats)
    tuning = replace(tuning or Tuning(), pdl=pdl)
    lines = []
    wanted = all_contexts or CHECKED_CONTEXTS
    cache = random_cache(preset, max(len(contexts) * (max(contexts) // 128 + 1) for contexts in wanted) + 1)
    compile_ahead([DecodeStack(model, cache, contexts, tuning) for contexts in wanted])
    for contexts in wanted:
        blocks = max(contexts) // 128 + 1
        stack = DecodeStack(model, random_cache(preset, len(contexts) * blocks + 1), contexts, tuning)
        expected, margin = reference_step(stack)
        start_tokens = stack.tokens.clone()
        stack.launch(finish=False)
        eager = stack.logits.clone()
        stack.launch()
        with torch.cuda.graph(stack.graph):
            stack.launch()
        stack.reset()
        stack.tokens.copy_(start_tokens)
        stack.logits.fill_(float("nan"))
        stack.graph.replay()
        torch.cuda.synchronize()
        live = (stack.start >= 0) & (margin > 5e-3)
        ok = torch.isfinite(stack.logits).all().item()
        if not live.any():
            print(f"check {name} {contexts}: near tie, not compared", flush=True)
            continue
        error = ((stack.logits[live] - expected[live]).norm() / expected[live].norm()).item()
        worst = ((stack.logits[live] - expected[live]).norm(dim=1) / expected[live].norm(dim=1)).max().item()
        same = torch.equal(eager, stack.logits)
        moved = torch.equal(stack.positions, torch.where(stack.start >= 0, stack.start + 1, stack.start))
        verdict = "ok" if ok and error < 2e-2 and same and moved else "WRONG"
        lines.append(
            f"check {name} pdl={pdl} {str(contexts)[:30]:30} rows compared {live.sum().item():2} rel {error:.2e} "
            f"worst row {worst:.2e} replay=eager {same} {verdict}"
        )
        print(lines[-1], flush=True)
    return lines


def races(name: str, all_contexts: list[list[int]] | None = None) -> list[str]:
    """Replays of one step, with and without dependent launch in each part, must agree to the bit."""
    preset = shortened(PRESETS[name], 6)
    model = Model.random(preset)
    lines = []
    variants = {
        "on": Tuning(),
        "off in o": Tuning(no_pdl=frozenset({"o"})),
        "off in moe": Tuning(no_pdl=frozenset({"moe"})),
    }
    wanted = all_contexts or RACING_CONTEXTS
    cache = random_cache(preset, max(len(contexts) * (max(contexts) // 128 + 1) for contexts in wanted) + 1)
    tunings = [Tuning(pdl=False), *variants.values()]
    compile_ahead([DecodeStack(model, cache, contexts, tuning) for contexts in wanted for tuning in tunings])
    for contexts in wanted:
        plain = DecodeStack(model, cache, contexts, Tuning(pdl=False))
        plain.launch(finish=False)
        for label, tuning in variants.items():
            stack = DecodeStack(model, cache, contexts, tuning)
            stack.rows.page_table.copy_(plain.rows.page_table)
            stack.tokens.copy_(plain.tokens)
            with torch.cuda.graph(stack.graph):
                stack.launch(finish=False)
            wrong = 0
            for _ in range(50):
                stack.logits.fill_(float("nan"))
                stack.graph.replay()
                wrong += not torch.equal(stack.logits, plain.logits)
            where = f"{name} rows {len(contexts):2} up to {max(contexts)}"
            lines.append(f"races {where}, dependent launch {label:11}: {wrong} of 50 replays differ")
            print(lines[-1], flush=True)
    return lines


def profile(name: str, rows: int, context: int, tunings: dict[str, Tuning]) -> list[str]:
    """Start and duration of each kernel of one middle layer of a replay."""
    preset = shortened(PRESETS[name], min(16, PRESETS[name].layers))
    model = Model.random(preset)
    cache = random_cache(preset, pages_for(rows, context))
    lines = []
    for label, tuning in tunings.items():
        stack = DecodeStack(model, cache, [context] * rows, tuning)
        stack.capture()
        for _ in range(3):
            stack.graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            stack.graph.replay()
            torch.cuda.synchronize()
        events = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.name.startswith("_")
        )
        per_layer = (len(events) - 4) // preset.layers
        first = 1 + preset.layers // 2 * per_layer
        zero = events[first][0]
        line = f"profile {name} {rows}x{context} {label}: "
        line += " | ".join(f"{e[2]} {e[0] - zero:.1f}+{e[1] - e[0]:.1f}" for e in events[first : first + per_layer + 1])
        lines.append(line)
        print(line, flush=True)
    return lines


def step(name: str, points: dict[tuple[int, int], dict[str, Tuning]]) -> list[str]:
    """Step time of whole stacks, each point with its tunings."""
    preset = PRESETS[name]
    begin = time.time()
    model = Model.random(preset)
    torch.cuda.synchronize()
    print(
        f"{name}: weights in {time.time() - begin:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True
    )
    lines = []
    cache = random_cache(preset, max(pages_for(*point) for point in points))
    for (rows, context), label, tuning in [(point, *item) for point, some in points.items() for item in some.items()]:
        try:
            begin = time.time()
            stack = DecodeStack(model, cache, [context] * rows, tuning)
            stack.capture()
            took = time.time() - begin
            ms = stack.time_ms()
        except Exception as error:  # a sweep reports a point that does not compile and goes on
            print(f"{name} {rows}x{context} {label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=-3)
            continue
        floor, peer = floor_ms(preset, rows, context), VLLM_MS.get((name, rows, context))
        against = f"vLLM {peer:6.2f} ({peer / ms:4.2f} x)" if peer and len(tuning.parts) == 5 else ""
        lines.append(
            f"{name} {rows:2} x {context:6} {label:28} {ms:7.3f} ms  floor {floor:6.2f} ({ms / floor:4.2f} x)  "
            f"{against} [compile+capture {took:.0f} s]"
        )
        print(lines[-1], flush=True)
        del stack
    return lines


def plans(rows: int, context: int) -> dict[str, Tuning]:
    """One change at a time from the default."""
    base = Tuning()
    blocks = context // 128 + 1
    out = {"default": base, "no pdl": replace(base, pdl=False)}
    plan = MsaPlan.default(rows, blocks)
    for splits in (2, 4, 8, 16) if rows > 1 else ():
        if splits != plan.splits and splits * rows * 4 <= 1100:
            out[f"splits {splits}"] = replace(base, msa=replace(plan, splits=splits))
    if blocks > plan.fused_blocks:
        out["select 256"] = replace(base, msa=replace(plan, select_blocks=256))
    apart, ahead = LinearPlan(ahead=False), LinearPlan(ahead=True)
    out["o not ahead"] = replace(base, o=apart)
    out["qkv ahead"] = replace(base, qkv=ahead)
    out["qkv not ahead"] = replace(base, qkv=apart)
    out["scores 264 s3"] = replace(base, msa=replace(plan, chunks=max(1, min(blocks, 264 // rows)), score_stages=3))
    if rows == 1:
        out["attend w4"] = replace(base, msa=replace(plan, warps=4))
        for one in (MoeOnePlan(2, 4, 8, 8), MoeOnePlan(2, 2, 8, 4), MoeOnePlan(2, 4, 4, 4), MoeOnePlan(1, 2, 8, 4)):
            out[f"in {one.in_rows} w{one.in_warps}, down {one.down_rows} w{one.down_warps}"] = replace(
                base, moe_one=one
            )
        return out
    out["norm apart"] = replace(base, next_norm=False)
    out["moe s4"] = replace(base, moe=MoePlan(stages=4))
    out["ranks in attend"] = replace(base, msa=replace(plan, fused_blocks=max(blocks, 128) if blocks <= 128 else 0))
    return out


POINTS = {
    "mini60": [(1, 4096), (1, 32768), (1, 131072), (4, 131072), (16, 32768), (32, 8192)],
    "slice8": [(1, 4096), (1, 131072), (8, 32768), (32, 32768)],
}
"""Rows and context of the table in docs/performance.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["check", "order", "races", "profile", "sweep", "table"])
    parser.add_argument("--preset", default="mini60", choices=sorted(PRESETS))
    parser.add_argument("--points", nargs="*", help="rows,context of the points to take; all by default")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    name = arguments.preset
    points = POINTS[name]
    if arguments.points:
        points = [(int(rows), int(context)) for rows, context in (point.split(",") for point in arguments.points)]
    lines: list[str] = []
    for command in arguments.commands:
        if command == "check":
            lines += check(name, pdl=False) + check(name, pdl=True)
        elif command == "order":
            lines += launch_order()
        elif command == "races":
            lines += races(name)
        elif command == "profile":
            for point in points:
                lines += profile(name, *point, {"pdl": Tuning(), "no pdl": Tuning(pdl=False)})
        elif command == "sweep":
            lines += step(name, {point: plans(*point) for point in points})
        elif command == "table":
            lines += step(name, {point: {"default": Tuning()} for point in points})
        torch.cuda.empty_cache()
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
