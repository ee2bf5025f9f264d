"""Measure kernel plans on this GPU and keep those that beat the kernels' own choice, in a table that later starts read.

Random weights of the model's widths and formats are enough; a few layers of it are built. Without --model one of the
presets of `longturn bench step` is taken. It takes about a minute. Runs from a source tree with torch and Triton alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.cli.steps.output import check_output
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.cli.steps.tuning import Tried, Tuner
    from longturn.kernels.plan_table import PlanTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="mini60", metavar="NAME", help="model, as in `bench step` [mini60]")
    parser.add_argument("--model", metavar="DIR", help="checkpoint whose widths and formats to tune for instead")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 4, 16, 32], metavar="N", help="rows of decode steps [1 4 16 32]"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[512, 2048], metavar="N", help="tokens of longer steps [512 2048]"
    )
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="cached tokens of each row [8192]")
    parser.add_argument("--layers", type=int, metavar="N", help="layers to build [8, or as many as fit]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table [this device's, in the cache directory]")
    parser.add_argument("--cache-dir", metavar="DIR", help="cache directory [the user's]")


def run(args: argparse.Namespace) -> int:
    for name in ("rows", "tokens"):
        for value in getattr(args, name):
            check_number(f"--{name}", value, 1)
    check_number("--context", args.context, 1)
    if args.layers is not None:
        check_number("--layers", args.layers, 1)
    from longturn.cli.steps.points import PRESETS

    if args.model is None and args.preset not in PRESETS:
        raise ConfigError(f"unknown preset '{args.preset}' (known: {', '.join(PRESETS)})")
    from longturn.executor.gpu.device import why_no_device

    if (reason := why_no_device()) is not None:
        raise ConfigError(f"tune measures a GPU, and there is none to use: {reason}")
    import torch

    from longturn.kernels.plan_table import load_table, store_table, table_path
    from longturn.models.minimax_m3_gpu_plans import PLANS
    from longturn.prepared import cache_directory

    device = torch.cuda.get_device_name()
    path = args.out or table_path(cache_directory(args.cache_dir), device)
    check_output(path, "cannot write plans to")
    show = sys.stderr if args.json else sys.stdout
    tried: list[Tried] = []
    try:
        tuner = _tuner(args)
        table = load_table(path, device, PLANS)
        for sizes, many in ((args.rows, False), (args.tokens, True)):
            table = _tune(tuner, table, sizes, many, tried, lambda line: print(line, file=show, flush=True))
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        raise ConfigError(
            f"too little GPU memory to tune with: {free / 1e9:.1f} GB of {device} were free; fewer --layers, a shorter "
            "--context or smaller --rows and --tokens take less"
        ) from error
    store_table(path, table)
    kept = sum(one.kept for one in tried)
    print(f"{kept} of {len(tried)} plans were better; the table of {device} is {path}", file=show)
    if args.json:
        print(json.dumps({"table": table.as_dict(), "file": str(path), "tried": [asdict(one) for one in tried]}))
    return 0


def _tuner(args: argparse.Namespace) -> Tuner:
    import torch

    from longturn.cli.steps.points import PRESETS
    from longturn.cli.steps.tuning import Tuner
    from longturn.kernels.packed_weights import WeightFormat
    from longturn.models.make_checkpoint import PRESETS as SHAPES
    from longturn.models.make_checkpoint import preset_config
    from longturn.models.minimax_m3_config import minimax_m3_config
    from longturn.models.minimax_m3_gpu_limits import expert_values
    from longturn.models.registry import CACHE_TYPES

    others, cache = WeightFormat.PLAIN, "bf16"
    if args.model is not None:
        from longturn.config import ModelConfig
        from longturn.executor.gpu.build import expert_format, why_not_served
        from longturn.source import resolve_source

        model = ModelConfig(path=args.model)
        source = resolve_source(model)
        if (reason := why_not_served(source)) is not None:
            raise ConfigError(f"{source.path}: {reason}")
        config, experts = minimax_m3_config(source.config), expert_format(model)
    else:
        from longturn.cli.steps.harness import WEIGHTS

        preset = PRESETS[args.preset]
        config = minimax_m3_config(preset_config(SHAPES[preset.shape])["text_config"])
        experts, others = WEIGHTS[preset.weights]
        cache = preset.cache
    kv_dtype = CACHE_TYPES[cache]
    assert kv_dtype is not None, "presets name a type"
    fit = int(0.4 * torch.cuda.get_device_properties(0).total_memory / (2 * expert_values(config) / int(experts)))
    layers = min(config.layers, args.layers or max(1, min(8, fit)))
    if not any(config.moe_layers[-layers:]):
        raise ConfigError(f"the last {layers} layers have no experts; --layers must reach one that has")
    return Tuner(config, experts=experts, others=others, kv_dtype=kv_dtype, layers=layers, context=args.context)


def _tune(
    tuner: Tuner, table: PlanTable, sizes: list[int], many: bool, tried: list[Tried], show: Callable[[str], None]
) -> PlanTable:
    from longturn.kernels.plan_table import PlanTable

    for found in tuner.tune(table, sizes, many=many):
        if isinstance(found, PlanTable):
            return found
        tried.append(found)
        entry, fields = found.entry, ", ".join(f"{k} {v}" for k, v in found.entry.fields.items())
        ms = "does not run" if found.step_ms is None else f"{found.step_ms:.3f} ms"
        unit = "tokens" if many else "rows"
        mark = "  kept" if found.kept else ""
        show(f"{entry.rows:>5} {unit:<6} {entry.kernel:<10} {fields:<28} {ms:>12}, before {found.base_ms:.3f} ms{mark}")
    return table
