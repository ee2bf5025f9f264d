"""What the benchmarks of the persistent kernels for one token and for several rows share: the stack whose layers are
one launch, each buffer of a layer beside fp32, and the times of its phases."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_decode_stack import (
    HEAD_DIM,
    SCALING,
    DecodeStack,
    Layer,
    Model,
    Tuning,
    floor_ms,
    rotated,
)
from gpu_greedy import greedy_step
from longturn.kernels.one_token import OneTokenLayer, OneTokenScratch, OneTokenWeights
from longturn.kernels.step_edges import begin_step
from longturn.models.minimax_m3_gpu_plans import head_plan
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
        head = t.head or head_plan(len(self.start), m.preset.hidden)
        self._project(-1, m.head, self.logits, m.final_norm, head, t.pdl)
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


def relative(got: Tensor, wanted: Tensor) -> str:
    got, wanted = got.float(), wanted.float()
    if not wanted.numel():
        return "-"
    error = ((got - wanted).norm() / wanted.norm()).item()
    return f"{error:.1e}" + ("" if error < 2e-2 else " WRONG")


def activation(both: Tensor) -> Tensor:
    gate, up = both.chunk(2)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


def compare_layer(stack: OneLaunchStack) -> list[Tensor]:
    """Run one layer of `stack`, which has two, and print what it left of each row beside fp32, all but the experts'
    inner values. Returns each row's input of the experts, fp32 [1, hidden].

    Each buffer is compared with what fp32 makes of the kernel's own buffers before it: an error shows where it begins.
    """
    model, scratch, layout = stack.model, stack.scratch, stack.layout
    layer, preset, kv = model.layers[1], model.preset, model.preset.kv_heads
    one, form = as_layer(layer), SwigluOai()
    stack.begin()
    torch.cuda.synchronize()
    start = stack.x.float().clone()
    cache = stack.cache.clone().view(-1, layout.page_stride)
    stack.layers()
    torch.cuda.synchronize()
    inputs = []
    contexts = stack.start.tolist()
    rows = len(contexts)
    all_projected, all_attention, all_logits = (
        buffer.view(rows, -1) for buffer in (scratch.projected, scratch.attention, scratch.logits)
    )
    all_scores = scratch.scores.view(rows, kv, -1)
    print(f"phases {contexts}", flush=True)
    for r, context in enumerate(contexts):
        x, attention = start[r : r + 1], all_attention[r]
        at = torch.tensor([context], device=x.device)
        blocks = context // 128 + 1
        pages = stack.rows.page_table[r, :blocks]
        projected = gemma_rms_norm(x, layer.input_norm, 1e-6) @ one.projection.float().T
        line = f"  row {r}: qkv {relative(all_projected[r], projected[0])}"
        q, k, v, iq, ik = all_projected[r].view(-1, HEAD_DIM).split((preset.q_heads, kv, kv, kv, 1))
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
        line += f"  scores {relative(all_scores[r, :, : blocks - 1], scores.view(kv, -1)[:, : blocks - 1])}"
        attended = sparse_attention(q, keys, values, at, select_blocks(scores, at, 16), HEAD_DIM**-0.5).flatten()
        line += f"  attention {relative(attention, attended)}"
        x = (x + attention.float() @ one.out.float().T).to(torch.bfloat16).float()
        y = gemma_rms_norm(x, layer.post_norm, 1e-6)
        inputs.append(y)
        line += f"  logits {relative(all_logits[r], (y @ layer.router.T)[0])}"
        routing = route(y, layer.router, layer.bias, layer.top, SCALING)
        out = x + moe(y, routing, one.w13.float(), one.w2.float(), one.shared_w13.float(), one.shared_w2.float(), form)
        print(f"{line}  x {relative(stack.x[r], out[0])}", flush=True)
    return inputs


def phase_times(stack: OneLaunchStack) -> tuple[list[str], Tensor, float]:
    """Mean duration of each phase over layers, of some programs: lines; and the stamps [layer, stamp, program] with the
    microseconds of one."""
    stack.timed = True
    took = stack.layers_us()
    stamps = stack.scratch.stamps.double()
    whole = (stamps[-1, 15] - stamps[0, 0]).max().item()
    us = took / whole  # nearly; the launch is in it
    following = torch.cat([stamps[:-1, 1:16], stamps[1:, :1]], 1)
    spans = (following - stamps[:-1, :16]) * us  # [layers, phase, program]
    contexts = stack.start.tolist()
    head = f"profile {len(contexts)}x{contexts[0]}: {took:.0f} us, {took / len(stamps):.2f} a layer"
    lines = [f"{head}, {1 / us:.0f} cycles a us"]
    for n, name in enumerate(PHASES):
        mean = spans[:, n].mean(0)
        lines.append(
            f"  {name:11} program 0 {mean[0]:5.2f}  40 {mean[40]:5.2f}  127 {mean[127]:5.2f}  "
            f"least {mean.min():5.2f}  most {mean.max():5.2f}"
        )
    return lines, stamps, us


def time_beside_chain(kind: type[OneLaunchStack], model: Model, cache: Tensor, contexts: list[int]) -> str:
    """Times of whole steps: one launch, the chain of kernels, and the floor, ms."""
    times = []
    for each in (kind, DecodeStack):
        stack = each(model, cache, contexts)
        stack.capture()
        times.append(stack.time_ms())
    rows, context = len(contexts), contexts[0]
    return (
        f"time {rows}x{context}: one launch {times[0]:.3f} ms, chain {times[1]:.3f}, "
        f"floor {floor_ms(model.preset, rows, context):.2f}"
    )
