"""Measure the load client itself, against a server without a model: what it would blame on a server under test.

Prints its share of a processor, how late it sends (lag), and by how much it errs in TTFT and ITL. The exit code is 1
where the client would be the bottleneck of a measurement with as many streams on this machine.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.bench.metrics import Distribution
    from longturn.bench.self_test import SelfTest


MOST_STREAMS = 4096
"""As many as `bench agentx` takes trees."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="answers streamed at once [64]")
    parser.add_argument(
        "--rate", type=float, default=100.0, metavar="TOK/S", help="tokens per second of each stream [100]"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=150_000, metavar="N", help="length of a session's first prompt [150000]"
    )
    parser.add_argument("--output-tokens", type=int, default=444, metavar="N", help="length of each answer [444]")
    parser.add_argument(
        "--duration", type=float, default=20.0, metavar="S", help="seconds measured once all streams run [20]"
    )
    parser.add_argument(
        "--api", choices=["chat", "completions"], default="chat", help="chat messages, or prompts as token ids [chat]"
    )


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.streams <= MOST_STREAMS:
        raise ConfigError(f"--streams must be between 1 and {MOST_STREAMS}, not {args.streams}")
    check_number("--output-tokens", args.output_tokens, 2)
    for flag, value in (("--rate", args.rate), ("--duration", args.duration)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be more than 0, not {value}")

    import asyncio
    import dataclasses
    import json

    from longturn.bench.self_test import self_test
    from longturn.bench.self_test_load import LEAST_PROMPT_TOKENS, SelfTestOptions, self_test_rules
    from longturn.cli.main import INTERRUPTED

    check_number("--prompt-tokens", args.prompt_tokens, LEAST_PROMPT_TOKENS)
    options = SelfTestOptions(
        streams=args.streams,
        rate=args.rate,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        duration_s=args.duration,
        api=args.api,
    )
    seconds = self_test_rules(options).duration_s + options.answer_s
    print(f"longturn: self-test with {options.streams} streams, about {seconds:.0f} s", file=sys.stderr, flush=True)
    found = asyncio.run(self_test(options))
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        print(report(found))
    if found.interrupted:
        print("longturn: interrupted, results are partial", file=sys.stderr)
        return INTERRUPTED
    for problem in found.problems:
        print(f"longturn: the client was the bottleneck: {problem}", file=sys.stderr)
    return 1 if found.problems else 0


def report(found: SelfTest) -> str:
    """The figures in a few lines."""
    options = found.options
    rows = [
        ("load", f"{options.streams} streams of {options.rate:g} tok/s, prompts of {options.prompt_tokens:,} tokens"),
        ("received", f"{found.output_tokens_per_s:,.0f} tok/s for {found.duration_s:.1f} s"),
        ("sent", f"{found.requests:,} prompts, {found.prompt_tokens_per_s / 1e6:.1f} M tok/s"),
        ("client CPU", f"{found.cpu_share:.1%} of one core, user and system ({found.cpu_s:.2f} s)"),
        ("waited for CPU", "not told" if found.cpu_wait_s is None else f"{found.cpu_wait_s:.2f} s"),
        ("lag", spread(found.lag_s)),
        ("TTFT error", spread(found.ttft_error_s)),
        ("ITL error", spread(found.itl_error_s)),
        ("server's own lag", spread(found.server_late_s)),
        ("events lost", str(found.lost_events)),
        ("failed", str(found.failed)),
    ]
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def spread(found: Distribution | None) -> str:
    """A distribution of short times."""
    if found is None:
        return "nothing measured"
    names = {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.max}
    return ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in names.items())
