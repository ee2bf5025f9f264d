"""A sweep of `bench agentx`: its sessions, and one measurement for each concurrency."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from longturn.bench.agentx import measure
from longturn.bench.presets import Rules, rules_of
from longturn.bench.traces.shrink import drop_long, scale_tree
from longturn.bench.traces.system_prefix import derive_system
from longturn.bench.traces.tree import SessionTree
from longturn.cli.agentx_load import concurrency, token_ids
from longturn.cli.agentx_point import make_point
from longturn.cli.agentx_progress import SweepProgress
from longturn.cli.agentx_requests import requests_path, save_requests
from longturn.cli.agentx_setting import make_setting
from longturn.cli.agentx_target import open_target
from longturn.cli.named_traces import named_traces
from longturn.cli.options import config_from_args
from longturn.config import EngineConfig
from longturn.errors import ConfigError
from longturn.report.point import Point, save_point


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is measured, and how."""

    args: argparse.Namespace
    """Of `bench agentx`, checked."""
    config: EngineConfig | None
    """Of the engine with --inproc."""
    rules: Rules
    trees: list[SessionTree]
    """Scaled and filtered."""
    dropped: int
    """Requests that --max-context left out."""
    lanes: list[int]
    """Session trees alive at once, one measurement each."""
    token_ids: range | None


def plan_sweep(args: argparse.Namespace) -> SweepPlan:
    """What the checked arguments stand for; reads the traces.

    Raises:
        ConfigError: a value that cannot be, or nothing is left to replay.
        TraceError: a trace cannot be read.
    """
    config = None
    if args.inproc:
        config = config_from_args(argparse.Namespace(config=args.config, model_dir=args.model, sets=args.sets))
    rules = rules_of(args.preset, args.duration)
    trees, dropped = _trees(args)
    ids = token_ids(args.token_ids, args.api)
    return SweepPlan(args, config, rules, trees, dropped, concurrency(args.concurrency), ids)


async def measure_sweep(plan: SweepPlan, out: Path, points: list[Point], progress: SweepProgress) -> bool:
    """Measure point by point; each is saved in `out` and added to `points` as soon as it is there.

    Returns:
        Whether Ctrl-C ended it.

    Raises:
        TargetError: the server cannot be reached, lacks the model, or failed at the warm-up.
        ConfigError: the sessions do not fit the model's context.
        LongturnError: the engine of --inproc could not be started.
    """
    args, rules, trees = plan.args, plan.rules, plan.trees
    seed = args.seed if args.seed is not None else rules.seed if rules.seed is not None else secrets.randbelow(2**31)
    if plan.config is not None:
        progress.starting()
    async with open_target(args, plan.config) as opened:
        _check_fits(trees, opened.model.context_tokens, opened.place)
        bodies = await opened.bodies(args.api, trees, seed, plan.token_ids, live=args.carry_over == "live")
        run_id = secrets.token_hex(6)
        setting = make_setting(args, rules, trees, plan.dropped, opened, seed, run_id)
        for count in plan.lanes:
            progress.concurrency = count
            measured = await measure(
                opened.target,
                bodies,
                trees,
                rules,
                model=opened.model.name,
                lanes=count,
                seed=seed,
                run=f"{run_id}:{count}",
                token_counts=args.token_counts,
                progress=progress,
                read_state=opened.read_state,
            )
            if measured.turns:
                point = make_point(setting, trees, measured, count)
                points.append(point)
                path = out / f"agentx-{count:04d}.json"
                save_point(point, path)
                save_requests(measured, requests_path(path))
            if measured.interrupted or measured.conduct.cancelled is not None:
                return measured.interrupted
    return False


def _trees(args: argparse.Namespace) -> tuple[list[SessionTree], int]:
    """The sessions to replay, and how many requests --max-context dropped."""
    trees = named_traces(args.traces, split=not args.no_split)
    if args.derive_system:
        trees = [derive_system(tree) for tree in trees]
    trees = [scale_tree(tree, args.scale_context) for tree in trees]
    dropped = 0
    if args.max_context is not None:
        trees, dropped = drop_long(trees, args.max_context)
        if dropped:
            print(
                f"longturn: --max-context {args.max_context} drops {dropped:,} requests, "
                f"{sum(1 for tree in trees for _ in tree.requests()):,} are left",
                file=sys.stderr,
            )
    if not trees:
        raise ConfigError(f"--max-context {args.max_context} leaves no request of these traces")
    return trees, dropped


def _check_fits(trees: list[SessionTree], limit: int | None, place: str) -> None:
    """Better refused now than found as an overflow rate after an hour."""
    if limit is None:
        return
    tree, longest = max(
        ((tree, request) for tree in trees for request in tree.requests()),
        key=lambda pair: pair[1].input_tokens + max(1, pair[1].output_tokens),
    )
    needed = longest.input_tokens + max(1, longest.output_tokens)
    if needed > limit:
        raise ConfigError(
            f"{tree.source}: {longest.place} needs {needed:,} tokens, {place} holds {limit:,}: give "
            f"--max-context {limit} to drop such requests, or shrink the sessions with --scale-context"
        )
