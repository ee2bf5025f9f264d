"""Write a checkpoint with random weights in the shape of a real model, for tests and benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json

from longturn.cli.convert import add_scheme_flags
from longturn.cli.tensor_progress import TensorProgress
from longturn.cli.terminal import size_text
from longturn.prepared import without_tilde

FAMILIES = ("minimax_m3",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory to write; it must not exist")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help="model family [minimax_m3]")
    parser.add_argument(
        "--preset",
        default="tiny",
        metavar="NAME",
        help="shape: tiny (2.5 MB), mini60, slice8 or m3.1-flash [tiny]",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="only so many first layers")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights [0]")
    add_scheme_flags(parser, experts=None, dense=None)


def run(args: argparse.Namespace) -> int:
    from longturn.models.checkpoint.scheme import Scheme
    from longturn.models.make_checkpoint import PRESETS, make_checkpoint

    own = PRESETS[args.preset].scheme if args.preset in PRESETS else Scheme()
    made = make_checkpoint(
        without_tilde(args.directory),
        args.preset,
        seed=args.seed,
        layers=args.layers,
        scheme=Scheme(args.experts or own.experts, args.dense or own.dense, args.flavour),
        progress=TensorProgress("making"),
    )
    if args.json:
        print(json.dumps({**dataclasses.asdict(made), "path": str(made.path)}))
    else:
        print(f"{made.path}: {made.parameters / 1e6:,.1f} million parameters, {size_text(made.bytes)}")
    return 0
