"""Rewrite a MiniMax-M3 checkpoint in another format: BF16, MXFP8 or NVFP4."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from longturn.cli.tensor_progress import TensorProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="model directory to read")
    parser.add_argument("target", metavar="DST", help="directory to write; it must not exist")
    add_scheme_flags(parser, experts="nvfp4", dense="mxfp8")


def add_scheme_flags(parser: argparse.ArgumentParser, *, experts: str | None, dense: str | None) -> None:
    """Flags that say what weights become."""

    def shown(default: str | None) -> str:
        return f"default {default}" if default else "the preset's own by default"

    parser.add_argument(
        "--experts", choices=("nvfp4", "mxfp8", "bf16"), default=experts, help=f"routed experts ({shown(experts)})"
    )
    parser.add_argument(
        "--dense",
        choices=("mxfp8", "bf16"),
        default=dense,
        help=f"attention, index, shared-expert and dense feed-forward weights ({shown(dense)})",
    )
    parser.add_argument(
        "--flavour",
        choices=("compressed-tensors", "modelopt"),
        default="compressed-tensors",
        help="whose tensor names and declarations (default compressed-tensors, as M3.1-Flash)",
    )


def run(args: argparse.Namespace) -> int:
    from longturn.models.checkpoint.scheme import Scheme
    from longturn.models.convert import convert

    scheme = Scheme(args.experts, args.dense, args.flavour)
    done = convert(
        Path(args.source).expanduser(),
        Path(args.target).expanduser(),
        scheme,
        progress=TensorProgress("converting"),
    )
    if args.json:
        print(json.dumps({**dataclasses.asdict(done), "path": str(done.path)}))
    else:
        print(
            f"{done.path}: {done.tensors} tensors, {done.quantised} quantised, "
            f"{done.bytes_before / 1e9:.3f} GB before, {done.bytes_after / 1e9:.3f} GB now"
        )
    return 0
