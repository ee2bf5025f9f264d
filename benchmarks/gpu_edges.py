"""What the engine adds to the kernels of a decode step: the same step in several forms, timed in turn.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_edges.py [ROWSxCONTEXT ...] [--preset NAME] [--seconds N] [--trace]

    bare          a graph of layers, head and `greedy_step`, for the blocks that the rows have
    bucket        the same for the blocks of the executor's bucket
    graph         the executor's, whose first launch takes the host's words and whose last ones sample
    graph, full   the one that samples with all features
    queue         its replay with the copy before and the events around it
    engine        a step of the engine, by the host's clock

The card is left idle between two bursts, as long as the longer of them: under steady load it slows down by some
percent, and not evenly, which hides microseconds. `--trace` adds the kernels around the border of two steps, as the
profiler saw them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_greedy import greedy_step
from gpu_timing import alone, kernel_spans
from longturn.cli.steps.harness import Stand, drain, pass_over, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of
from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.buckets import Piece, StepKind

_STEPS_MS = 50.0
"""Length of a burst, about."""


class Edges:
    """One point's forms of a step."""

    def __init__(self, stand: Stand, point: Point) -> None:
        """The executor must have the point's graphs."""
        self.stand, self.point, self.executor = stand, point, stand.executor
        self.state = stand.executor._steps.state
        stream = stand.executor._stream
        assert stream is not None, "without a GPU there is nothing to measure"
        self.stream = stream
        rows, blocks = point.rows, point.context // PAGE_TOKENS + 2
        self.shape = self.executor.shape_for(StepKind.DECODE, rows, blocks)
        self.graphs = {
            "bare": self._captured(blocks),
            "bucket": self._captured(self.shape.blocks),
            "bare again": self._captured(blocks),
        }

    def _captured(self, blocks: int) -> torch.cuda.CUDAGraph:
        """Layers, head and the likeliest token, over what the last step left."""
        state, model, rows = self.state, self.stand.model, self.shape.tokens
        positions, tokens, x = state.position[:rows], state.tokens[:rows], state.hidden[:rows]
        device = x.device
        values, indices = (torch.zeros(rows, 64, dtype=t, device=device) for t in (torch.float32, torch.int32))
        own, at = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))

        def step() -> None:
            normed = model.decode(tokens, positions, state.batch_table[:rows], x, blocks)
            greedy_step(model.logits(x, normed), values, indices, own, at, pdl=True)

        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), self.executor._steps.on_stream():
            state.clear_inputs()
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                step()
        return graph

    def forms(self) -> dict[str, Callable[[], None]]:
        """Launches of one step in each form but the engine's. A step of the engine must have come before."""
        executor, queue = self.executor, self.executor._queue
        light, full = (executor._graphs.get(Piece(self.shape, light)) for light in (True, False))
        assert light is not None and full is not None, "the executor has no graphs of this shape"
        slot = executor._ring._slots[0]
        words = 2 + 2 * 6 * self.shape.tokens

        def queued() -> None:
            queue.begin(slot)
            queue.send(slot, words)
            queue.replay(light)
            queue.end(slot)

        made: dict[str, Callable[[], None]] = {name: graph.replay for name, graph in self.graphs.items()}
        made |= {"graph": lambda: queue.replay(light), "graph, full": lambda: queue.replay(full), "queue": queued}
        return made

    def fixed_inputs(self, tokens: list[int]) -> None:
        """Make every replay the step after these tokens, at the rows' present positions."""
        state, layout, rows = self.state, self.executor._steps.layout, self.shape.tokens
        words = state.words.cpu()
        pairs = []
        for part in (layout.position, layout.token_row, layout.sample_row, layout.sample_position, layout.sample_index):
            pairs += [(part.at + i, int(words[part.at + i])) for i in range(rows)]
        pairs += [(layout.token.at + i, token) for i, token in enumerate(tokens)]
        flat = torch.tensor([len(pairs), 0, *(word for pair in pairs for word in pair)], dtype=torch.int32)
        state.staging[: len(flat)].copy_(flat)
        self.executor._ring._slots[0].pairs[: len(flat)].copy_(flat)
        torch.cuda.synchronize()

    def burst(self, launch: Callable[[], None], count: int) -> float:
        """Mean milliseconds of a step."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                launch()
            begin.record()
            for _ in range(count):
                launch()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count


def measure(stand: Stand, point: Point, seconds: float, trace: bool) -> None:
    """Print a point's forms: medians over rounds, and what each adds to the bare one."""
    edges = Edges(stand, point)
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(point.rows)]
    pass_over(engine, watch, [request(name, stand.tokens(point.context), 4000) for name in names])
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    tokens = stand.tokens(point.rows)
    edges.fixed_inputs(tokens)
    forms = edges.forms()
    count = max(5, int(_STEPS_MS / edges.burst(forms["graph"], 5)))
    found: dict[str, list[float]] = {name: [] for name in (*forms, "engine")}
    begin = time.time()
    while time.time() - begin < seconds or len(found["engine"]) < 3:
        edges.fixed_inputs(tokens)
        for name, launch in forms.items():
            found[name].append(edges.burst(launch, count))
            time.sleep(_STEPS_MS / 1e3)
        for _ in range(4):
            engine.step()
        at = time.perf_counter()
        for _ in range(count):
            engine.step()
        found["engine"].append((time.perf_counter() - at) / count * 1e3)
        torch.cuda.synchronize()
        time.sleep(_STEPS_MS / 1e3)
    bare = statistics.median(found["bare"])
    print(f"{stand.preset} {point.name}, bucket of {edges.shape.blocks} blocks, {len(found['bare'])} rounds of {count}")
    for name, times in found.items():
        ms = statistics.median(times)
        least, most = min(times), max(times)
        spread = f"[{least * 1e3:.1f}-{most * 1e3:.1f}]"
        print(f"  {name:12} {ms * 1e3:9.1f} us {(ms - bare) * 1e3:+7.1f}   {spread}", flush=True)
    if trace:
        edges.fixed_inputs(tokens)
        border(forms["queue"])
    drain(engine, names)


def border(step: Callable[[], None]) -> None:
    """Print the launches at the end of a step and at the beginning of the next one."""
    spans = kernel_spans(step, 4)
    at = max(i for i, span in enumerate(spans) if span[2].startswith("_begin_decode"))
    for n in range(max(1, at - 8), min(len(spans), at + 9)):
        start, end, name = spans[n]
        gap = start - spans[n - 1][1]
        print(f"  {start - spans[at][0]:+9.1f} {end - start:7.1f} us, {gap:+6.1f} after the last: {name[:50]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", default=["1x4096", "32x8192"], metavar="ROWSxCONTEXT")
    parser.add_argument("--preset", default="mini60")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--lock", help="a file; whoever has locked it times alone")
    args = parser.parse_args()
    points = tuple(Point("decode", *map(int, text.split("x"))) for text in args.points)
    stand = Stand(args.preset, **size_of(points, 8192))
    prepare(stand, points)
    with alone(args.lock):
        for point in points:
            measure(stand, point, args.seconds, args.trace)
    stand.close()


if __name__ == "__main__":
    main()
