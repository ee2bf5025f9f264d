"""Check and time the persistent kernel for one token (kernels/one_token.py) on a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_one_token.py phases check profile sweep time

`phases` compares each buffer that one layer leaves with fp32; `check` whole steps, over awkward contexts, eager and
replayed; `profile` prints microseconds of each phase; `sweep` varies how far ahead weights are fetched; `time` whole
steps of mini60, beside the chain of kernels.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_decode_stack import (
    PRESETS,
    SCALING,
    Model,
    Preset,
    random_cache,
    reference_step,
    shortened,
)
from gpu_kernels import compile_ahead
from gpu_one_launch import (
    OneLaunchStack,
    activation,
    as_layer,
    compare_layer,
    phase_times,
    relative,
    time_beside_chain,
)
from longturn.kernels.one_token import OneTokenPlan, OneTokenScratch, OneTokenWeights, one_token_layers


class PersistentStack(OneLaunchStack):
    """Of one row."""

    one_token_plan: OneTokenPlan | None = None

    def prepare(self, weights: OneTokenWeights) -> None:
        self.weights = weights
        self.scratch = OneTokenScratch.allocate(self.shape, self.cache.device, len(weights.held))

    def layers(self) -> None:
        one_token_layers(
            self.weights, self.x, self.rows, self.shape, self.scratch, scaling_factor=SCALING,
            plan=self.one_token_plan, timed=self.timed,
        )  # fmt: skip


def phases(context: int) -> None:
    """Each buffer after one layer, against fp32."""
    preset = shortened(PRESETS["mini60"], 2)
    model = Model.random(preset)
    stack = PersistentStack(model, random_cache(preset, context // 128 + 2), [context])
    (y,) = compare_layer(stack)
    layer, hidden = model.layers[1], stack.scratch.hidden
    one = as_layer(layer)
    shared = activation((y @ one.shared_w13.float().T)[0])
    chosen = (torch.sigmoid(stack.scratch.logits) + layer.bias).topk(layer.top).indices.tolist()
    inner = torch.cat([activation((y @ one.w13[e].float().T)[0]) for e in chosen])
    routed = inner.numel()
    print(f"  shared {relative(hidden[routed:], shared)}  routed {relative(hidden[:routed], inner)}", flush=True)


CHECKED = (0, 127, 128, 2047, 2048, 9000, 20000, 50000)


def check(contexts: tuple[int, ...] = CHECKED) -> list[str]:
    """Logits of four layers against fp32, eager and 50 replays."""
    preset = shortened(PRESETS["mini60"], 4)
    model = Model.random(preset)
    lines = []
    cache = random_cache(preset, max(contexts) // 128 + 2)
    compile_ahead([PersistentStack(model, cache, [context]) for context in contexts])
    for context in contexts:
        stack = PersistentStack(model, random_cache(preset, context // 128 + 2), [context])
        expected, margin = reference_step(stack)
        stack.launch(finish=False)
        torch.cuda.synchronize()
        eager = stack.logits.clone()
        with torch.cuda.graph(stack.graph):
            stack.launch(finish=False)
        differ = 0
        for _ in range(50):
            stack.logits.fill_(float("nan"))
            stack.graph.replay()
            differ += not torch.equal(eager, stack.logits)
        error = ((eager - expected).norm() / expected.norm()).item()
        near = margin.min().item() <= 5e-3
        verdict = "near tie" if near else "ok" if error < 2e-2 else "WRONG"
        lines.append(f"check {context:6}: rel {error:.2e} {verdict}, {differ} of 50 replays differ")
        print(lines[-1], flush=True)
    stack.positions.fill_(-1)
    stack.launch(finish=False)
    torch.cuda.synchronize()
    lines.append(f"check padded row: finite {torch.isfinite(stack.x).all().item()}")
    print(lines[-1], flush=True)
    return lines


def sweep(preset: Preset, model: Model, cache: Tensor, context: int, plans: list[OneTokenPlan]) -> list[str]:
    lines = []
    for plan in plans:
        stack = PersistentStack(model, cache, [context])
        stack.one_token_plan = plan
        lines.append(f"sweep 1x{context} {plan}: {stack.layers_us() / (preset.layers - 1):.2f} us a layer")
        print(lines[-1], flush=True)
    return lines


def profile(model: Model, cache: Tensor, context: int) -> list[str]:
    """Mean duration of each phase over layers, in microseconds of the multiprocessor's clock; of some programs."""
    lines, stamps, us = phase_times(PersistentStack(model, cache, [context]))
    inside = (stamps[:-1, 17] - stamps[:-1, 4]) * us
    chosen = (stamps[:-1, 16] - stamps[:-1, 3]) * us
    lines.append(
        f"  inside: which block most {inside.mean(0).max():.2f}, scores' end to selected {chosen.mean(0).max():.2f}"
    )
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["phases", "check", "profile", "sweep", "time"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--plans", nargs="*", default=["1,2"], help="out_ahead,in_ahead of a sweep")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    lines: list[str] = []
    begin = time.time()
    if "phases" in arguments.commands:
        for context in (4096, 20000):
            phases(context)
            print(f"{time.time() - begin:.1f} s", flush=True)
    if "check" in arguments.commands:
        lines += check()
        print(f"{time.time() - begin:.1f} s", flush=True)
    if {"profile", "sweep", "time"} & set(arguments.commands):
        preset = shortened(PRESETS["mini60"], arguments.layers)
        model = Model.random(preset)
        cache = random_cache(preset, max(arguments.contexts) // 128 + 3)
        for context in arguments.contexts:
            if "profile" in arguments.commands:
                lines += profile(model, cache, context)
            if "sweep" in arguments.commands:
                plans = [OneTokenPlan(*map(int, plan.split(","))) for plan in arguments.plans]
                lines += sweep(preset, model, cache, context, plans)
            if "time" in arguments.commands:
                lines.append(time_beside_chain(PersistentStack, model, cache, [context]))
                print(lines[-1], flush=True)
            print(f"{time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
