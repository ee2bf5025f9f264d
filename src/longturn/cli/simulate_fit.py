"""Derive a calibration: of the platforms that ship from kernel tables, or of this machine from steps measured here."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longturn.cli.options import add_file_and_sets, check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.simulate.linear import StepsPlatform
    from longturn.simulate.linear_fit import TimedRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tables = parser.add_argument_group("from kernel tables")
    tables.add_argument("--tables", metavar="DIR", help="folder of measured kernel tables (*.parquet)")
    tables.add_argument("--platform", metavar="A,B", help="these platforms only [all with a recipe]")
    tables.add_argument("--write", action="store_true", help="write the constants into the platform files that ship")
    bench = parser.add_argument_group("from a measured `longturn bench step`, of M3's family on a GPU")
    bench.add_argument("--bench", nargs="+", metavar="FILE", help="what `longturn bench step --out FILE` wrote")
    bench.add_argument("--save", metavar="FILE", help="the platform file to write; --platform says what lends the rest")
    here = parser.add_argument_group("from this machine")
    here.add_argument("--measure", metavar="FILE", help="measure steps of the engine here, and write a platform file")
    here.add_argument("--model", metavar="DIR", help="model directory or GGUF file [the embedded model]")
    add_file_and_sets(here)
    here.add_argument("--repeats", type=int, default=5, metavar="N", help="timings of each step [5]")
    here.add_argument(
        "--points",
        nargs="+",
        default=[],
        metavar="FILE",
        help="points of `bench agentx --concurrency 1`: what requests wait beside their steps, and what runs add",
    )


def run(args: argparse.Namespace) -> int:
    check_number("--repeats", args.repeats, 1)
    if [args.tables, args.bench, args.measure].count(None) != 2:
        raise ConfigError(
            "give one of --tables DIR for platforms that ship, --bench FILE for measured steps, and --measure FILE for "
            "this machine"
        )
    if args.bench is not None:
        return _fit_bench(args)
    return _fit_tables(args) if args.tables is not None else _fit_here(args)


def _fit_tables(args: argparse.Namespace) -> int:
    import json

    from longturn.simulate.fit.run import RECIPES, fit_platforms, write_platforms

    names = tuple(args.platform.split(",")) if args.platform else tuple(RECIPES)
    lines: list[str] = []
    families = fit_platforms(Path(args.tables), lines.append if args.json else print, names=names)
    if args.write:
        write_platforms(families)
    if args.json:
        print(json.dumps({"residuals": lines, "written": args.write}))
    elif not args.write:
        print("nothing was written: --write puts these constants into the platform files")
    return 0


def _fit_bench(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from longturn.report.schema import write_whole
    from longturn.simulate.fit.bench import bench_steps, fitted_platform

    if args.save is None or args.platform is None:
        raise ConfigError("--bench needs --platform NAME, of the card, and --save FILE")
    steps = bench_steps([Path(name) for name in args.bench])
    fitted = fitted_platform(args.platform, steps, datetime.now(UTC).strftime("%Y-%m-%d"))
    write_whole(Path(args.save), fitted.text.encode())
    decode, chunks = fitted.decode, fitted.chunks
    if args.json:
        with_chunks = None if chunks is None else dataclasses.asdict(chunks)
        print(json.dumps({"platform": args.save, **dataclasses.asdict(decode), "chunks": with_chunks}))
    else:
        print(f"{decode.points} decode steps: {decode.rms:.1%} rms, {decode.worst:.0%} worst")
        if chunks is None:
            print(f"{len(steps.chunks)} turns, mixed steps and prompts are too few: constants of chunks are borrowed")
        else:
            print(f"{chunks.points} turns, mixed steps and prompts: {chunks.rms:.1%} rms, {chunks.worst:.0%} worst")
        print(f"platform: {args.save}")
    return 0


def _fit_here(args: argparse.Namespace) -> int:
    import dataclasses
    import json
    import sys

    from longturn.cli.machine import cpu_name
    from longturn.cli.options import config_from_args
    from longturn.cli.simulate_measure import measure_engine
    from longturn.cli.simulate_setup import settings_of
    from longturn.report.schema import write_whole
    from longturn.simulate.linear import ServedModel, StepsPlatform, steps_platform_text
    from longturn.simulate.linear_fit import fit_request_ns, fit_run, fit_steps
    from longturn.source import resolve_source

    config = config_from_args(argparse.Namespace(config=args.config, model_dir=args.model, sets=args.sets))
    requests = _requests([Path(name) for name in args.points])
    measured = measure_engine(config, lambda line: print(line, file=sys.stderr), repeats=args.repeats)
    info = measured.info
    constants = fit_steps(measured.steps, measured.host_ns)
    if requests:
        waited = fit_request_ns(constants, requests, config.scheduler.step_tokens)
        run = fit_run(constants, requests)
        constants = dataclasses.replace(constants, request_ns=float(f"{waited:.6g}"), run=float(f"{run:.3g}"))
    served = settings_of([text for text in args.sets if text.startswith(("scheduler.", "cache."))])
    settings = {name: value for name, value in served.items() if name not in ("cache.memory_bytes", "cache.dtype")}
    platform: StepsPlatform = StepsPlatform(
        name=Path(args.measure).stem,
        title=f"{cpu_name()}, {info.device}",
        chip=cpu_name(),
        source=f"longturn simulate fit --measure, {len(measured.steps)} steps, {args.repeats} timings each",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        model=ServedModel(
            name=resolve_source(config.model).name,
            quantisation=info.quantisation,
            kv_cache=info.kv_cache,
            pages=info.pages,
            page_bytes=info.page_bytes,
            rows=info.rows,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
        ),
        constants=constants,
        settings=settings,
    )
    write_whole(Path(args.measure), steps_platform_text(platform).encode())
    told: dict[str, Any] = dataclasses.asdict(constants)
    if args.json:
        print(json.dumps({"platform": args.measure, **told}))
    else:
        print(f"{len(measured.steps)} steps: {constants.rms:.1%} rms, {constants.worst:.0%} worst")
        if requests:
            print(f"{len(requests)} requests of runs: tokens {constants.run:.1%} off such steps, which joins the band")
        print(f"platform: {args.measure}")
    return 0


def _requests(paths: list[Path]) -> list[TimedRequest]:
    """Requests of measured points' timelines."""
    from longturn.report.point import load_point
    from longturn.simulate.linear_fit import TimedRequest

    found = []
    for path in paths:
        point = load_point(path)
        if point.source != "measured" or point.concurrency != 1 or point.timeline is None:
            raise ConfigError(f"{path}: --points takes measured points of concurrency 1 with a timeline")
        found += [
            TimedRequest(
                one.cached_tokens or 0,
                one.prompt_tokens,
                (one.first_ms - one.start_ms) * 1e6,
                one.output_tokens or 0,
                (one.end_ms - one.first_ms) * 1e6,
            )
            for one in point.timeline.requests
            if one.first_ms is not None and one.prompt_tokens is not None
        ]
    return found
