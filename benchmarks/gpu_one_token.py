"""Check and time the persistent kernel for one token (kernels/one_token.py) on a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_one_token.py phases check profile time

`phases` compares each buffer that one layer leaves with fp32; `check` whole steps, over awkward contexts, eager and
replayed; `profile` prints microseconds of each phase; `time` whole steps of mini60, beside the chain of kernels.
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
    Layer,
    Model,
    Preset,
    Tuning,
    floor_ms,
    random_cache,
    reference_step,
    rotated,
    shortened,
)
from gpu_kernels import compile_ahead
from longturn.kernels.one_token import (
    OneTokenLayer,
    OneTokenPlan,
    OneTokenScratch,
    OneTokenWeights,
    one_token_layers,
)
from longturn.kernels.step_edges import begin_step, greedy_step
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.moe import SwigluOai, moe, route
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention

PHASES = (
    "project", "bar", "scores", "bar+select", "attend", "bar", "merge", "bar", "out", "bar", "route", "bar+shared",
    "routed", "bar", "down", "bar",
)  # fmt: skip


def as_layer(layer: Layer) -> OneTokenLayer:
    tensors = (layer.qkv, layer.o, layer.w13, layer.w2, layer.shared_w13, layer.shared_w2)
    qkv, o, w13, w2, shared_w13, shared_w2 = (t if isinstance(t, Tensor) else t.words for t in tensors)
    return OneTokenLayer(
        layer.input_norm, qkv, layer.heads, o, layer.post_norm, layer.router, layer.bias, w13, w2, shared_w13,
        shared_w2,
    )  # fmt: skip


class OneLaunchStack(DecodeStack):
    """`DecodeStack` whose layers after the first are one launch; `layers` is that launch."""

    timed = False
    scratch: OneTokenScratch

    def __init__(self, model: Model, cache: Tensor, contexts: list[int], tuning: Tuning | None = None) -> None:
        super().__init__(model, cache, contexts, tuning)
        layers = [as_layer(layer) for layer in model.layers[1:]]
        weights = OneTokenWeights.of(layers, 1, self.shape, cache)
        assert weights is not None, "the persistent kernel does not serve this"
        self.prepare(weights)
        self.poison()

    def prepare(self, weights: OneTokenWeights) -> None:
        """Keep the weights as the launch wants them, and allocate `scratch`."""
        raise NotImplementedError

    def layers(self) -> None:
        """The launch."""
        raise NotImplementedError

    def poison(self) -> None:
        for name in ("projected", "scores", "partial", "partial_max", "partial_sum", "attention", "logits", "hidden"):
            getattr(self.scratch, name).fill_(float("nan"))

    def begin(self) -> None:
        m, pdl = self.model, self.tuning.pdl
        begin_step(self.tokens, self.positions, m.embedding, m.inv_freq, self.x, self.rows.cos, self.rows.sin, pdl=pdl)
        self._layer(0, m.layers[0])

    def launch(self, finish: bool = True) -> None:
        m, t = self.model, self.tuning
        self.begin()
        self.layers()
        self._project(-1, m.head, self.logits, m.final_norm, t.head, t.pdl)
        if finish:
            greedy_step(self.logits, self.values, self.indices, self.tokens, self.positions, pdl=t.pdl)

    def layers_us(self) -> float:
        """Mean time of the launch, microseconds."""
        self.launch(finish=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layers()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e2


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


def relative(got: Tensor, wanted: Tensor) -> str:
    got, wanted = got.float(), wanted.float()
    if not wanted.numel():
        return "-"
    error = ((got - wanted).norm() / wanted.norm()).item()
    return f"{error:.1e}" + ("" if error < 2e-2 else " WRONG")


def phases(context: int) -> None:
    """Each buffer after one layer, against fp32."""
    preset = shortened(PRESETS["mini60"], 2)
    model = Model.random(preset)
    blocks = context // 128 + 1
    stack = PersistentStack(model, random_cache(preset, blocks + 1), [context])
    stack.begin()
    torch.cuda.synchronize()
    x = stack.x.float().clone()
    cache = stack.cache.clone().view(-1, stack.layout.page_stride)
    stack.layers()
    torch.cuda.synchronize()
    layer, scratch, layout, kv = model.layers[1], stack.scratch, stack.layout, preset.kv_heads
    one = as_layer(layer)
    at = torch.tensor([context], device="cuda")
    pages = stack.rows.page_table[0, :blocks]
    projected = gemma_rms_norm(x, layer.input_norm, 1e-6) @ one.projection.float().T
    print(f"phases {context}: qkv {relative(scratch.projected, projected[0])}", end="  ")
    q, k, v, iq, ik = scratch.projected.view(-1, HEAD_DIM).split((preset.q_heads, kv, kv, kv, 1))
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
    print(f"new token {relative(torch.nan_to_num(made), torch.nan_to_num(cache[pages[-1].long()]))}", end="  ")
    keys, values, index = (gather_pages(lane, pages) for lane in lanes)
    scores = index_block_scores(iq, index[:, 0], at)
    print(f"scores {relative(scratch.scores[:, : blocks - 1], scores.view(kv, -1)[:, : blocks - 1])}", end="  ")
    attended = sparse_attention(q, keys, values, at, select_blocks(scores, at, 16), HEAD_DIM**-0.5).flatten()
    print(f"attention {relative(scratch.attention, attended)}", end="  ")
    x = (x + scratch.attention.float() @ one.out.float().T).to(torch.bfloat16).float()
    y = gemma_rms_norm(x, layer.post_norm, 1e-6)
    print(f"logits {relative(scratch.logits, (y @ layer.router.T)[0])}", end="  ")
    form = SwigluOai()
    routing = route(y, layer.router, layer.bias, layer.top, SCALING)
    shared = (y @ one.shared_w13.float().T)[0]
    print(f"shared {relative(scratch.hidden[2048:], activation(shared))}", end="  ")
    chosen = (torch.sigmoid(scratch.logits) + layer.bias).topk(4).indices
    inner = torch.cat([activation((y @ one.w13[e].float().T)[0]) for e in chosen.tolist()])
    print(f"routed {relative(scratch.hidden[:2048], inner)}", end="  ")
    out = x + moe(y, routing, one.w13.float(), one.w2.float(), one.shared_w13.float(), one.shared_w2.float(), form)
    print(f"x {relative(stack.x, out)}", flush=True)


def activation(both: Tensor) -> Tensor:
    gate, up = both.chunk(2)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


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


def profile(preset: Preset, model: Model, cache: Tensor, context: int) -> list[str]:
    """Mean duration of each phase over layers, in microseconds of the multiprocessor's clock; of some programs."""
    stack = PersistentStack(model, cache, [context])
    stack.timed = True
    took = stack.layers_us()
    stamps = stack.scratch.stamps.double()
    whole = (stamps[-1, 15] - stamps[0, 0]).max().item()
    us = took / whole  # nearly; the launch is in it
    following = torch.cat([stamps[:-1, 1:16], stamps[1:, :1]], 1)
    spans = (following - stamps[:-1, :16]) * us  # [layers, phase, program]
    lines = [f"profile 1x{context}: {took:.0f} us, {took / len(stamps):.2f} a layer, {1 / us:.0f} cycles a us"]
    inside = (stamps[:-1, 17] - stamps[:-1, 4]) * us
    chosen = (stamps[:-1, 16] - stamps[:-1, 3]) * us
    lines.append(
        f"  inside: which block most {inside.mean(0).max():.2f}, scores' end to selected {chosen.mean(0).max():.2f}"
    )
    for n, name in enumerate(PHASES):
        mean = spans[:, n].mean(0)
        lines.append(
            f"  {name:11} program 0 {mean[0]:5.2f}  40 {mean[40]:5.2f}  127 {mean[127]:5.2f}  "
            f"least {mean.min():5.2f}  most {mean.max():5.2f}"
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
                lines += profile(preset, model, cache, context)
            if "sweep" in arguments.commands:
                plans = [OneTokenPlan(*map(int, plan.split(","))) for plan in arguments.plans]
                lines += sweep(preset, model, cache, context, plans)
            if "time" in arguments.commands:
                times = []
                for kind in (PersistentStack, DecodeStack):
                    stack = kind(model, cache, [context])
                    stack.capture()
                    times.append(stack.time_ms())
                lines.append(
                    f"time 1x{context}: persistent {times[0]:.3f} ms, chain {times[1]:.3f}, "
                    f"floor {floor_ms(preset, 1, context):.2f}"
                )
                print(lines[-1], flush=True)
            print(f"{time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
