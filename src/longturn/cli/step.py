"""Measure the times of single steps on a GPU, through scheduler and executor, with random weights: no model is needed.

A point is one kind of step at one size: `decode:4x131072` is a decode step of 4 requests with 131,072 cached tokens
each. `--list` prints all points. Each is shown beside the least time that its bytes need and what vLLM 0.25.1 took.
From a source tree it runs with torch and Triton alone: `python -m longturn.cli.main bench step`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.cli.steps.output import check_output
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.cli.steps.points import Point
    from longturn.cli.steps.run import Measured

_STEP_TOKENS = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "points",
        nargs="*",
        metavar="POINT",
        help="only points whose names start so, such as decode or decode:1x4096 [all but start]",
    )
    parser.add_argument(
        "--preset",
        default="mini60",
        metavar="NAME",
        help="model: mini60 (60 thin layers) or slice8 (8 layers of full width), all in bf16; with -nvfp4: NVFP4 "
        "experts, MXFP8 elsewhere, keys and values in NVFP4, index key in fp8; slice8-nvfp4-bf16kv and slice8-fp8kv "
        "are between [mini60]",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timings of each point, median printed [3]")
    parser.add_argument(
        "--step-tokens", type=int, default=_STEP_TOKENS, metavar="N", help=f"token budget of one step [{_STEP_TOKENS}]"
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="let tokens choose among N experts of each layer: other random weights may route to fewer [all]",
    )
    parser.add_argument(
        "--no-graphs", action="store_true", help="launch kernels one by one instead of replaying CUDA graphs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON to a file as well")
    parser.add_argument("--list", action="store_true", help="print the points and what vLLM took; measure nothing")


def run(args: argparse.Namespace) -> int:
    check_number("--repeats", args.repeats, 1)
    check_number("--step-tokens", args.step_tokens, 1)

    from longturn.cli.steps.points import PRESETS, choose

    if args.preset not in PRESETS:
        raise ConfigError(f"unknown preset '{args.preset}' (known: {', '.join(PRESETS)})")
    if args.experts is not None:
        _check_experts(args.preset, args.experts)
    points = choose(args.preset, args.points)
    if args.list:
        _list(points, as_json=args.json)
        return 0
    from longturn.executor.gpu.device import why_no_device

    if (reason := why_no_device()) is not None:
        raise ConfigError(f"bench step measures a GPU, and there is none to use: {reason}")
    if args.out is not None:
        check_output(args.out, "--out: cannot write")
    import torch

    from longturn.cli.steps.memory import too_little_memory

    # With --json, standard output is one object and the table goes to standard error as it grows.
    table = sys.stderr if args.json else sys.stdout
    try:
        rows = _measure(args, points, lambda line: print(line, file=table, flush=True))
    except torch.OutOfMemoryError as error:
        free, device = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), torch.cuda.get_device_name()
        raise ConfigError(
            too_little_memory(args.preset, points, args.step_tokens, free_bytes=free, device=device)
        ) from error
    result = {"command": sys.argv, "points": rows}
    if args.json:
        print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))
    return 0


def _check_experts(preset: str, count: int) -> None:
    """Raises ConfigError."""
    from longturn.cli.steps.points import PRESETS
    from longturn.models.make_checkpoint import PRESETS as SHAPES
    from longturn.models.make_checkpoint import preset_config

    text = preset_config(SHAPES[PRESETS[preset].shape])["text_config"]
    least, most = text["num_experts_per_tok"], text["num_local_experts"]
    if not least <= count <= most:
        raise ConfigError(f"--experts must be {least} to {most}, those that {preset} has, not {count}")


def _list(points: tuple[Point, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"point": p.name, "unit": p.unit, "vllm_0_25_1": p.peer} for p in points]))
        return
    for p in points:
        peer = "-" if p.peer is None else f"{p.peer:g} {p.unit}"
        print(f"{p.name:<24} vLLM 0.25.1: {peer}")


def _measure(
    args: argparse.Namespace, points: tuple[Point, ...], show: Callable[[str], None]
) -> list[dict[str, object]]:
    from longturn.cli.steps.harness import Stand
    from longturn.cli.steps.run import measure, measure_start, prepare, size_of

    rows = []
    for point in points:
        if point.kind == "start":
            measured, parts = measure_start(args.preset, point, args.step_tokens)
            show(f"{_line(measured)} {parts}")
            rows.append(measured.row() | {"parts_s": parts})
    points = tuple(point for point in points if point.kind != "start")
    if points:
        size = size_of(points, args.step_tokens)
        stand = Stand(args.preset, **size, graphs=not args.no_graphs, experts=args.experts)
        seconds = prepare(stand, points)
        show(
            f"{args.preset}: {stand.executor.info.pages} pages, {stand.cached_tokens_per_gb():,.0f} cached tokens a GB "
            f"({stand.cache_ratio():.2f} x bf16's); graphs captured in {seconds:.1f} s"
        )
        show(_HEADER)
        for point in points:
            measured = measure(stand, point, args.repeats)
            rows.append(measured.row())
            show(_line(measured))
        stand.close()
    return rows


_HEADER = (
    f"{'point':<24} {'value':>10} {'unit':<6} {'floor':>7} {'x floor':>8} {'vLLM':>9} {'faster':>7} "
    f"{'device ms':>10} {'host us':>8}"
)


def _line(m: Measured) -> str:
    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    digits = 0 if m.point.kind == "prefill" else 2
    of_floor = None if m.floor is None else m.value / m.floor
    return (
        f"{m.point.name:<24} {number(m.value, digits):>10} {m.point.unit:<6} {number(m.floor):>7} "
        f"{number(of_floor):>8} {number(m.point.peer, digits):>9} {number(m.speed_up):>7} "
        f"{number(m.device_ms):>10} {number(m.host_us, 0):>8}"
    )
