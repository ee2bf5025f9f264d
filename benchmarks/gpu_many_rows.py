"""Where a decode step of several rows spends its time, and which plans would make it faster.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_many_rows.py profile edges plans --preset mini60 --layers 20
        --points 16,32768,512 32,8192,128

A point is rows, context and the most blocks of the graph. Steps are those of the executor's model over random weights
and cache, captured as graphs, with the first `--layers` layers. `profile` prints start and duration of each kernel of a
late layer; `edges` what the executor's graph takes beyond the layers; `plans` a step with one plan changed at a time,
the unchanged one timed again between them. `--lock` is a file held while something is timed, so that several of these
may get ready side by side.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_timing import alone, captured, kernel_spans, meet, noted, time_ms
from longturn.cli.steps.points import PRESETS
from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.buckets import Piece, StepKind, StepShape
from longturn.executor.gpu.compile import Compilation
from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import GpuLimits
from longturn.kernels.plan_table import Entry, PlanTable
from longturn.models.make_checkpoint import PRESETS as SHAPES
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

Fields = dict[str, int | bool]
Change = tuple[tuple[str, Fields], ...]
"""Fields of plans, by kernel."""

CHANGES: tuple[Change, ...] = (
    *((("moe_few", {"down_turns": turns}),) for turns in (1, 2, 4)),
    *((("moe_few", {"stages": stages, "down_stages": 3}),) for stages in (2, 3, 4)),
    *((("moe_few", {"in_rows": rows}),) for rows in (32, 64, 128)),
    *(
        (("msa", {"splits": splits, "tile": tile}),)
        for splits, tile in ((1, 128), (2, 64), (4, 64), (8, 64), (16, 128))
    ),
    *((("msa", {"score_programs": programs, "score_stages": stages}),) for programs, stages in ((256, 3), (396, 2))),
    *((("msa", {"select_blocks": blocks}),) for blocks in (128, 256, 512)),
    (("msa", {"fused_blocks": 128}),),
    (("msa", {"stages": 4}),),
    (("projection", {"ahead": False}),),
    (("projection", {"ahead": True}),),
    *((("projection", {"dot_stages": stages}),) for stages in (3, 4)),
)
"""What `plans` tries; those that are the default already are left out."""


@dataclass(frozen=True)
class Point:
    rows: int
    context: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.context} (graph of {self.blocks} blocks)"


class Rows:
    """A model, and rows of it at one context."""

    def __init__(self, model: MiniMaxM3Gpu, point: Point, layers: int) -> None:
        self.model, self.point, self.layers = model, point, layers
        rows, device = point.rows, model.device
        own = point.context // PAGE_TOKENS + 1
        table = torch.zeros(rows, max(own, point.blocks), dtype=torch.int32)
        table[:, :own] = torch.randperm(model.pages - 1)[: rows * own].view(rows, own).int() + 1
        self.table = table.to(device)
        self.tokens = torch.randint(model.vocab_size, (rows,), dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), point.context, dtype=torch.int32, device=device)
        self.x = torch.empty(rows, model.hidden, dtype=model.dtype, device=device)

    def step(self, change: Change = ()) -> Callable[[], None]:
        """A step's launches under changed plans."""
        table = PlanTable()
        for kernel, given in change:
            fields = dict(given)
            if "score_programs" in fields:
                fields["chunks"] = fields.pop("score_programs") // self.point.rows
            table = table.with_entry(Entry(kernel, self.model.plans.shapes[kernel], self.point.rows, fields))
        model = self.model.with_plans(GpuPlans(table=table)) if change else self.model
        return lambda: model.decode(self.tokens, self.positions, self.table, self.x, self.point.blocks, self.layers)

    def is_default(self, change: Change) -> bool:
        """Whether it changes nothing."""
        plans, rows, blocks = self.model.plans, self.point.rows, self.point.blocks
        now = {
            "msa": plans.msa(rows, blocks), "projection": plans.projection(rows, blocks), "out": plans.out(rows),
            "moe_few": plans.moe_few(rows),
        }  # fmt: skip
        known = {"score_programs": now["msa"].chunks * rows + rows - 1}  # type: ignore[attr-defined]
        return all(
            value // rows == known[name] // rows if name in known else getattr(now[kernel], name) == value
            for kernel, fields in change
            for name, value in fields.items()
        )


def spans(graph: torch.cuda.CUDAGraph) -> list[tuple[float, float, str]]:
    """Start, end and name of each kernel of a replay, microseconds."""
    for _ in range(2):
        graph.replay()
    return kernel_spans(graph.replay)


def profile(rows: Rows) -> list[str]:
    """The kernels of the last layers, and where they begin."""
    found = spans(captured(rows.step()))
    starts = [i for i, span in enumerate(found) if span[2].startswith("_scores")]
    if len(starts) < 3:
        return [f"profile: {len(found)} kernels, {len(starts)} layers: {[s[2] for s in found[:20]]}"]
    lines = []
    for first, last in zip(starts[-3:-1], starts[-2:], strict=True):
        zero = found[first][0]
        each = " | ".join(f"{name[:16]} {a - zero:.1f}+{b - a:.1f}" for a, b, name in found[first : last + 1])
        lines.append(f"profile {rows.point}: {each}")
    return lines


