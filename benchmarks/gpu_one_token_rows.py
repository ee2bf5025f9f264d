"""Check and time the persistent kernel for two and four rows (kernels/one_token_rows.py) on a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_one_token_rows.py phases check races profile sweep time

`phases` compares each buffer that one layer leaves with fp32; `check` whole steps, over awkward contexts, eager and
replayed; `races` 50 replays of each; `profile` prints microseconds of each phase; `time` whole steps of mini60, beside
the chain of kernels.
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
from longturn.kernels.one_token import OneTokenWeights
from longturn.kernels.one_token_rows import (
    OneTokenRowsPlan,
    OneTokenRowsWeights,
    one_token_rows_layers,
    rows_scratch,
)


class RowsStack(OneLaunchStack):
    """Of two or four rows."""

    rows_plan: OneTokenRowsPlan | None = None

    def prepare(self, weights: OneTokenWeights) -> None:
        self.weights = OneTokenRowsWeights.of(weights)
        self.scratch = rows_scratch(len(self.start), self.shape, self.cache.device, len(weights.held))

    def layers(self) -> None:
        one_token_rows_layers(
            self.weights, self.x, self.rows, self.shape, self.scratch, scaling_factor=SCALING, plan=self.rows_plan,
            timed=self.timed,
        )  # fmt: skip


def phases(contexts: list[int]) -> None:
    """Each buffer after one layer, against fp32."""
    preset = shortened(PRESETS["mini60"], 2)
    model = Model.random(preset)
    blocks = max(contexts) // 128 + 1
    stack = RowsStack(model, random_cache(preset, len(contexts) * blocks + 1), contexts)
    ys = compare_layer(stack)
    layer, scratch = model.layers[1], stack.scratch
    one, scores = as_layer(layer), torch.sigmoid(scratch.logits)
    chosen = (scores + layer.bias).topk(layer.top).indices
    # The kernel keeps inner values times the row's share, of every expert that any row chose.
    shares = torch.zeros_like(scores).scatter_(1, chosen, scores.gather(1, chosen))
    shares *= SCALING / shares.sum(1, keepdim=True)
    experts = sorted(set(chosen.flatten().tolist()))
    for r, y in enumerate(ys):
        shared = activation((y @ one.shared_w13.float().T)[0])
        inner = torch.cat([activation((y @ one.w13[e].float().T)[0]) * shares[r, e] for e in experts])
        got = scratch.hidden[1 : len(experts) + 1, r].flatten()
        print(f"  row {r}: shared {relative(scratch.hidden[0, r], shared)}  routed {relative(got, inner)}", flush=True)


CHECKED = (
    [0, 1], [127, 129], [128, 2049], [2048, 70_000], [9000, -1], [0, 127, 128, 2049], [1, -1, 5000, 129],
    [20_000, 300, -1, 2048], [140_000, 5, 3000, 70_000], [-1, -1, 700, 9000],
)  # fmt: skip


def check(replays: int, wanted: tuple[list[int], ...] = CHECKED) -> list[str]:
    """Logits of four layers against fp32 and against the chain of kernels, eager and replayed; then with lengths that
    shrink under one graph."""
    preset = shortened(PRESETS["mini60"], 4)
    model = Model.random(preset)
    lines = []
    cache = random_cache(preset, max(len(contexts) * (max(contexts) // 128 + 1) for contexts in wanted) + 1)
    compile_ahead([RowsStack(model, cache, contexts) for contexts in wanted])
    for contexts in wanted:
        stack = RowsStack(model, random_cache(preset, len(contexts) * (max(contexts) // 128 + 1) + 1), contexts)
        expected, margin = reference_step(stack)
        stack.launch(finish=False)
        torch.cuda.synchronize()
        eager = stack.logits.clone()
        with torch.cuda.graph(stack.graph):
            stack.launch(finish=False)
        differ = 0
        for _ in range(replays):
            stack.logits.fill_(float("nan"))
            stack.poison()
            stack.graph.replay()
            differ += not torch.equal(eager, stack.logits)
        live = (stack.start >= 0) & (margin > 5e-3)
        errors = ((eager - expected).norm(dim=1) / expected.norm(dim=1))[stack.start >= 0].tolist()
        worst = max(((eager - expected).norm(dim=1) / expected.norm(dim=1))[live].tolist(), default=0.0)
        finite = torch.isfinite(stack.logits).all().item()
        verdict = "ok" if worst < 2e-2 and finite and not differ else "WRONG"
        lines.append(
            f"check {contexts!s:32} compared {live.sum().item()} worst {worst:.2e} (all rows "
            f"{' '.join(f'{e:.1e}' for e in errors)}), {differ} of {replays} replays differ {verdict}"
        )
        print(lines[-1], flush=True)
        # Shorter contexts under the same graph.
        stack.positions.copy_(torch.where(stack.start > 0, stack.start // 2, stack.start))
        expected, margin = reference_step(stack)
        stack.graph.replay()
        live = (stack.positions >= 0) & (margin > 5e-3)
        worst = max(((stack.logits - expected).norm(dim=1) / expected.norm(dim=1))[live].tolist(), default=0.0)
        verdict = "ok" if worst < 2e-2 else "WRONG"
        lines.append(f"check half as long: compared {live.sum().item()} worst {worst:.2e} {verdict}")
        print(lines[-1], flush=True)
    return lines


def sweep(preset: Preset, model: Model, cache: Tensor, contexts: list[int], plans: list[OneTokenRowsPlan]) -> list[str]:
    lines = []
    for plan in plans:
        stack = RowsStack(model, cache, contexts)
        stack.rows_plan = plan
        lines.append(
            f"sweep {len(contexts)}x{contexts[0]} {plan.in_ahead},{plan.out_ahead},{plan.experts_ahead}: "
            f"{stack.layers_us() / (preset.layers - 1):.2f} us a layer"
        )
        print(lines[-1], flush=True)
    return lines


def profile(model: Model, cache: Tensor, contexts: list[int]) -> list[str]:
    """Mean duration of each phase over layers, in microseconds of the multiprocessor's clock; of some programs."""
    lines, stamps, us = phase_times(RowsStack(model, cache, contexts))
    chosen = (stamps[:-1, 17] - stamps[:-1, 4]) * us
    lines.append(f"  inside: which blocks most {chosen.mean(0).max():.2f}")
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["phases", "check", "races", "profile", "sweep", "time"])
    parser.add_argument("--points", nargs="*", default=["2,4096", "4,4096", "2,131072", "4,131072"])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--plans", nargs="*", default=["1,1,4"], help="in, out, experts ahead of a sweep")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    lines: list[str] = []
    begin = time.time()
    if "phases" in arguments.commands:
        for contexts in ([300, 5000], [40, 9000, 128, 2500]):
            phases(contexts)
            print(f"{time.time() - begin:.1f} s", flush=True)
    if "check" in arguments.commands or "races" in arguments.commands:
        lines += check(50 if "races" in arguments.commands else 3)
        print(f"{time.time() - begin:.1f} s", flush=True)
    if {"profile", "sweep", "time"} & set(arguments.commands):
        points = [(int(rows), int(context)) for rows, context in (point.split(",") for point in arguments.points)]
        preset = shortened(PRESETS["mini60"], arguments.layers)
        model = Model.random(preset)
        cache = random_cache(preset, max(rows * (context // 128 + 1) for rows, context in points) + 2)
        for rows, context in points:
            contexts = [context] * rows
            if "profile" in arguments.commands:
                lines += profile(model, cache, contexts)
            if "sweep" in arguments.commands:
                plans = [OneTokenRowsPlan(*map(int, plan.split(","))) for plan in arguments.plans]
                lines += sweep(preset, model, cache, contexts, plans)
            if "time" in arguments.commands:
                lines.append(time_beside_chain(RowsStack, model, cache, contexts))
                print(lines[-1], flush=True)
            print(f"{time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
