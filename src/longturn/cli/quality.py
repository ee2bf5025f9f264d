"""Compare two configurations of a model in this process: perplexity, next-token distributions, greedy answers.

Without options: packed weights against exact fp32 ones of the embedded model. Settings are those of `longturn serve`,
by their full name (model.weights=packed) or the last part of it (weights=packed).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number, config_from_options
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.bench.texts import NamedText
    from longturn.config import EngineConfig
    from longturn.report.quality import QualityResult

REFERENCE, CANDIDATE = "weights=fp32", "weights=packed"
DEFAULT_POSITIONS, DEFAULT_WINDOW, DEFAULT_ANSWER = 2000, 1024, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model directory or GGUF file; the embedded model if left out")
    parser.add_argument(
        "--a", action="append", metavar="A=X[,B=Y]", help=f"settings of the reference; may be repeated [{REFERENCE}]"
    )
    parser.add_argument(
        "--b", action="append", metavar="A=X[,B=Y]", help=f"settings of the candidate; may be repeated [{CANDIDATE}]"
    )
    parser.add_argument("--text", nargs="+", metavar="FILE", help="texts to predict, instead of the shipped ones")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts to answer, instead of the shipped ones: a JSON list of {name, text}, or one a line",
    )
    parser.add_argument(
        "--positions",
        type=int,
        default=DEFAULT_POSITIONS,
        metavar="N",
        help=f"most positions of all texts together [{DEFAULT_POSITIONS}]",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=DEFAULT_WINDOW,
        metavar="N",
        help=f"longest sequence that a text is cut into, tokens [{DEFAULT_WINDOW}, or the context if that is less]",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        default=DEFAULT_ANSWER,
        metavar="N",
        help=f"longest greedy answer; 0 leaves the prompts out [{DEFAULT_ANSWER}]",
    )
    parser.add_argument("--out", metavar="FILE", help="write the result here, as JSON")
    parser.add_argument("--from", dest="saved", metavar="FILE", help="take an earlier result instead of measuring")
    parser.add_argument(
        "--attach",
        nargs="+",
        metavar="POINT",
        help="write the figures into these point files, or the points of these folders, of the same configuration",
    )


def run(args: argparse.Namespace) -> int:
    check_number("--positions", args.positions, 1)
    check_number("--window", args.window, 2)
    check_number("--answer-tokens", args.answer_tokens, 0)
    if args.saved and (given := [flag for flag in ("model", "a", "b", "text", "prompts") if getattr(args, flag)]):
        raise ConfigError(f"--{given[0]} is for a measurement, and --from takes an earlier one")

    from longturn.cli.main import INTERRUPTED
    from longturn.cli.quality_result import attach, point_files, quality_text
    from longturn.report.quality import load_quality, quality_to_json, save_quality
    from longturn.report.schema import check_writable

    if args.out:
        check_writable(Path(args.out).parent)
    point_files(args.attach or [])  # complains about a wrong name before minutes of measuring
    result = load_quality(Path(args.saved)) if args.saved else _measure(args)
    if args.json:
        sys.stdout.write(quality_to_json(result).decode())
    else:
        print(quality_text(result))
    sys.stdout.flush()
    if args.out:
        save_quality(result, Path(args.out))
        if not args.json:
            print(f"\nresult: {args.out}")
    if result.partial and not args.saved:
        print("longturn: interrupted, the result is partial", file=sys.stderr)
        return INTERRUPTED
    if args.attach:
        written = attach(result, args.attach)
        if not args.json:
            print(f"attached to {written} point{'s' if written != 1 else ''}")
    return 0


def _measure(args: argparse.Namespace) -> QualityResult:
    reference = side_config(args.model, args.a or [REFERENCE], "--a")
    candidate = side_config(args.model, args.b or [CANDIDATE], "--b")
    texts, prompts = _texts(args)

    from longturn.bench.texts import SHIPPED
    from longturn.cli.quality_result import make_quality, make_side
    from longturn.cli.quality_run import Pair, Plan
    from longturn.cli.terminal import Progress

    progress = Progress("quality")
    progress.waiting("loading")
    pair = None
    try:
        pair = Pair(reference, candidate)
        # The default window is a wish; one that was asked for is an order, which `measure` checks.
        window = min(args.window, pair.context_tokens) if args.window == DEFAULT_WINDOW else args.window
        plan = Plan(texts, prompts, args.positions, window, args.answer_tokens)
        sides = [make_side(reference, pair.reference), make_side(candidate, pair.candidate)]
        outcome = pair.measure(plan, progress)
    finally:
        progress.close()
        if pair is not None:
            pair.close()
    names = SHIPPED if not args.text else ", ".join(text.name for text in texts)
    return make_quality(command_of(args), sides[0], sides[1], names, plan, outcome)


def _texts(args: argparse.Namespace) -> tuple[tuple[NamedText, ...], tuple[NamedText, ...]]:
    from longturn.bench.texts import read_prompts, read_texts, shipped_prompts, shipped_texts

    texts = read_texts([Path(name) for name in args.text]) if args.text else shipped_texts()
    if not args.answer_tokens:
        return texts, ()
    return texts, read_prompts(Path(args.prompts)) if args.prompts else shipped_prompts()


def side_config(model: str | None, assignments: list[str], flag: str) -> EngineConfig:
    """The configuration of one side.

    Args:
        model: what --model says.
        assignments: `NAME=VALUE`, several with commas between; names as in `longturn serve --set`, or their last part.
        flag: for complaints.

    Raises:
        ConfigError: an unknown or ambiguous name, or a value that the setting does not take.
    """
    options = [part.strip() for text in assignments for part in text.split(",")]
    return config_from_options(options, flag, model_dir=model)


def command_of(args: argparse.Namespace) -> str:
    """The command that repeats the measurement. Files are named without their folders, which are this machine's."""
    parts = ["longturn", "bench", "quality"]
    if args.model:
        parts += ["--model", Path(args.model).name]
    for flag, given, default in (("--a", args.a, REFERENCE), ("--b", args.b, CANDIDATE)):
        parts += [part for text in given or [default] for part in (flag, _without_folders(text))]
    if args.text:
        parts += ["--text", *(Path(name).name for name in args.text)]
    if args.prompts:
        parts += ["--prompts", Path(args.prompts).name]
    for flag, value, least in (
        ("--positions", args.positions, DEFAULT_POSITIONS),
        ("--window", args.window, DEFAULT_WINDOW),
        ("--answer-tokens", args.answer_tokens, DEFAULT_ANSWER),
    ):
        if value != least:
            parts += [flag, str(value)]
    return shlex.join(parts)


def _without_folders(assignments: str) -> str:
    """Settings whose values are paths keep the last part of them."""
    parts = []
    for item in assignments.split(","):
        name, equals, value = item.partition("=")
        local = name.strip().rpartition(".")[2] in ("path", "cache_dir")
        parts.append(f"{name}{equals}{Path(value).name if local else value}")
    return ",".join(parts)
