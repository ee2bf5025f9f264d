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

from gpu_decode_stack import (
    HEAD_DIM,
    PRESETS,
    SCALING,
    DecodeStack,
    Model,
    Preset,
    floor_ms,
    random_cache,
    reference_step,
    rotated,
    shortened,
)
from gpu_kernels import compile_ahead
from gpu_one_token import PHASES, OneLaunchStack, activation, as_layer, relative
from longturn.kernels.one_token import OneTokenWeights
from longturn.kernels.one_token_rows import (
    OneTokenRowsPlan,
    OneTokenRowsWeights,
    one_token_rows_layers,
    rows_scratch,
)
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, moe, route
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention


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
    stack.begin()
    torch.cuda.synchronize()
    start = stack.x.float().clone()
    cache = stack.cache.clone().view(-1, stack.layout.page_stride)
    stack.layers()
    torch.cuda.synchronize()
    layer, scratch, layout, kv = model.layers[1], stack.scratch, stack.layout, preset.kv_heads
    one, form = as_layer(layer), SwigluOai()
    all_chosen: list[list[int]] = []
    xs, shares = [], []
    print(f"phases {contexts}", flush=True)
    for r, context in enumerate(contexts):
        x = start[r : r + 1]
        count = context // 128 + 1
        at = torch.tensor([context], device="cuda")
        pages = stack.rows.page_table[r, :count]
        projected = gemma_rms_norm(x, layer.input_norm, 1e-6) @ one.projection.float().T
        line = f"  row {r}: qkv {relative(scratch.projected[r], projected[0])}"
        q, k, v, iq, ik = scratch.projected[r].view(-1, HEAD_DIM).split((preset.q_heads, kv, kv, kv, 1))
        norms = (layer.heads.query, layer.heads.key, layer.heads.index_query, layer.heads.index_key)
        q, k, iq, ik = (
            rotated(gemma_rms_norm(y, w, 1e-6), context * model.inv_freq)[None]
            for y, w in zip((q, k, iq, ik), norms, strict=True)
        )
        begin = (layout.key_offset(1), layout.value_offset(1), layout.index_offset(1))
        lanes = [
            cache[:, b : b + heads * 128 * HEAD_DIM].view(-1, heads, 128, HEAD_DIM)
            for b, heads in zip(begin, (kv, kv, 1), strict=True)
        ]
        for lane, new in zip(lanes, (k[0], v, ik[0]), strict=True):
            lane[pages[-1].long(), :, context % 128] = new.to(cache.dtype)
        made = stack.cache.view(-1, layout.page_stride)[pages[-1].long()]
        line += f"  new token {relative(torch.nan_to_num(made), torch.nan_to_num(cache[pages[-1].long()]))}"
        keys, values, index = (gather_pages(lane, pages) for lane in lanes)
        scores = index_block_scores(iq, index[:, 0], at)
        line += f"  scores {relative(scratch.scores[r, :, : count - 1], scores.view(kv, -1)[:, : count - 1])}"
        attended = sparse_attention(q, keys, values, at, select_blocks(scores, at, 16), HEAD_DIM**-0.5).flatten()
        line += f"  attention {relative(scratch.attention[r], attended)}"
        x = (x + scratch.attention[r].float() @ one.out.float().T).to(torch.bfloat16).float()
        y = gemma_rms_norm(x, layer.post_norm, 1e-6)
        line += f"  logits {relative(scratch.logits[r], (y @ layer.router.T)[0])}"
        score = torch.sigmoid(scratch.logits[r])
        chosen = (score + layer.bias).topk(4).indices.tolist()
        all_chosen.append(chosen)
        shares.append({e: (score[e] * SCALING / score[chosen].sum()).item() for e in chosen})
        xs.append(y)
        routing = route(y, layer.router, layer.bias, layer.top, SCALING)
        out = x + moe(y, routing, one.w13.float(), one.w2.float(), one.shared_w13.float(), one.shared_w2.float(), form)
        print(f"{line}  x {relative(stack.x[r], out[0])}", flush=True)
    experts = sorted({e for chosen in all_chosen for e in chosen})
    for r in range(len(contexts)):
        shared = activation((xs[r] @ one.shared_w13.float().T)[0])
        inner = torch.cat([activation((xs[r] @ one.w13[e].float().T)[0]) * shares[r].get(e, 0.0) for e in experts])
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


def profile(preset: Preset, model: Model, cache: Tensor, contexts: list[int]) -> list[str]:
    """Mean duration of each phase over layers, in microseconds of the multiprocessor's clock; of some programs."""
    stack = RowsStack(model, cache, contexts)
    stack.timed = True
    took = stack.layers_us()
    stamps = stack.scratch.stamps.double()
    whole = (stamps[-1, 15] - stamps[0, 0]).max().item()
    us = took / whole  # nearly; the launch is in it
    following = torch.cat([stamps[:-1, 1:16], stamps[1:, :1]], 1)
    spans = (following - stamps[:-1, :16]) * us  # [layers, phase, program]
    head = f"profile {len(contexts)}x{contexts[0]}: {took:.0f} us, {took / len(stamps):.2f} a layer"
    lines = [f"{head}, {1 / us:.0f} cycles a us"]
    chosen = (stamps[:-1, 17] - stamps[:-1, 4]) * us
    lines.append(f"  inside: which blocks most {chosen.mean(0).max():.2f}")
    for n, name in enumerate(PHASES):
        mean = spans[:, n].mean(0)
        lines.append(
            f"  {name:11} 0 {mean[0]:5.2f}  40 {mean[40]:5.2f}  127 {mean[127]:5.2f}  "
            f"least {mean.min():5.2f}  most {mean.max():5.2f}"
        )
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
                lines += profile(preset, model, cache, contexts)
            if "sweep" in arguments.commands:
                plans = [OneTokenRowsPlan(*map(int, plan.split(","))) for plan in arguments.plans]
                lines += sweep(preset, model, cache, contexts, plans)
            if "time" in arguments.commands:
                times = []
                for kind in (RowsStack, DecodeStack):
                    stack = kind(model, cache, contexts)
                    stack.capture()
                    times.append(stack.time_ms())
                lines.append(
                    f"time {rows}x{context}: one launch {times[0]:.3f} ms, chain {times[1]:.3f}, "
                    f"floor {floor_ms(preset, rows, context):.2f}"
                )
                print(lines[-1], flush=True)
            print(f"{time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
