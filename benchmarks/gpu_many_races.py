"""Whether attention of a step that holds prompts gives the same bits, run after run, and where it does not.

    PYTHONPATH=src:benchmarks:. python benchmarks/gpu_many_races.py [--preset NAME] [--seconds 14] [--processes 3]

A prompt from its first token on gives each program few pages and several tiles of queries: that is where warps of one
program overtake each other, which a few replays do not show. Several processes share the card, so that their programs
are interrupted. Exits with 1 if anything differed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import gpu_required  # noqa: F401  (ends here without a GPU)

# isort: split
import torch
from tests.kernels.many_steps import many_step

from gpu_decode_stack import HEAD_DIM, PRESETS, ROTARY_DIM, random_cache, shortened
from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.pages import PageLayout

NEW, BUCKET, PAGES, BLOCKS = 2300, 2304, 400, 80
_SHOWN = 4


def differing(preset: str, seed: int, seconds: float) -> int:
    """Runs of `seconds` whose scores, choices or output are not those of the first; prints what differs."""
    torch.manual_seed(seed)
    shapes = shortened(PRESETS[preset], 2)
    layout = PageLayout(shapes.layers, shapes.kv_heads)
    cache = random_cache(shapes, PAGES)
    frequency = 5e6 ** (-torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32, device="cuda") / ROTARY_DIM)
    table = torch.zeros(1, BLOCKS, dtype=torch.int32)
    used = (NEW - 1) // 128 + 1
    table[0, :used] = torch.randperm(PAGES - 1)[:used] + 1
    step = many_step([(0, NEW)], BUCKET, table.cuda(), frequency, HEAD_DIM)
    projected = torch.randn(BUCKET, shapes.projected, device="cuda").bfloat16()
    norms = MsaNorms(*(torch.randn(HEAD_DIM, device="cuda").mul(0.1).bfloat16() for _ in range(4)))
    shape = MsaShape(shapes.q_heads, layout, ROTARY_DIM, max_blocks=BLOCKS)
    plan = MsaManyPlan.default(shape, BUCKET)
    scratch = MsaManyScratch.allocate(BUCKET, PAGES, shape, plan, cache)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
    out = torch.zeros(BUCKET, shapes.q_heads * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lines = BUCKET * shapes.kv_heads

    def run() -> tuple[torch.Tensor, ...]:
        scratch.scores.fill_(float("nan"))
        msa_many_tokens(projected, step, norms, cache, 1, out, shape, plan, scratch, pdl=False)
        scores = torch.nan_to_num(scratch.scores.view(lines, -1)[:, :used], nan=-7.0)
        return scores, scratch.selected.view(lines, -1).clone(), out.clone()

    first, runs, wrong = run(), 0, 0
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        runs += 1
        places = [(a != b).any(dim=1).nonzero().flatten().tolist() for a, b in zip(run(), first, strict=True)]
        if any(places):
            wrong += 1
            if wrong <= _SHOWN:
                named = zip(("scores", "choices", "output"), places, strict=True)
                print(f"run {runs}:", ", ".join(f"{name} of rows {at[:6]}" for name, at in named if at), flush=True)
    print(f"{preset} seed {seed}: {wrong} of {runs} runs differ", flush=True)
    return wrong


def _process(preset: str, seed: int, seconds: float) -> None:
    sys.exit(1 if differing(preset, seed, seconds) else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mini60", choices=sorted(PRESETS))
    parser.add_argument("--seconds", type=float, default=14.0, help="of each process, its start apart")
    parser.add_argument("--processes", type=int, default=3)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_process, args=(args.preset, seed, args.seconds)) for seed in range(args.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(1 if any(process.exitcode for process in processes) else 0)


if __name__ == "__main__":
    main()
