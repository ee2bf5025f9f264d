"""Replay recorded agent session trees in a closed loop by AgentX rules: one point for each number of live trees."""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.bench.presets import Rules
    from longturn.bench.traces.tree import SessionTree
    from longturn.cli.agentx_point import Setting
    from longturn.cli.agentx_progress import SweepProgress
    from longturn.report.point import Point

PRESET_NAMES = ("agentx", "agentx-mvp", "quick")
_MOST_LANES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model to ask for; the server's first one if left out")
    parser.add_argument("--api-key", metavar="KEY", help="bearer key")
    parser.add_argument(
        "--api", choices=["chat", "completions"], default="chat", help="chat messages, or prompts as token ids [chat]"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest time for one answer [600]")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--traces",
        nargs="+",
        default=["workshop.json"],
        metavar="PATH",
        help="trace files, folders, or traces that come with the package [workshop.json]",
    )
    load.add_argument(
        "--concurrency", default="1", metavar="N,N", help="session trees alive at once, one point each [1]"
    )
    load.add_argument("--preset", choices=PRESET_NAMES, default="quick", help="rules of the replay [quick]")
    load.add_argument("--duration", type=float, metavar="S", help="seconds of each point [as the preset]")
    load.add_argument("--seed", type=int, metavar="N", help="of sessions, start points and prompts [as the preset]")
    load.add_argument("--max-context", type=int, metavar="N", help="drop requests of more tokens, output included")
    load.add_argument(
        "--scale-context", type=float, default=1.0, metavar="F", help="shrink sessions, keeping their structure [1]"
    )
    load.add_argument("--no-split", action="store_true", help="look for no agents in flattened captures")
    load.add_argument(
        "--token-ids", metavar="LOW-HIGH", help="ids for prompts, where a server with completions has no /tokenize"
    )
    load.add_argument(
        "--token-counts",
        action="store_true",
        help="ask for `return_token_ids`: counts the tokens of an event exactly, costs the prompt's bytes again",
    )
    known = parser.add_argument_group("what is measured, for the result")
    known.add_argument("--name", metavar="TEXT", help="name of the curve [the model's name]")
    known.add_argument("--engine", default="unknown", metavar="NAME[:VERSION]", help="the server's engine")
    known.add_argument("--quantisation", default="unknown", metavar="NAME", help="weights as served, such as nvfp4")
    known.add_argument("--chip", default="unknown", metavar="NAME", help="accelerator or processor")
    known.add_argument("--chips", type=int, default=1, metavar="N", help="of the whole deployment [1]")
    known.add_argument("--price", type=float, metavar="USD", help="per chip and hour")
    known.add_argument("--power", type=float, metavar="W", help="per chip, all in")
    parser.add_argument(
        "--out", default="results/agentx", metavar="DIR", help="one JSON a point, page [results/agentx]"
    )


def run(args: argparse.Namespace) -> int:
    lanes = _concurrency(args.concurrency)
    check_number("--chips", args.chips, 1)
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be more than 0, not {args.timeout}")
    for flag, value in (("--price", args.price), ("--power", args.power)):
        if value is not None:
            check_number(flag, value, 0)
    if args.max_context is not None:
        check_number("--max-context", args.max_context, 2)
    ids = _token_ids(args.token_ids, args.api)

    import asyncio
    import json

    from longturn.bench.presets import rules_of
    from longturn.cli.agentx_point import points_table, reasons_text
    from longturn.cli.agentx_progress import SweepProgress
    from longturn.cli.main import INTERRUPTED
    from longturn.report.point import point_to_json
    from longturn.report.schema import check_writable
    from longturn.report.sweep import write_sweep

    rules = rules_of(args.preset, args.duration)
    trees, dropped = _trees(args)
    out = Path(args.out)
    check_writable(out)
    points: list[Point] = []
    progress = SweepProgress(rules)
    try:
        interrupted = asyncio.run(_sweep(args, rules, trees, dropped, lanes, ids, out, points, progress))
    finally:
        progress.close()
        if points:
            if args.json:
                print(json.dumps([json.loads(point_to_json(point)) for point in points]))
            else:
                print(points_table(points), reasons_text(points), sep="\n\n", end="\n\n")
            sys.stdout.flush()
            page = out / "index.html"
            write_sweep(points, "Agent session replay", page)
            if not args.json:
                print(f"results: {out}\npage:    {page.resolve().as_uri()}")
    if interrupted:
        print("longturn: interrupted, results are partial", file=sys.stderr)
        return INTERRUPTED
    return _exit_code(points)


