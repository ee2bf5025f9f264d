"""Rewrite a MiniMax-M3 checkpoint in another format: BF16, MXFP8 or NVFP4."""

from __future__ import annotations

import argparse
import dataclasses
import json

from longturn.cli.tensor_progress import TensorProgress
from longturn.cli.terminal import size_text
from longturn.prepared import without_tilde


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="model directory to read")
    parser.add_argument("target", metavar="DST", help="directory to write; it must not exist")
    add_scheme_flags(parser, experts="nvfp4", dense="mxfp8")


def add_scheme_flags(parser: argparse.ArgumentParser, *, experts: str | None, dense: str | None) -> None:
    """Flags that say what weights become."""

    def shown(default: str | None) -> str:
        return f"[{default or 'as the preset'}]"

    parser.add_argument(
        "--experts", choices=("nvfp4", "mxfp8", "bf16"), default=experts, help=f"routed experts {shown(experts)}"
    )
    parser.add_argument(
        "--dense",
        choices=("mxfp8", "bf16"),
        default=dense,
        help=f"attention, index, shared-expert and dense feed-forward weights {shown(dense)}",
    )
    parser.add_argument(
        "--flavour",
        choices=("compressed-tensors", "modelopt"),
        default="compressed-tensors",
        help="whose tensor names and declarations; M3.1-Flash has the former [compressed-tensors]",
    )


def run(args: argparse.Namespace) -> int:
    from longturn.models.checkpoint.scheme import Scheme
    from longturn.models.convert import convert

    scheme = Scheme(args.experts, args.dense, args.flavour)
    done = convert(
        without_tilde(args.source),
        without_tilde(args.target),
        scheme,
        progress=TensorProgress("converting"),
    )
    if args.json:
        print(json.dumps({**dataclasses.asdict(done), "path": str(done.path)}))
    else:
        print(
            f"{done.path}: {done.tensors} tensors, {done.quantised} quantised, "
            f"{size_text(done.bytes_before)} before, {size_text(done.bytes_after)} now"
        )
    return 0
