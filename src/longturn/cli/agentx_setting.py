"""What the points of a sweep of `bench agentx` say of its conditions, and the command that repeats it."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from pathlib import Path

from longturn.bench.presets import Rules
from longturn.bench.target import UNKNOWN
from longturn.bench.traces.tree import SessionTree
from longturn.cli.agentx_point import Setting
from longturn.cli.agentx_target import OpenTarget
from longturn.cli.config_text import short_name
from longturn.cli.machine import cpu_name
from longturn.cli.options import repeat_flags
from longturn.report.point import Engine, Model, Platform, Traces


def make_setting(
    args: argparse.Namespace,
    rules: Rules,
    trees: list[SessionTree],
    dropped: int,
    opened: OpenTarget,
    seed: int,
    run_id: str,
) -> Setting:
    """What all points of a sweep share, from the arguments, and from the target where they do not say.

    Args:
        args: of `bench agentx`.
        rules, trees, dropped, seed: of the plan.
        opened: the target.
        run_id: name of the run.
    """
    model, inproc = opened.model, opened.kind == "inproc"
    told = f"{model.engine or UNKNOWN}:{model.version or UNKNOWN}"
    engine, _, version = (args.engine or told).partition(":")
    # Points under one name share a curve: other settings, another name.
    parts = [model.name, *(["no HTTP"] if inproc else []), *(["live answers"] if args.carry_over == "live" else [])]
    parts += [f"{short_name(setting)}={text}" for setting, text in opened.settings.items()]
    return Setting(
        configuration=args.name or ", ".join(parts),
        command=_command(args, seed),
        engine=Engine(name=engine, version=version or UNKNOWN),
        model=Model(
            name=model.name, quantisation=args.quantisation or model.quantisation or UNKNOWN, kv_cache=model.kv_cache
        ),
        platform=Platform(
            chip=args.chip or (cpu_name() if inproc else model.chip or UNKNOWN),
            chips=args.chips,
            price_per_chip_hour=args.price,
            power_w_per_chip=args.power,
        ),
        traces=Traces(
            name=", ".join(Path(name).name for name in args.traces),
            seed=seed,
            preset=rules.preset,
            digest=trace_digest(trees),
            scale_context=args.scale_context,
            max_context=args.max_context,
            dropped_requests=dropped,
        ),
        rules=rules,
        api=args.api,
        target=opened.kind,
        carry_over=args.carry_over,
        weights=model.weights,
        run=run_id,
        derived_system=args.derive_system,
        settings=opened.settings,
    )


def trace_digest(trees: list[SessionTree]) -> str:
    """Hash of what is replayed, independent of where it lay and how it was written: 16 hex digits."""
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
    parts = ["longturn", "bench", "agentx"]
    if args.inproc:
        parts += ["--inproc", *(["--model", Path(args.model).name] if args.model else []), *repeat_flags(args)]
    else:
        parts += ["--url", args.url, *(["--model", args.model] if args.model else [])]
    parts += ["--traces", *(Path(name).name if Path(name).is_absolute() else name for name in args.traces)]
    parts += ["--concurrency", args.concurrency, "--preset", args.preset, "--seed", str(seed), "--api", args.api]
    for flag, value in (("--duration", args.duration), ("--max-context", args.max_context)):
        parts += [flag, f"{value:.15g}"] if value is not None else []
    parts += ["--scale-context", f"{args.scale_context:g}"] if args.scale_context != 1 else []
    parts += ["--carry-over", args.carry_over] if args.carry_over != "recorded" else []
    parts += ["--token-ids", args.token_ids] if args.token_ids else []
    switches = (
        ("--no-split", args.no_split),
        ("--derive-system", args.derive_system),
        ("--token-counts", args.token_counts),
    )
    parts += [flag for flag, on in switches if on]
    return shlex.join(parts)
