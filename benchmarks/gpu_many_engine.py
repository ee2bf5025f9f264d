"""Where the time of a prompt goes, through the engine and in its kernels alone.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_many_engine.py engine kernels plans --preset slice8 --prompt 32768

`engine` computes whole prompts through the engine and prints each chunk's time on the device and what the prompt took
beyond them, with the card's clock and power beside it; `kernels` profiles a prompt through the engine, by kernel and
with the times at which no kernel ran, beside the same kernels as `gpu_many_stack.py` chains them over the same weights
and cache; `plans` times one chunk in the middle of the prompt with one plan changed at a time.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_decode_stack import PRESETS, Layer, Model, shortened
from gpu_many_stack import ManyStack
from gpu_timing import alone, captured, kernel_spans, meet, noted, time_ms
from longturn.cli.steps import harness
from longturn.cli.steps.harness import Stand, drain, first_tokens, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of
from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.compile import Compilation
from longturn.kernels.many_tokens import TILE_TOKENS
from longturn.kernels.plan_table import Entry, PlanTable
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.models.minimax_m3_gpu_plans import GpuPlans

CHANGES: tuple[tuple[str, dict[str, int | bool]], ...] = (
    ("moe_many", {"shared_apart": False}),
    ("moe_many", {"shared_apart": True}),
    ("moe_many", {"copied": False}),
    ("moe_many", {"least": 128}),
    ("moe_many", {"in_stages": 3, "down_stages": 3}),
    ("msa_many", {"piece": 64}),
    ("msa_many", {"hopper_attend": False}),
)


def first_layers(c: MiniMaxM3Config, layers: int) -> MiniMaxM3Config:
    return replace(c, sparse_layers=c.sparse_layers[:layers], moe_layers=c.moe_layers[:layers])


def clocks() -> subprocess.Popen[str]:
    """Reads the card's clock and power ten times a second; changes nothing."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def engine(stand: Stand, prompt: int) -> list[str]:
    """Prompts through the engine, the first of which warms up."""
    made, watch = stand.engine(passing=False)
    launch = watch._executor.launch
    hosts: list[float] = []

    def timed(plan: object) -> object:
        begin = time.perf_counter()
        handle = launch(plan)  # type: ignore[arg-type]
        hosts.append((time.perf_counter() - begin) * 1e3)
        return handle

    watch._executor.launch = timed  # type: ignore[method-assign,assignment]
    lines = []
    reader = clocks()
    for turn in range(4):
        watch.device_ns.clear()
        hosts.clear()
        tokens = stand.tokens(prompt)
        ms = first_tokens(made, [request(f"p{turn}", tokens, 1)])
        drain(made, ())
        chunks = [ns / 1e6 for ns in watch.device_ns]
        each = " ".join(f"{ms:.2f}" for ms in chunks)
        lines.append(
            f"engine {prompt}: {prompt / ms * 1e3:.0f} tok/s, {ms:.2f} ms, chunks {each} "
            f"({ms - sum(chunks):+.2f} beyond them); launches took the host {' '.join(f'{h:.2f}' for h in hosts)}"
        )
    reader.terminate()
    shown = reader.stdout.read().splitlines() if reader.stdout else []
    lines.append("clock MHz, W, C, reasons: " + "; ".join(line.replace(" ", "") for line in shown[-30:]))
    watch._executor.launch = launch  # type: ignore[method-assign]
    return lines


def traced(work: Callable[[], None]) -> tuple[Counter[str], float, float]:
    """Microseconds by kernel or copy, from the first one's start to the last one's end, and of that without any."""
    found = kernel_spans(work)
    times: Counter[str] = Counter()
    until, idle = found[0][0], 0.0
    for begin, end, name in found:
        times[name[:40]] += end - begin
        idle += max(0.0, begin - until)
        until = max(until, end)
    return times, until - found[0][0], idle


def stack_of(stand: Stand, tokens: int, prompt: int) -> ManyStack:
    """The kernels as the stack chains them, over the executor's weights and cache."""
    c, weights = stand.config, stand.model._weights
    layers = tuple(Layer(w.input_norm, w.projection, w.heads, w.out, *w.feed_forward, w.top) for w in weights.layers)
    preset = shortened(PRESETS[stand.form.shape], c.layers)
    model = Model(preset, weights.embedding, layers, weights.norm, weights.head, stand.model._inv_freq)
    return ManyStack(model, stand.model.cache.view(-1), tokens, prompt + 512)


