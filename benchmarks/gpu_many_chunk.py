"""Where a chunk behind a long cached prefix spends its time, kernel by kernel, and which plans would make it faster.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_many_chunk.py compare profile plans --preset mini60
        --points 512,131072 512,32768,8 [--json FILE]

A point is new tokens, their context and rows that decode beside them at the same context (none if left out); a step is
padded to the executor's sizes. Steps are those of the executor's model over random weights and a random cache. What is
printed is the last of `--layers` layers: kernels without dependent launch, so that their times do not overlap, and the
whole layer as graphs run it, with it. `plans` does so with one plan changed at a time; `compare` compares the first
layer's result by the attention kernels for Hopper with that by the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_many_rows import Fields
from gpu_timing import alone, captured, kernel_spans, meet, noted, time_ms
from longturn.cli.steps.harness import WEIGHTS, fill_cache
from longturn.cli.steps.points import PRESETS
from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.buckets import Buckets
from longturn.executor.gpu.compile import Compilation
from longturn.kernels.many_tokens import TILE_TOKENS
from longturn.kernels.plan_table import Entry, PlanTable
from longturn.models.make_checkpoint import PRESETS as SHAPES
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights
from longturn.models.registry import CACHE_TYPES

ROWS = 32
TRITON: Fields = {"hopper_scores": False, "hopper_attend": False}
CHANGES: tuple[tuple[str, Fields], ...] = (
    ("msa_many", TRITON),
    ("msa_many", {"hopper_attend": False}),
    ("msa_many", {"piece": 16}),
    ("msa_many", {"piece": 64}),
    ("moe_many", {"router_parts": 8}),
)
"""What `plans` tries."""


class Chunk:
    """Rows that decode, and after them the new tokens of one more row, on the executor's model."""

    def __init__(self, model: MiniMaxM3Gpu, buckets: Buckets, point: tuple[int, ...]) -> None:
        new, context, decodes = (*point, 0)[:3]
        self.name = f"{new} after {context}" + (f" beside {decodes}" if decodes else "")
        self.model = model
        shape = buckets.many(decodes + new, (context + new) // PAGE_TOKENS + 1)
        self.tokens, self.blocks = shape.tokens, shape.blocks
        device, own = model.device, (context + new) // PAGE_TOKENS + 1
        table = torch.zeros(ROWS, max(own, shape.blocks), dtype=torch.int32)
        for row in range(decodes + 1):
            table[row, :own] = torch.randperm(model.pages - 1)[:own].int() + 1
        counts = [1] * decodes + [new]
        starts = [sum(counts[:row]) for row in range(len(counts))]
        tiles = [
            (at, min(TILE_TOKENS, start + count - at))
            for start, count in zip(starts, counts, strict=True)
            for at in range(start, start + count, TILE_TOKENS)
        ]
        tiles += [(0, 0)] * (-(-self.tokens // TILE_TOKENS) + min(ROWS, self.tokens) - len(tiles))
        positions = torch.full((self.tokens,), -1, dtype=torch.int32)
        positions[:decodes] = context
        positions[decodes : decodes + new] = torch.arange(context, context + new, dtype=torch.int32)
        rows = torch.zeros(self.tokens, dtype=torch.int32)
        rows[: decodes + new] = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)])
        self.table, self.positions, self.rows = table.to(device), positions.to(device), rows.to(device)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.ids = torch.randint(model.vocab_size, (self.tokens,), dtype=torch.int32, device=device)
        self.x = torch.empty(self.tokens, model.hidden, dtype=model.dtype, device=device)

    def step(
        self, layers: int, *, pdl: bool = True, kernel: str = "", fields: Fields | None = None
    ) -> Callable[[], None]:
        """Launches of the first `layers` layers."""
        model = self.model
        if fields:
            # A table's entry is for a power of two of tokens.
            entry = Entry(kernel, model.plans.shapes[kernel], self.tokens, fields)
            model = model.with_plans(GpuPlans(table=PlanTable().with_entry(entry)))
        if not pdl:
            model = copy.copy(model)
            model._pdl = False
        return lambda: model.many(
            self.ids, self.positions, self.rows, self.table, self.tiles, self.x, self.blocks, layers
        )