def _exit_code(points: list[Point]) -> int:
    """1 where a point was cut short or nothing succeeded; an override by the user is no failure."""
    failed = [
        reason
        for point in points
        for reason in point.validity.reasons
        if reason.startswith(("run_cancelled", "no_success"))
    ]
    if failed:
        print(f"longturn: error: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0


async def _sweep(
    args: argparse.Namespace,
    rules: Rules,
    trees: list[SessionTree],
    dropped: int,
    lanes: list[int],
    ids: range | None,
    out: Path,
    points: list[Point],
    progress: SweepProgress,
) -> bool:
    """Measure and save point by point; returns whether Ctrl-C ended it."""
    from longturn.bench.agentx import measure
    from longturn.bench.bodies import make_bodies
    from longturn.bench.client import ChatClient
    from longturn.cli.agentx_point import make_point
    from longturn.report.point import save_point

    seed = args.seed if args.seed is not None else rules.seed if rules.seed is not None else secrets.randbelow(2**31)
    async with ChatClient(args.url, api_key=args.api_key, timeout_s=args.timeout) as client:
        model = await client.choose_model(args.model)
        _check_fits(trees, (await client.context_limits()).get(model), args.url)
        bodies = await make_bodies(
            args.api, trees, seed, url=client.url, model=model, api_key=args.api_key, token_ids=ids
        )
        run_id = secrets.token_hex(6)
        setting = _setting(args, rules, trees, dropped, model, seed, run_id)
        for count in lanes:
            progress.concurrency = count
            measured = await measure(
                client,
                bodies,
                trees,
                rules,
                model=model,
                lanes=count,
                seed=seed,
                run=f"{run_id}:{count}",
                token_counts=args.token_counts,
                progress=progress,
            )
            if measured.turns:
                point = make_point(setting, trees, measured, count)
                points.append(point)
                save_point(point, out / f"agentx-{count:04d}.json")
            if measured.interrupted or measured.conduct.cancelled is not None:
                return measured.interrupted
    return False


def _trees(args: argparse.Namespace) -> tuple[list[SessionTree], int]:
    """The sessions to replay, and how many requests --max-context dropped."""
    from longturn.bench.traces.load import load_shipped, load_traces, shipped_traces
    from longturn.bench.traces.shrink import drop_long, scale_tree

    split = not args.no_split
    shipped = [name for name in args.traces if name in shipped_traces() and not Path(name).exists()]
    trees = [tree for name in dict.fromkeys(shipped) for tree in load_shipped(name, split=split)]
    trees += load_traces([Path(name) for name in args.traces if name not in shipped], split=split)
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


def _check_fits(trees: list[SessionTree], limit: int | None, url: str) -> None:
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
            f"{tree.source}: {longest.place} needs {needed:,} tokens, the server at {url} holds {limit:,}: give "
            f"--max-context {limit} to drop such requests, or shrink the sessions with --scale-context"
        )


def _setting(
    args: argparse.Namespace,
    rules: Rules,
    trees: list[SessionTree],
    dropped: int,
    model: str,
    seed: int,
    run_id: str,
) -> Setting:
    from longturn.cli.agentx_point import Setting
    from longturn.report.point import Engine, Model, Platform, Traces

    engine, _, version = args.engine.partition(":")
    return Setting(
        configuration=args.name or model,
        command=_command(args, seed),
        engine=Engine(name=engine, version=version or "unknown"),
        model=Model(name=model, quantisation=args.quantisation),
        platform=Platform(
            chip=args.chip, chips=args.chips, price_per_chip_hour=args.price, power_w_per_chip=args.power
        ),
        traces=Traces(
            name=", ".join(Path(name).name for name in args.traces),
            seed=seed,
            preset=rules.preset,
            digest=_digest(trees),
            scale_context=args.scale_context,
            max_context=args.max_context,
            dropped_requests=dropped,
        ),
        rules=rules,
        api=args.api,
        run=run_id,
    )


def _digest(trees: list[SessionTree]) -> str:
    """Hash of what is replayed, independent of where it lay and how it was written: 16 hex digits."""
    import hashlib

    digest = hashlib.sha256()
    for tree in trees:
        digest.update(f"{tree.id} {tree.block_tokens}\n".encode())
        for item in tree.conversations:
            digest.update(f"{item.id} {item.parent} {item.spawn_after} {item.join_before}\n".encode())
            for request in item.requests:
                ends = f"{request.start_s!r} {request.gap_s!r} {request.input_tokens} {request.output_tokens}"
                last = tree.trie.block_id(request.node) if request.node >= 0 else ""
                digest.update(f"{ends} {last}\n".encode())
    return digest.hexdigest()[:16]


def _command(args: argparse.Namespace, seed: int) -> str:
    """The command that repeats this run, without the key and this machine's folders."""
    parts = ["longturn", "bench", "agentx", "--url", args.url]
    parts += ["--model", args.model] if args.model else []
    parts += ["--traces", *(Path(name).name if Path(name).is_absolute() else name for name in args.traces)]
    parts += ["--concurrency", args.concurrency, "--preset", args.preset, "--seed", str(seed), "--api", args.api]
    for flag, value in (("--duration", args.duration), ("--max-context", args.max_context)):
        parts += [flag, f"{value:.15g}"] if value is not None else []
    parts += ["--scale-context", f"{args.scale_context:g}"] if args.scale_context != 1 else []
    parts += ["--token-ids", args.token_ids] if args.token_ids else []
    parts += [flag for flag, on in (("--no-split", args.no_split), ("--token-counts", args.token_counts)) if on]
    return shlex.join(parts)


def _concurrency(text: str) -> list[int]:
    """`1,2,4` as numbers, in the order given."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--concurrency must be numbers with commas between, not '{text}'") from None
    for count in found:
        if not 1 <= count <= _MOST_LANES:
            raise ConfigError(f"--concurrency must be between 1 and {_MOST_LANES}, not {count}")
    return found


def _token_ids(text: str | None, api: str) -> range | None:
    """`1000-9000` as ids, both ends included."""
    if text is None:
        return None
    if api != "completions":
        raise ConfigError("--token-ids needs --api completions")
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and int(high) - int(low) >= 31):
        raise ConfigError(f"--token-ids must be LOW-HIGH with at least 32 ids, not '{text}'")
    return range(int(low), int(high) + 1)