def edges(rows: Rows) -> list[str]:
    """The executor's graph beside the layers alone, and the kernels after the last layer."""
    point, model = rows.point, rows.model
    executor = GpuExecutor(model, GpuLimits(32, 64, point.blocks * PAGE_TOKENS), description="edges")
    steps = executor._steps
    piece = Piece(StepShape(StepKind.DECODE, point.rows, point.blocks), light=True)
    with torch.inference_mode():
        for _ in range(2):
            steps.body(piece, rows.layers)()
    state = steps.state

    def stand() -> None:
        state.staging.zero_()
        state.page_table[: point.rows, : rows.table.shape[1]].copy_(rows.table)
        order = torch.arange(point.rows, dtype=torch.int32, device=model.device)
        for part, value in (
            (state.token, rows.tokens), (state.token_row, order), (state.position, rows.positions),
            (state.sample_row, order), (state.sample_position, rows.positions + 1),
        ):  # fmt: skip
            part[: point.rows].copy_(value)

    stand()
    whole = captured(steps.body(piece, rows.layers))
    layers = captured(rows.step())
    times = [(time_ms(whole), time_ms(layers)) for _ in range(2)]
    found = spans(whole)
    last = max(i for i, span in enumerate(found) if "combine" in span[2])
    first = next(i for i, span in enumerate(found) if span[2].startswith("_begin"))
    lines = [f"edges {point}: " + "; ".join(f"graph {a:.3f} ms, layers {b:.3f}, {a - b:+.3f}" for a, b in times)]
    for label, part in (("before", found[: first + 1]), ("after", found[last:])):
        zero = part[0][0]
        lines.append(f"edges {label}: " + " | ".join(f"{n[:20]} {a - zero:.1f}+{b - a:.1f}" for a, b, n in part))
    executor.close()
    return lines


def plans(rows: Rows, changes: list[Change]) -> list[str]:
    """Each change alone; then those that gained, one on top of the other."""
    base = captured(rows.step())
    before = first = time_ms(base)
    found: list[tuple[float, Change]] = []
    lines = [f"plans {rows.point}: default {before:.3f} ms"]
    for number, change in enumerate(changes):
        if number % 6 == 5:
            before = time_ms(base)
            lines[0] += f", again {before:.3f}"
        try:
            ms = time_ms(captured(rows.step(change)))
        except Exception as error:  # too much shared memory, a tile that does not divide
            print(f"plans {rows.point}: {change}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        found.append((ms / before - 1, change))
    found.sort(key=lambda pair: pair[0])
    lines += [f"plans {rows.point}: {_named(change)}: {gain * 100:+.2f} %" for gain, change in found]
    best: Change = ()
    best_ms = time_ms(base)
    for gain, change in found[:12]:
        merged = _merged(best, change)
        if gain > -0.002 or merged is None:
            continue
        ms = time_ms(captured(rows.step(merged)))
        if ms < best_ms * 0.999:
            best, best_ms = merged, ms
    lines.append(
        f"plans {rows.point}: together {_named(best)}: {best_ms:.3f} ms, default {time_ms(base):.3f} ({first:.3f})"
    )
    return lines


def _named(change: Change) -> str:
    return "; ".join(f"{kernel} " + " ".join(f"{k}={v}" for k, v in fields.items()) for kernel, fields in change)


def _merged(one: Change, other: Change) -> Change | None:
    """Both; None where they change the same field."""
    made = {kernel: dict(fields) for kernel, fields in one}
    for kernel, fields in other:
        mine = made.setdefault(kernel, {})
        if mine.keys() & fields.keys():
            return None
        mine.update(fields)
    return tuple(made.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["profile", "edges", "plans"])
    parser.add_argument("--preset", default="mini60", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--points", nargs="+", default=["16,32768,512", "32,8192,128"])
    parser.add_argument("--lock")
    parser.add_argument("--parties", type=int, default=1, help="processes that get ready before any of them times")
    arguments = parser.parse_args()
    begin = time.time()
    points = [Point(*map(int, text.split(","))) for text in arguments.points]
    config = minimax_m3_config(preset_config(SHAPES[PRESETS[arguments.preset].shape])["text_config"])
    config = replace(
        config, sparse_layers=config.sparse_layers[: arguments.layers], moe_layers=config.moe_layers[: arguments.layers]
    )
    weights = random_gpu_weights(config, device="cuda")
    pages = max(p.rows * (p.context // PAGE_TOKENS + 1) for p in points) + 1
    model = MiniMaxM3Gpu(weights, pages)
    for part in model.cache.view(-1).split(1 << 30):
        part.normal_()
    torch.cuda.synchronize()
    print(f"{arguments.preset}: ready after {time.time() - begin:.1f} s, {pages} pages", flush=True)
    stands = [Rows(model, point, arguments.layers) for point in points]
    changes = {
        rows.point: [c for c in CHANGES if not rows.is_default(c)] if "plans" in arguments.commands else []
        for rows in stands
    }
    Compilation(k for rows in stands for change in [(), *changes[rows.point]] for k in noted(rows.step(change))).wait()
    print(f"compiled after {time.time() - begin:.1f} s", flush=True)
    meet(arguments.lock, arguments.parties)
    lines: list[str] = []
    for command in arguments.commands:
        for rows in stands:
            with alone(arguments.lock):
                if command == "profile":
                    lines += profile(rows)
                elif command == "edges":
                    lines += edges(rows)
                else:
                    lines += plans(rows, changes[rows.point])
        print(f"{command} after {time.time() - begin:.1f} s", flush=True)
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
