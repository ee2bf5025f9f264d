"""Step times of the GPU executor through the engine, from a source tree with torch and Triton alone.

    PYTHONPATH=src python benchmarks/gpu_step.py [POINT ...] [--preset NAME] [--profile ROWSxCONTEXT]

Without `--profile` this is `longturn bench step`. With it: where the host's time of a decode step goes, by function.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys

from longturn.cli.main import main
from longturn.cli.steps.harness import Stand, drain, pass_over, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of

STEPS = 200


def profile(preset: str, shape: str) -> None:
    """Print the functions that a decode step's host time is spent in."""
    rows, context = map(int, shape.split("x"))
    point = Point("decode", rows, context)
    stand = Stand(preset, **size_of((point,), 8192))
    prepare(stand, (point,))
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(rows)]
    pass_over(engine, watch, [request(name, stand.tokens(context), STEPS + 40) for name in names])
    for _ in range(10):
        engine.step()
    gc.collect()
    gc.freeze()
    watch.waited_ns = 0
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        engine.step()
    profiler.disable()
    print(f"{STEPS} steps, {watch.waited_ns / STEPS / 1e3:.0f} us of each waiting")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    drain(engine, names)


if __name__ == "__main__":
    if "--profile" in sys.argv:
        at = sys.argv.index("--profile")
        profile(sys.argv[sys.argv.index("--preset") + 1] if "--preset" in sys.argv else "mini60", sys.argv[at + 1])
    else:
        sys.exit(main(["bench", "step", *sys.argv[1:]]))