def kernels(stand: Stand, stack: ManyStack, prompt: int) -> list[str]:
    """One prompt each way."""
    made, _ = stand.engine(passing=False)
    chunk = stack.tokens
    prompts = iter([request(f"k{i}", stand.tokens(prompt), 1) for i in range(2)])

    def through_engine() -> None:
        first_tokens(made, [next(prompts)])

    def through_stack() -> None:
        for start in range(0, prompt, chunk):
            stack.seek(start)
            stack.graph.replay()

    lines, tables = [], []
    for _ in range(3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(prompt // chunk + 1)]
        for start, event in zip(range(0, prompt, chunk), events, strict=False):
            event.record()
            stack.seek(start)
            stack.graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        each = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        lines.append(f"stack {prompt}: {prompt / sum(each) * 1e3:.0f} tok/s, " + " ".join(f"{e:.2f}" for e in each))
    for label, work in (("engine", through_engine), ("stack", through_stack)):
        work()
        times, span, idle = traced(work) if label == "stack" else traced(through_engine)
        lines.append(f"kernels {label}: {span / 1e3:.2f} ms, of which {idle / 1e3:.2f} without a kernel")
        tables.append(times)
    drain(made, ())
    for name in sorted(set(tables[0]) | set(tables[1]), key=lambda n: -max(t[n] for t in tables))[:26]:
        lines.append(f"  {name:<42} engine {tables[0][name] / 1e3:9.3f} ms   stack {tables[1][name] / 1e3:9.3f}")
    lines.append(
        f"  {'sum':<42} engine {sum(tables[0].values()) / 1e3:9.3f} ms   stack {sum(tables[1].values()) / 1e3:9.3f}"
    )
    return lines


class Chunk:
    """One chunk of a prompt on the executor's model."""

    def __init__(self, stand: Stand, tokens: int, start: int, blocks: int) -> None:
        self.model, self.count, self.blocks = stand.model, tokens, blocks
        device, own = self.model.device, (start + tokens) // PAGE_TOKENS + 1
        table = torch.zeros(1, max(own, blocks), dtype=torch.int32)
        table[0, :own] = torch.randperm(self.model.pages - 1)[:own].int() + 1
        firsts = torch.arange(0, tokens, TILE_TOKENS, dtype=torch.int32)
        tiles = torch.stack((firsts, torch.full_like(firsts, TILE_TOKENS)), 1)
        self.table, self.tiles = table.to(device), torch.cat((tiles, torch.zeros(8, 2, dtype=torch.int32))).to(device)
        self.ids = torch.randint(self.model.vocab_size, (tokens,), dtype=torch.int32, device=device)
        self.positions = torch.arange(start, start + tokens, dtype=torch.int32, device=device)
        self.rows = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.x = torch.empty(tokens, self.model.hidden, dtype=self.model.dtype, device=device)

    def step(self, kernel: str = "", fields: dict[str, int | bool] | None = None) -> Callable[[], None]:
        model = self.model
        if fields:
            entry = Entry(kernel, model.plans.shapes[kernel], self.count, fields)
            model = model.with_plans(GpuPlans(table=PlanTable().with_entry(entry)))
        return lambda: model.many(self.ids, self.positions, self.rows, self.table, self.tiles, self.x, self.blocks)


def plans(chunk: Chunk) -> list[str]:
    base = captured(chunk.step())
    before = time_ms(base, 3)
    lines = [f"plans: default {before:.2f} ms"]
    for kernel, fields in CHANGES:
        try:
            ms = time_ms(captured(chunk.step(kernel, fields)), 2)
            before = time_ms(base, 2)
        except Exception as error:
            lines.append(f"plans {kernel} {fields}: {type(error).__name__}: {str(error)[:100]}")
            continue
        lines.append(f"plans {kernel} {fields}: {ms:.2f} ms {(ms / before - 1) * 100:+.2f} %")
    lines.append(f"plans: default {time_ms(base, 3):.2f} ms")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["engine", "kernels", "plans"])
    parser.add_argument("--preset", default="slice8")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="the model's first layers alone")
    parser.add_argument("--lock")
    parser.add_argument("--parties", type=int, default=1, help="processes that get ready before any of them times")
    arguments = parser.parse_args()
    prompt, chunk = arguments.prompt, arguments.chunk
    begin = time.time()
    if arguments.layers:
        whole = harness.minimax_m3_config
        harness.minimax_m3_config = lambda c: first_layers(whole(c), arguments.layers)  # type: ignore[assignment]
    point = Point("prefill", 1, prompt)
    stand = Stand(arguments.preset, **{**size_of((point,), chunk), "rows": 8, "cached_tokens": 4 * prompt})
    prepare(stand, (point,))
    print(f"engine ready after {time.time() - begin:.1f} s", flush=True)
    stack = stack_of(stand, chunk, prompt) if "kernels" in arguments.commands else None
    middle = Chunk(stand, chunk, prompt // 2, prompt // PAGE_TOKENS * 2)
    wanted = [] if stack is None else noted(stack.launch)
    if "plans" in arguments.commands:
        wanted += noted(middle.step())
        for change in CHANGES:
            wanted += noted(middle.step(*change))
    Compilation(wanted).wait()
    print(f"all compiled after {time.time() - begin:.1f} s", flush=True)
    meet(arguments.lock, arguments.parties)
    lines: list[str] = []
    with alone(arguments.lock):
        for command in arguments.commands:
            if command == "engine":
                lines += engine(stand, prompt)
            elif stack is not None and command == "kernels":
                stack.seek(0)
                stack.capture()
                lines += kernels(stand, stack, prompt)
            else:
                lines += plans(middle)
            print(f"{command} after {time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
