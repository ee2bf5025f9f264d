"""Agent sessions in closed loop through the engine and the GPU executor, in process, on random weights.

    python benchmarks/gpu_sessions.py pack --traces DIR --data FILE
    python benchmarks/gpu_sessions.py bound --data FILE [--seconds 40]
    PYTHONPATH=src python benchmarks/gpu_sessions.py run --data FILE --sessions 1 4 8 16 32 --seconds 40 [--json FILE]

Rules: sessions with at least 10 turns before the first of more than 120,000 tokens, those turns alone; each starts at
40 % of them, after the turn before has been computed, unmeasured; a turn follows the end of the last by the recorded
gap, at most 3 s; outputs are as long as recorded, at most 1,200 tokens; prompts share 64-token blocks as recorded, and
are random otherwise. A lane whose session ends takes the next one. Interactivity is 1 / (time from first to last token
over the tokens between).
`pack` writes the few numbers that this needs, so that the traces need not travel. `bound` says how many tokens a second
the gaps leave to an engine that takes no time, or a given time for each token. `run` takes about 30 s to start, 3 s for
prompts, and `--seconds` and 3 more for each point; pinning host memory takes a second for 4 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_sessions_data import (
    KEY,
    MOST_OUTPUT,
    MOST_TOKENS,
    MOST_TURNS,
    PEER,
    VOCAB,
    Prompts,
    Turn,
    bound,
    pack,
    prepare,
    read,
)

MORE = 4
"""Sessions prepared beside those that start."""


@dataclass
class Lane:
    """One session slot."""

    number: int
    turns: list[Turn] = field(default_factory=list)
    prompts: Prompts | None = None
    at: int = 0
    due: float = 0.0
    """When the next turn is sent."""
    name: str | None = None
    """Of the request in flight."""
    warming: bool = False
    sent: float = 0.0
    first: float = 0.0
    tokens: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Done:
    """A measured request."""

    start: float
    first: float
    end: float
    prompt: int
    output: int
    cached: int


class Replay:
    """Sessions in `count` lanes on one engine."""

    def __init__(self, engine: Any, sessions: list[list[Turn]], prompts: list[Prompts], count: int) -> None:
        """The last of `prompts` comes again when they have run out."""
        self._engine, self._sessions = engine, sessions
        self._prompts = prompts
        self._next = 0
        self._made = 0
        self.lanes = [Lane(i) for i in range(count)]
        self.done: list[Done] = []
        self.errors: list[str] = []
        self.preemptions = 0
        self.repeated = 0
        for lane in self.lanes:
            self._take(lane)

    def _take(self, lane: Lane) -> None:
        """The next session; its first turn only warms."""
        number = min(self._next, len(self._prompts) - 1)
        self.repeated += self._next > number
        self._next += 1
        lane.turns = self._sessions[number % len(self._sessions)][:MOST_TURNS]
        lane.at, lane.warming, lane.due, lane.prompts = 0, True, 0.0, self._prompts[number]

    def _send(self, lane: Lane, now: float) -> None:
        from longturn.engine.records import EngineRequest, SamplingParams

        assert lane.prompts is not None
        turn, prompts = lane.turns[lane.at], lane.prompts
        self._made += 1
        lane.name = f"r{self._made}"
        params = SamplingParams(1 if lane.warming else turn.output, temperature=0.0)
        self._engine.add(
            EngineRequest(
                lane.name, prompts.prompts[lane.at], prompts.hashes[lane.at], params,
                session_id=f"s{prompts.number}", hash_key=KEY,
            )
        )  # fmt: skip
        lane.sent, lane.first, lane.tokens = now, 0.0, 0

    def _finish(self, lane: Lane, now: float, measured: bool) -> None:
        turn = lane.turns[lane.at]
        if not lane.warming and measured:
            self.done.append(Done(lane.sent, lane.first, now, turn.tokens, lane.tokens, lane.cached))
        lane.name, lane.warming = None, False
        lane.at += 1
        if lane.at == len(lane.turns):
            self._take(lane)
        else:
            lane.due = now + lane.turns[lane.at].gap_s

    def turn(self, *, only_warm: bool = False, measured: bool = True) -> bool:
        """Send what is due and do one engine step; False if nothing is left to do now."""
        now = time.perf_counter()
        for lane in self.lanes:
            if lane.name is None and now >= lane.due and not (only_warm and not lane.warming):
                self._send(lane, now)
        if not self._engine.has_work():
            if only_warm:
                return False
            time.sleep(max(0.0, min(min(lane.due for lane in self.lanes) - now, 0.005)))
            return True
        step = self._engine.step()
        now = time.perf_counter()
        by_name = {lane.name: lane for lane in self.lanes if lane.name is not None}
        for output in step.outputs if step is not None else ():
            lane = by_name.get(output.request_id)
            if lane is None:
                continue
            if output.token_ids:
                lane.first = lane.first or now
                lane.tokens += len(output.token_ids)
                lane.cached = output.cached_tokens
            if output.finish is not None:
                self.preemptions += output.preemptions
                if output.error is not None:
                    self.errors.append(output.error)
                self._finish(lane, now, measured)
        return True


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(
    stand: Any, sessions: list[list[Turn]], prompts: list[Prompts], count: int, seconds: float
) -> dict[str, Any]:
    """One point: `count` sessions at once for `seconds`."""
    engine, watch = stand.engine(passing=False)
    replay = Replay(engine, sessions, prompts, count)
    # What a page holds costs nothing different, so the state that is warmed before the clock need not be computed.
    watch.computing = False
    while replay.turn(only_warm=True):
        pass
    watch.computing = True
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        replay.turn()
    for lane in replay.lanes:
        if lane.name is not None:
            engine.abort(lane.name)
    while engine.has_work():
        engine.step()
    engine.check_invariants()
    done, stats = replay.done, engine.stats()
    if not done:
        return {"sessions": count, "requests": 0, "errors": replay.errors, "preemptions": replay.preemptions}
    gaps = [(d.end - d.first) / (d.output - 1) for d in done if d.output > 1]
    first = [d.first - d.start for d in done]
    span = max(d.end for d in done) - min(d.start for d in done)
    return {
        "sessions": count,
        "requests": len(done),
        "p90_tok_s_user": 1 / quantile(gaps, 0.9),
        "p50_tok_s_user": 1 / quantile(gaps, 0.5),
        "total_tok_s": sum(d.prompt + d.output for d in done) / span,
        "output_tok_s": sum(d.output for d in done) / span,
        "hit_rate": sum(d.cached for d in done) / sum(d.prompt for d in done),
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p90_s": quantile(first, 0.9),
        "median_in": statistics.median(d.prompt for d in done),
        "median_out": statistics.median(d.output for d in done),
        "preemptions": replay.preemptions,
        "evictions": stats.evictions,
        "offloaded_pages": stats.offloaded_pages,
        "loaded_pages": stats.loaded_pages,
        "host_hit_tokens": stats.host_hit_tokens,
        "sessions_repeated": replay.repeated,
        "errors": replay.errors,
    }


def run(args: argparse.Namespace) -> None:
    import gpu_required  # noqa: F401  (ends here without a GPU)

    sessions = read(args.data)
    expected = 35 + args.host_gb / 4 + len(args.sessions) * (args.seconds + 3)
    print(f"about {expected:.0f} s from here", flush=True)
    begin = time.perf_counter()
    prompts = prepare(sessions, VOCAB, max(args.sessions) + MORE)  # before CUDA: it does not survive a fork
    print(f"prompts of {len(prompts)} sessions in {time.perf_counter() - begin:.1f} s", flush=True)
    from longturn.cli.steps.harness import Stand

    stand = Stand(
        args.preset, rows=max(args.sessions), cached_tokens=args.cached_tokens, context=MOST_TOKENS + MOST_OUTPUT,
        step_tokens=args.step_tokens, target_itl_ms=args.target_itl_ms, serving=True,
        host_bytes=int(args.host_gb * 1e9),
    )  # fmt: skip
    assert stand.config.vocab_size == VOCAB
    stand.start()
    while stand.executor.idle():
        pass
    info = stand.executor.info
    print(
        f"ready after {time.perf_counter() - begin:.1f} s; pool of {info.pages} pages ({info.pages * 128:,} tokens),"
        f" {info.host_pages} in host memory",
        flush=True,
    )
    gc.collect()
    gc.freeze()
    rows = []
    for count in args.sessions:
        row = measure(stand, sessions, prompts, count, args.seconds)
        rows.append(row)
        print(line_of(row), flush=True)
    stand.close()
    print(f"all in {time.perf_counter() - begin:.0f} s")
    bound(sessions, args.sessions, args.seconds)
    if args.json is not None:
        args.json.write_text(json.dumps({"command": sys.argv, "points": rows}, indent=1))


def line_of(row: dict[str, Any]) -> str:
    """A point, for people."""
    start = f"{row['sessions']:>3} sessions {row['requests']:>4} requests  errors {len(row['errors'])}"
    if not row["requests"]:
        return f"{start} {row['errors'][:1]}"
    return (
        f"{start}  P90 {row['p90_tok_s_user']:.1f} tok/s/user  total {row['total_tok_s']:,.0f}"
        f"  output {row['output_tok_s']:.0f}  hits {row['hit_rate']:.3f}"
        f"  TTFT {row['ttft_p50_s']:.3f} / {row['ttft_p90_s']:.3f} s  in/out {row['median_in']:.0f} /"
        f" {row['median_out']:.0f}  preempted {row['preemptions']}  evicted {row['evictions']}"
        f"  loaded {row['loaded_pages']}  vLLM {PEER.get(row['sessions'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("--traces", type=Path, required=True)
    packing.add_argument("--data", type=Path, required=True)
    for verb in ("bound", "run"):
        made = verbs.add_parser(verb)
        made.add_argument("--data", type=Path, required=True)
        made.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8, 16, 32])
        made.add_argument("--seconds", type=float, default=40.0)
    made.add_argument("--preset", default="mini60")
    made.add_argument("--cached-tokens", type=int, help="of the page pool [all that fit]")
    made.add_argument("--host-gb", type=float, default=0.0, help="host memory for pages that leave the pool [0]")
    made.add_argument("--step-tokens", type=int, default=2048)
    made.add_argument("--target-itl-ms", type=float, default=0.0)
    made.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.verb == "pack":
        pack(args.traces, args.data)
    elif args.verb == "bound":
        bound(read(args.data), args.sessions, args.seconds)
    else:
        run(args)


if __name__ == "__main__":
    main()
