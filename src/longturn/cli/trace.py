"""Show what is in recorded traces: `trace stat PATH...` reads Weka JSON and Mooncake JSONL, gzipped or not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from longturn.cli.named_traces import SHIPPED, named_traces
from longturn.cli.terminal import table

if TYPE_CHECKING:
    from longturn.bench.hit_rate import HitRate
    from longturn.bench.metrics import Distribution
    from longturn.bench.traces.stat import Level, TraceStat
    from longturn.bench.traces.tree import SessionTree

_SHOWN_SESSIONS = 12
"""More sessions than this are listed only when asked for."""
_BARS = "▁▂▃▄▅▆▇█"
_BINS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["stat"], help="stat: print counts, percentiles, hit rate, agents")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help=f"trace file or folder, or one of the package: {', '.join(SHIPPED)}"
    )
    parser.add_argument(
        "--no-split", action="store_true", help="leave flattened captures as they are: look for no agents in them"
    )
    parser.add_argument("--sessions", action="store_true", help="list every session, however many there are")


def run(args: argparse.Namespace) -> int:
    from longturn.bench.traces.stat import trace_stat

    trees = named_traces(args.paths, split=not args.no_split)
    stat = trace_stat(trees)
    print(json.dumps(as_json(stat)) if args.json else text(stat, trees, every_session=args.sessions))
    return 0


def as_json(stat: TraceStat) -> dict[str, Any]:
    """Everything that was counted, with the hit rates as numbers from 0 to 1."""
    found = dataclasses.asdict(stat)
    found["hit"] |= _rates(stat.hit)
    for item, session in zip(found["sessions"], stat.sessions, strict=True):
        item["hit"] |= _rates(session.hit)
    return found


def _rates(hit: HitRate) -> dict[str, float | None]:
    return {"by_blocks": hit.by_blocks, "by_tokens": hit.by_tokens}


def text(stat: TraceStat, trees: list[SessionTree], *, every_session: bool = False) -> str:
    """The counts for people."""
    children = {kind: count for kind, count in stat.agents.items() if kind != "root"}
    agents = ", ".join(f"{count:,} {kind}" for kind, count in sorted(children.items())) or "none"
    rows = {
        "sessions": f"{len(stat.sessions):,}",
        "requests": f"{stat.requests:,} ({stat.turns.total:,.0f} turns of root agents)",
        "subagents": agents,
        "blocks": " and ".join(f"{size} tokens" for size in stat.block_tokens),
        "hit rate": _hit_text(stat.hit),
    }
    if stat.without_duration == stat.requests:
        rows["durations"] = "not recorded"
    elif stat.without_duration:
        rows["no duration"] = f"{stat.without_duration:,} requests: pauses after them run from their start"
    lines = [f"{key:<13}{value}" for key, value in rows.items()]
    lines += ["", table(["", "p50", "p75", "p90", "p95", "p99", "max", "total"], _distributions(stat))]
    if any(request.duration_s is not None for tree in trees for request in tree.requests()):
        lines += ["", "share of time  " + _levels("agents alive", stat.agents_alive)]
        lines += ["               " + _levels("requests in flight", stat.requests_alive)]
    lines += _over_time(trees)
    if every_session or len(trees) <= _SHOWN_SESSIONS:
        lines += ["", _session_table(stat)]
    else:
        lines += ["", f"--sessions lists the {len(trees):,} sessions."]
    return "\n".join(lines)


def _hit_text(hit: HitRate) -> str:
    if hit.by_blocks is None:
        return "unknown: no blocks are hashed"
    return (
        f"{hit.by_blocks:.2%} of hashed blocks, {hit.by_tokens:.2%} of input tokens, with a cache that forgets nothing"
    )


def _distributions(stat: TraceStat) -> list[list[str]]:
    rows = [
        _row("input tokens", stat.input_tokens, 0),
        _row("output tokens", stat.output_tokens, 0),
        _row("turns of a session", stat.turns, 0),
    ]
    if stat.gap_s is not None:
        rows.append(_row("pause, s", stat.gap_s, 1))
    if stat.span_s.max > 0:
        rows.append(_row("session, s", stat.span_s, 0))
    return rows


def _row(name: str, found: Distribution, places: int) -> list[str]:
    values = (found.p50, found.p75, found.p90, found.p95, found.p99, found.max, found.total)
    return [name, *(f"{value:,.{places}f}" for value in values)]


def _levels(name: str, found: tuple[Level, ...]) -> str:
    total = sum(level.seconds for level in found)
    if not total:
        return f"{name}: unknown"
    shares = [f"{level.count}: {level.seconds / total:.1%}" for level in found if level.seconds / total >= 0.0005]
    return f"{name + ':':<20}" + "  ".join(shares)


def _over_time(trees: list[SessionTree]) -> list[str]:
    """Concurrency over time where there is one clock: a single session, or sessions that arrive on a common one."""
    from longturn.bench.traces.timeline import agent_spans, alive_over_time, arrivals, binned, request_spans

    if len(trees) == 1 and trees[0].span_s > 0:
        lines = ["", f"over {trees[0].span_s:,.0f} s"]
        for name, spans in (("agents alive", agent_spans(trees[0])), ("requests in flight", request_spans(trees[0]))):
            lines.append(f"  {name:<20}{_spark(binned(alive_over_time(spans), _BINS))}")
        return lines
    if len({tree.namespace for tree in trees}) == 1 and any(tree.arrival_s for tree in trees):
        times = [tree.arrival_s + request.start_s for tree in trees for request in tree.requests()]
        span_s = max(times) - min(times)
        rate = len(times) / span_s
        lines = ["", f"over {span_s:,.0f} s, {rate:,.2f} requests a second"]
        return [*lines, f"  {'requests sent':<20}{_spark(arrivals(trees, _BINS))}"]
    return []


def _spark(values: list[float] | list[int]) -> str:
    """Values as bars, the largest as the full one; nothing at all is a blank."""
    top = max(values)
    if top <= 0:
        return "no durations recorded"
    bars = ["" if value else " " for value in values]
    for index, value in enumerate(values):
        if value:
            bars[index] = _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS) + 1e-9))]
    return "".join(bars) + f"  top {top:,.4g}"


def _session_table(stat: TraceStat) -> str:
    rows = []
    for item in stat.sessions:
        rate = item.hit.by_blocks
        rows.append(
            [
                item.id,
                f"{item.turns:,}",
                f"{sum(item.agents.values()) - 1:,}",
                f"{item.requests:,}",
                f"{item.input_tokens:,}",
                f"{item.output_tokens:,}",
                f"{item.max_context_tokens:,}",
                "-" if rate is None else f"{rate:.1%}",
                f"{item.most_requests:,}",
                f"{item.span_s:,.0f}",
            ]
        )
    head = [
        "session", "turns", "subagents", "requests", "input", "output", "longest", "hit rate", "in flight", "seconds",
    ]  # fmt: skip
    return table(head, rows)
