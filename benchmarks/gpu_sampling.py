"""Check and time sampling on a GPU.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_sampling.py check time

`check` compares with the numpy sampler over a vocabulary of 200,064; `time` gives microseconds of one step's sampling
in a CUDA graph, beside `greedy_step`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from gpu_greedy import greedy_step
from gpu_timing import graph_times_us
from longturn.engine.records import SamplingParams
from longturn.executor.sampler import SamplingState, logprobs_of, sample
from longturn.executor.sampling_words import needs_penalties, penalty_words, plain, row_words
from longturn.kernels.sampling import sample_rows
from longturn.kernels.sampling_table import Sampled, SamplePlan, SampleScratch, SamplingTable

VOCAB = 200_064
DEVICE = torch.device("cuda")
HISTORY = np.arange(100, 600, dtype=np.int32) % 300


def params(**values: object) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **values)  # type: ignore[arg-type]


KINDS = {
    "greedy": params(temperature=0.0),
    "T 1": params(),
    "top-p .95": params(top_p=0.95),
    "top-k 50": params(top_k=50),
    "k 50 p .9 m .02 T .7": params(top_k=50, top_p=0.9, min_p=0.02, temperature=0.7),
    "min-p .05": params(min_p=0.05),
    "penalties": params(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1),
    "300 biases": params(logit_bias=tuple((7 * i, 1.0) for i in range(300))),
    "logprobs 20": params(logprobs=20),
}


def table_of(some: list[SamplingParams]) -> SamplingTable:
    """A table whose rows hold `some`, each after HISTORY, of which 400 tokens are the prompt."""
    table = SamplingTable.allocate(len(some), VOCAB, len(some), DEVICE)
    for row, p in enumerate(some):
        words = row_words(p, 400, row if needs_penalties(p) else -1)
        table.params[row] = torch.tensor(words.params, dtype=torch.int32)
        if words.bias_ids:
            table.bias_ids[row, : len(words.bias_ids)] = torch.tensor(words.bias_ids, dtype=torch.int32)
            table.bias_values[row, : len(words.bias_ids)] = torch.tensor(words.bias_values)
        if needs_penalties(p):
            table.penalties[row] = torch.from_numpy(penalty_words(HISTORY, 400, VOCAB)).to(DEVICE)
    return table


def peaked(rows: int, generator: np.random.Generator) -> np.ndarray:
    """Logits like a language model's: a few likely tokens, most of them far below."""
    ranks = generator.permuted(np.tile(np.arange(VOCAB), (rows, 1)), axis=1)
    return (12.0 - 1.6 * np.log1p(ranks) + generator.normal(size=(rows, VOCAB))).astype(np.float32)


def flat(rows: int, generator: np.random.Generator) -> np.ndarray:
    """Logits of a model with random weights."""
    return generator.normal(size=(rows, VOCAB)).astype(np.float32)


def check(plan: SamplePlan) -> list[str]:
    generator = np.random.default_rng()
    lines = []
    for shape in (peaked, flat):
        wrong = total = 0
        worst = 0.0
        for seed in range(4):
            some = [replace(p, seed=seed * 977 + n) for n, p in enumerate(KINDS.values())]
            logits = shape(len(some), generator)
            table, out = table_of(some), Sampled.allocate(len(some), DEVICE)
            out.tokens.fill_(-7)
            rows = torch.arange(len(some), dtype=torch.int32, device=DEVICE)
            sample_rows(
                torch.from_numpy(logits).to(DEVICE), rows, torch.full_like(rows, len(HISTORY)), table,
                SampleScratch.allocate(len(some), VOCAB, plan, DEVICE), out, plan=plan,
            )  # fmt: skip
            for row, (name, p) in enumerate(zip(KINDS, some, strict=True)):
                token, _ = sample(logits[row], SamplingState.create(p, HISTORY, 400, VOCAB), len(HISTORY))
                total += 1
                if out.tokens[row].item() != token:
                    wrong += 1
                    print(f"check {shape.__name__} {name}: {out.tokens[row].item()} is not {token}", flush=True)
                if p.logprobs:
                    want = logprobs_of(logits[row], int(out.tokens[row]), p.logprobs)
                    worst = max(worst, float(np.abs(out.top_logprobs[row].cpu().numpy() - want.top).max()))
                    wrong += tuple(out.top_ids[row].tolist()) != want.top_ids
        lines.append(
            f"check {shape.__name__}: {wrong} of {total} tokens differ, log-probabilities within {worst:.1e} "
            f"{'ok' if wrong <= 1 and worst < 1e-4 else 'WRONG'} (a near tie may differ)"
        )
        print(lines[-1], flush=True)
    return lines


def time_us(launch: Callable[[], None]) -> float:
    """Median time of one launch, 20 of them in a graph."""
    return statistics.median(graph_times_us([launch], rounds=20, replays=7))


def timings(counts: list[int], plans: dict[str, SamplePlan]) -> list[str]:
    generator = np.random.default_rng(1)
    lines = []
    for count in counts:
        rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
        positions = torch.full_like(rows, 500)
        for shape in (peaked, flat):
            logits = torch.from_numpy(shape(min(count, 8), generator)).to(DEVICE).repeat(-(-count // 8), 1)[:count]
            logits = logits.contiguous()
            values = torch.empty(count, 64, device=DEVICE)
            tokens, at = torch.zeros_like(rows), positions.clone()
            indices = torch.zeros(count, 64, dtype=torch.int32, device=DEVICE)

            def greedy(logits=logits, values=values, indices=indices, tokens=tokens, at=at) -> None:  # type: ignore[no-untyped-def]
                greedy_step(logits, values, indices, tokens, at, pdl=True)

            line = f"time {count:2} rows {shape.__name__:6} greedy_step {time_us(greedy):5.1f}"
            for label, plan in plans.items():
                scratch, out = SampleScratch.allocate(count, VOCAB, plan, DEVICE), Sampled.allocate(count, DEVICE)
                line += f"\n    {label:14}"
                for name, p in KINDS.items():
                    table = table_of([p] * count)

                    def one(logits=logits, table=table, scratch=scratch, out=out, plan=plan) -> None:  # type: ignore[no-untyped-def]
                        sample_rows(logits, rows, positions, table, scratch, out, plan=plan, pdl=True)  # noqa: B023

                    line += f" | {name} {time_us(one):.1f}"
                    if plain(p):

                        def light(logits=logits, table=table, scratch=scratch, out=out, plan=plan) -> None:  # type: ignore[no-untyped-def]
                            sample_rows(logits, rows, positions, table, scratch, out, plan=plan, full=False, pdl=True)  # noqa: B023

                        line += f" ({time_us(light):.1f} not full)"
            lines.append(line)
            print(line, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", choices=["check", "time"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64], help="row counts that `time` takes")
    arguments = parser.parse_args()
    lines: list[str] = []
    if "check" in arguments.commands:
        lines += check(SamplePlan.default(9)) + check(SamplePlan.default(1))
    if "time" in arguments.commands:
        lines += timings(arguments.rows, {"128 parts": SamplePlan.default(1), "64 parts": SamplePlan.default(64)})
    print("\n".join(["", "SUMMARY", *lines]))


if __name__ == "__main__":
    main()
