"""Step times of the GPU executor through the engine, from a source tree with torch and Triton alone.

    PYTHONPATH=src python benchmarks/gpu_step.py [POINT ...] [--preset NAME]
    PYTHONPATH=src:benchmarks python benchmarks/gpu_step.py --host ROWSxCONTEXT [--preset NAME]

Without the option this is `longturn bench step`. `--host`: where the host's time of a decode step goes, by function.
What the engine adds on the device, `gpu_edges.py` tells.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys

import gpu_required  # noqa: F401  (ends here without a GPU)
from longturn.cli.main import main
from longturn.cli.steps.harness import Stand, Watch, drain, pass_over, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of
from longturn.engine.loop import Engine

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


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--host")
    options.add_argument("--preset", default="mini60")
    known, _ = options.parse_known_args()
    if known.host:
        wanted_rows, wanted_context = map(int, known.host.split("x"))
        host_profile(known.preset, wanted_rows, wanted_context)
    else:
        sys.exit(main(["bench", "step", *sys.argv[1:]]))