def by_kernel(step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Device microseconds by kernel."""
    found: dict[str, float] = defaultdict(float)
    with torch.inference_mode():
        step()
        for begin, end, kernel in kernel_spans(step, repeats):
            found[kernel[:44]] += (end - begin) / repeats
    return found


def layer_kernels(
    chunk: Chunk, layers: int, repeats: int = 4, *, kernel: str = "", fields: Fields | None = None
) -> dict[str, float]:
    """Microseconds of each kernel of the last layer, under a plan of `kernel` with other `fields` if given."""
    whole, before = (
        by_kernel(chunk.step(count, pdl=False, kernel=kernel, fields=fields), repeats) for count in (layers, layers - 1)
    )
    times = {name: us - before.get(name, 0.0) for name, us in whole.items()}
    return {name: round(us, 2) for name, us in sorted(times.items(), key=lambda item: -item[1]) if us > 0.3}


def layer_us(chunk: Chunk, layers: int, *, kernel: str = "", fields: Fields | None = None) -> float:
    """Microseconds of the last layer as graphs run it, under such a plan."""
    graphs = [captured(chunk.step(count, kernel=kernel, fields=fields)) for count in (layers, layers - 1)]
    found = []
    for _ in range(3):
        whole, before = (time_ms(graph, 6) for graph in graphs)
        found.append((whole - before) * 1e3)
    return sorted(found)[1]


def shown(times: dict[str, float]) -> str:
    return " ".join(f"{name[:30]} {us:.1f}" for name, us in times.items())


def profile(name: str, chunk: Chunk, layers: int) -> Iterator[tuple[str, dict[str, object]]]:
    times, us = layer_kernels(chunk, layers), layer_us(chunk, layers)
    line = f"{name} {chunk.name} ({chunk.tokens} tokens, {chunk.blocks} blocks): layer {us:.0f} us, "
    yield line + f"kernels {sum(times.values()):.0f} | {shown(times)}", {
        "preset": name, "point": chunk.name, "tokens": chunk.tokens, "blocks": chunk.blocks, "layer_us": us,
        "kernels_us": times,
    }  # fmt: skip


def plans(
    name: str, chunk: Chunk, layers: int, changes: tuple[tuple[str, Fields], ...]
) -> Iterator[tuple[str, dict[str, object]]]:
    base, base_us = layer_kernels(chunk, layers, 3), layer_us(chunk, layers)
    for kernel, fields in changes:
        try:
            times = layer_kernels(chunk, layers, 3, kernel=kernel, fields=fields)
            us = layer_us(chunk, layers, kernel=kernel, fields=fields)
        except Exception as error:  # too much shared memory, a tile that does not divide
            yield f"plans {kernel} {fields}: {type(error).__name__}: {str(error)[:100]}", {}
            continue
        moved = {
            key: (base.get(key, 0.0), times.get(key, 0.0)) for key in base.keys() | times.keys()
            if abs(base.get(key, 0.0) - times.get(key, 0.0)) > 1.0
        }  # fmt: skip
        each = " ".join(f"{key[:24]} {a:.1f}>{b:.1f}" for key, (a, b) in moved.items())
        line = f"plans {name} {chunk.name} {kernel} {fields}: layer {base_us:.0f}>{us:.0f}, "
        yield f"{line}sum {sum(base.values()):.0f}>{sum(times.values()):.0f} | {each}", {}


def compare(chunk: Chunk) -> str:
    """The first layer's result with sparse attention in Gluon beside that in Triton."""
    found = []
    for fields in (TRITON, None, None):
        with torch.inference_mode():
            chunk.step(1, kernel="msa_many", fields=fields)()
        found.append(chunk.x.float())
    live = chunk.positions >= 0
    triton, gluon, again = (x[live] for x in found)
    error = ((gluon - triton).norm() / triton.norm()).item()
    return f"compare {chunk.name}: {error:.2e}, the same again: {torch.equal(gluon, again)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["compare", "profile", "plans"])
    parser.add_argument("--preset", default="mini60", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--points", nargs="+", default=["512,131072"])
    parser.add_argument("--plans-point", default="512,131072")
    parser.add_argument("--only", help="plans of this kernel alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock")
    parser.add_argument("--parties", type=int, default=1, help="processes that get ready before any of them times")
    arguments = parser.parse_args()
    begin = time.time()
    points = [tuple(map(int, text.split(","))) for text in arguments.points]
    form, layers = PRESETS[arguments.preset], arguments.layers
    config = minimax_m3_config(preset_config(SHAPES[form.shape])["text_config"])
    config = replace(config, sparse_layers=config.sparse_layers[:layers], moe_layers=config.moe_layers[:layers])
    kv_dtype = CACHE_TYPES[form.cache]
    assert kv_dtype is not None, "presets name a type"
    experts, others = WEIGHTS[form.weights]
    weights = random_gpu_weights(config, device="cuda", experts=experts, others=others, kv_dtype=kv_dtype)
    varied = tuple(map(int, arguments.plans_point.split(",")))
    every = [*points, varied]
    longest = max(context + new for new, context, *_ in every)
    pages = max((sum(more) + 1) * ((context + new) // PAGE_TOKENS + 1) for new, context, *more in every) + 1
    model = MiniMaxM3Gpu(weights, pages)
    fill_cache(weights.kv, model.storage)
    torch.cuda.synchronize()
    buckets = Buckets.of(ROWS, 8192, longest + 512)
    chunks = [Chunk(model, buckets, point) for point in points] if arguments.commands != ["plans"] else []
    changes = tuple(c for c in CHANGES if arguments.only in (None, c[0])) if "plans" in arguments.commands else ()
    target = Chunk(model, buckets, varied)
    steps = [chunk.step(layers, pdl=pdl) for chunk in (*chunks, target) for pdl in (False, True)]
    steps += [
        target.step(layers, pdl=pdl, kernel=kernel, fields=fields)
        for kernel, fields in changes
        for pdl in (False, True)
    ]
    if "compare" in arguments.commands:
        steps += [chunk.step(1, kernel="msa_many", fields=TRITON) for chunk in chunks]
    Compilation(kernel for step in steps for kernel in noted(step)).wait()
    print(f"{arguments.preset}: compiled after {time.time() - begin:.1f} s", flush=True)
    meet(arguments.lock, arguments.parties)
    rows: list[dict[str, object]] = []
    with alone(arguments.lock):
        for chunk in chunks if "compare" in arguments.commands else []:
            print(compare(chunk), flush=True)
        for chunk in chunks if "profile" in arguments.commands else []:
            for line, row in profile(arguments.preset, chunk, layers):
                print(line, flush=True)
                rows.append(row)
        if changes:
            for line, _ in plans(arguments.preset, target, layers, changes):
                print(line, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"{arguments.preset}: done after {time.time() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
