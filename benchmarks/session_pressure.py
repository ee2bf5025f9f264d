"""More agent sessions than fit the pool, in virtual time: what `scheduler.recompute_share` does.

    PYTHONPATH=src python benchmarks/session_pressure.py own --traces DIR --sessions 4 8 16 32 --seconds 240
    PYTHONPATH=src python benchmarks/session_pressure.py agentx --traces DIR --sessions 8 16 32 --seconds 900

Both simulate mini60 on one H200 with Longturn's kernels (docs/simulate.md), in bf16 and with 2,048 tokens a step. `own`
has sessions, rules, pool and host time of `benchmarks/gpu_sessions.py`: pauses of at most 3 s. `agentx` has sessions
as recorded, with the rules of `bench agentx`; requests of more than 300,000 tokens are left out.

A line is one point: turns that ended, total tok/s, P90 and P50 tok/s/user, TTFT, hit rate, evicted pages, thousands of
prompt tokens computed a turn (pages that were lost, and what is new), pages copied back from host memory, and sessions
that were replayed to their ends (agentx).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from longturn.bench.traces.load import load_traces
from longturn.cli import simulate
from longturn.cli.simulate_setup import plan_simulation
from longturn.simulate import own_sessions
from longturn.simulate.own_replay import Done, replay
from longturn.simulate.published_data import OWN_RUNS, groups
from longturn.simulate.runner import Run
from longturn.simulate.runner import simulate as simulate_run


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def line(
    sessions: int, share: float, done: Sequence[Done], evictions: int, loaded: int, chunk_tokens: int, jobs: int | None
) -> str:
    """A point, for people."""
    figures = own_sessions.figures_of(done)
    first = [(one.first_ns - one.sent_ns) / 1e9 for one in done]
    return (
        f"{sessions:>3} sessions  share {share:<4g} {len(done):>4} turns  total {figures['total_tok_s']:>8,.0f}"
        f"  P90 {figures['p90_tok_s_user']:>5.1f}  P50 {figures['p50_tok_s_user']:>5.1f} tok/s/user"
        f"  TTFT {quantile(first, 0.5):>5.2f} / {quantile(first, 0.9):>6.2f} s, mean {statistics.mean(first):>5.2f},"
        f" most {max(first):>5.1f}  hits {figures['hit_rate']:.3f}  evicted {evictions:>7,}"
        f"  computed {chunk_tokens / len(done) / 1e3:>5.1f}k a turn  loaded {loaded:>7,}"
        + ("" if jobs is None else f"  jobs {jobs}")
    )


def own(args: argparse.Namespace, sessions: int, share: float) -> str:
    group = next(one for one in groups("sessions", path=OWN_RUNS) if one.judged)
    host_pages = {"host_pages": args.host_pages}
    group = dataclasses.replace(group, values={**group.values, **host_pages})
    cut = own_sessions.own_trees(load_traces([args.traces], split=False))
    trees = own_sessions.ordered(group, cut)[: max(sessions, 8) + own_sessions.MORE_SESSIONS]
    spec = own_sessions.group_spec(group, sessions, 1.0)
    spec = dataclasses.replace(spec, scheduler=dataclasses.replace(spec.scheduler, recompute_share=share))
    found = replay(spec, trees, sessions, args.seconds, own_sessions.request_time(group))
    return line(sessions, share, found.done, found.evictions, found.loaded_pages, found.tally.chunk_tokens, None)


def agentx(args: argparse.Namespace, sessions: int, share: float) -> str:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    words = [
        *(
            "--platform",
            "h200",
            "--model",
            "m3-mini60",
            "--formats",
            "bf16",
            "--kernels",
            "longturn",
            "--layout",
            "tp1",
        ),
        *("--routing", "1", "--set", "scheduler.step_tokens=2048", "--set", f"scheduler.recompute_share={share}"),
        *("--traces", str(args.traces), "--max-context", "300000", "--duration", str(args.seconds)),
        *("--concurrency", str(sessions), "--seed", str(args.seed)),
    ]
    plan = plan_simulation(parser.parse_args(words))
    spec = plan.spec(plan.variants[0])
    spec = dataclasses.replace(spec, info=dataclasses.replace(spec.info, host_pages=args.host_pages))
    found = simulate_run(spec, Run(plan.trees, plan.rules, sessions, plan.seed, request_ns=plan.request_ns))
    turns = [one.record for one in found.measurement.turns if one.record.answer.ok]
    done = [
        Done(
            one.sent_ns, one.chunks[0].at_ns, one.end_ns, one.prompt_tokens or 0, one.output_tokens or 0,
            one.cached_tokens or 0,
        )
        for one in (turn.answer for turn in turns)
    ]  # fmt: skip
    ended: dict[tuple[int, str], int] = {}
    for turn in turns:
        ended[turn.lane, turn.session] = max(ended.get((turn.lane, turn.session), 0), turn.answer.end_ns)
    jobs = len(ended) - len({lane for lane, _ in ended})  # all of a lane's but the one that it is at
    return line(sessions, share, done, found.evictions, found.loaded_pages, found.tally.chunk_tokens, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=("own", "agentx"))
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--sessions", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--host-pages", type=int, default=0, help="pages of host memory; 32 GB are 1,808 [0]")
    parser.add_argument(
        "--share", type=float, nargs="+", default=[1.0, 0.15], help="scheduler.recompute_share [1 0.15]"
    )
    parser.add_argument("--seed", type=int, default=42, help="of agentx's sessions and start points [42]")
    args = parser.parse_args()
    point = own if args.corpus == "own" else agentx
    for sessions in args.sessions:
        for share in args.share:
            print(point(args, sessions, share), flush=True)


if __name__ == "__main__":
    main()
