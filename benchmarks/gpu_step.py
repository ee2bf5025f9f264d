"""Step times of the GPU executor through the engine, from a source tree with torch and Triton alone.

    PYTHONPATH=src python benchmarks/gpu_step.py [POINT ...] [--preset NAME]
    PYTHONPATH=src:benchmarks python benchmarks/gpu_step.py --host ROWSxCONTEXT [--preset NAME]
    PYTHONPATH=src:benchmarks python benchmarks/gpu_step.py --device ROWSxCONTEXT [--preset NAME]

Without either option this is `longturn bench step`. `--host`: where the host's time of a decode step goes, by function.
`--device`: where the device's goes that the bare stack of `gpu_decode_stack.py` does not take, over the same weights
and cache; bf16 presets alone.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from longturn.cli.main import main
from longturn.cli.steps.harness import Stand, Watch, drain, pass_over, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of
from longturn.engine.loop import Engine
from longturn.executor.gpu.buckets import StepKind

STEPS = 200


def standing(preset: str, rows: int, context: int, steps: int) -> tuple[Stand, Engine, Watch, list[str]]:
    """Rows that have decoded a few tokens at a context, and will decode `steps` more."""
    point = Point("decode", rows, context)
    stand = Stand(preset, **size_of((point,), 8192))
    prepare(stand, (point,))
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(rows)]
    pass_over(engine, watch, [request(name, stand.tokens(context), steps + 40) for name in names])
    for _ in range(10):
        engine.step()
    gc.collect()
    gc.freeze()
    return stand, engine, watch, names


def host_profile(preset: str, rows: int, context: int) -> None:
    """Print the functions that a decode step's host time is spent in."""
    _, engine, watch, names = standing(preset, rows, context, STEPS)
    watch.waited_ns = 0
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        engine.step()
    profiler.disable()
    print(f"{STEPS} steps, {watch.waited_ns / STEPS / 1e3:.0f} us of each waiting")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    drain(engine, names)


def device_profile(preset: str, rows: int, context: int) -> None:
    """Print what a step takes through the engine, as a bare graph, and as the stack; then kernels of the last two."""
    from gpu_decode_stack import PRESETS, DecodeStack, Layer, Model

    stand, engine, watch, names = standing(preset, rows, context, 3 * STEPS)
    for _ in range(3):
        watch.device_ns.clear()
        begin = time.perf_counter()
        for _ in range(40):
            engine.step()
        wall = (time.perf_counter() - begin) / 40 * 1e3
        device = sorted(watch.device_ns)[len(watch.device_ns) // 2] / 1e6
        print(f"engine        {wall:.3f} ms a step, {device:.3f} between its events", flush=True)
    executor, c, weights = stand.executor, stand.config, stand.model._weights
    shape = executor.shape_for(StepKind.DECODE, rows, context // 128 + 2)
    graph = executor._graphs._graphs[(shape,)]
    state = executor._steps.state
    state.staging[:2].zero_()  # no differences: every replay is the last step again
    torch.cuda.synchronize()
    for _ in range(3):
        print(f"its graph     {replayed_ms(graph.replay):.3f} ms", flush=True)
    layers = tuple(Layer(w.input_norm, w.projection, w.heads, w.out, *w.feed_forward, w.top) for w in weights.layers)
    model = Model(PRESETS[preset], weights.embedding, layers, weights.norm, weights.head, stand.model._inv_freq)
    for name in ("at its own tokens", "at the engine's"):
        stack = DecodeStack(model, stand.model.cache.view(-1), [context + 200] * rows)
        if name == "at the engine's":
            stack.rows.page_table.copy_(state.batch_table[:rows, : stack.blocks])
            stack.tokens.copy_(state.tokens[:rows])
        first = stack.tokens.clone()
        stack.capture()
        stack.tokens.copy_(first)
        stack.positions.copy_(state.position[:rows])
        stack.start.copy_(state.position[:rows])
        print(f"stack         {stack.time_ms():.3f} ms, {name}; layers alone", flush=True)
    print(f"distinct experts of the last layer: engine {distinct(executor, stand, rows)} of {c.experts}", flush=True)
    print(f"tokens of the engine's rows: {len(set(state.tokens[:rows].tolist()))} distinct", flush=True)
    tables = [kernels(graph.replay), kernels(stack.graph.replay)]
    for name in sorted(set(tables[0]) | set(tables[1]), key=lambda n: -max(t[n] for t in tables)):
        print(f"  {name:<44} engine's graph {tables[0][name]:>9.1f} us   stack {tables[1][name]:>9.1f} us")
    print(f"  {'sum':<44} engine's graph {sum(tables[0].values()):>9.1f} us   stack {sum(tables[1].values()):>9.1f} us")
    drain(engine, names)


def distinct(executor: object, stand: Stand, rows: int) -> float:
    """Mean number of different experts in a layer, at the state that the engine left."""
    from longturn.kernels import moe_few

    counts: list[int] = []
    launch = moe_few._experts_in.run

    def counting(*args: object, **more: object) -> object:
        chosen = args[1]
        assert isinstance(chosen, torch.Tensor)
        if more["TOP"]:
            counts.append(len(set(chosen.tolist()) - {-1}))
        return launch(*args, **more)

    moe_few._experts_in.run = counting
    try:
        with executor._steps.on_stream(), torch.inference_mode():  # type: ignore[attr-defined]
            state = executor._steps.state  # type: ignore[attr-defined]
            stand.model.decode(
                state.tokens[:rows], state.position[:rows], state.batch_table[:rows], state.hidden[:rows], 128
            )
            torch.cuda.synchronize()
    finally:
        del moe_few._experts_in.run
    return sum(counts) / max(1, len(counts))


def replayed_ms(replay: Callable[[], None], steps: int = 40) -> float:
    """Mean time of a replay on the device."""
    for _ in range(3):
        replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps


def kernels(replay: Callable[[], None], steps: int = 3) -> Counter[str]:
    """Microseconds of a replay by kernel; kernels that run at once count each."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            replay()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiler.key_averages():
        found[f"{event.key[:36]} x{event.count // steps}"] += event.self_device_time_total / steps
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--host")
    options.add_argument("--device")
    options.add_argument("--preset", default="mini60")
    known, _ = options.parse_known_args()
    if known.host or known.device:
        wanted_rows, wanted_context = map(int, (known.host or known.device).split("x"))
        (host_profile if known.host else device_profile)(known.preset, wanted_rows, wanted_context)
    else:
        sys.exit(main(["bench", "step", *sys.argv[1:]]))
