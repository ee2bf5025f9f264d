"""Serve a model over HTTP, with the OpenAI and Anthropic APIs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading

from longturn.cli.options import add_config_flags, config_from_args
from longturn.config import EngineConfig

_PATIENCE_S = 3.0
"""In a terminal a start that takes longer is explained: the first one of a model may take half a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args)
    if args.json:
        shown = dataclasses.asdict(config)
        # Standard output may end up in a log; keys must not.
        shown["server"]["api_keys"] = ["***" for _ in config.server.api_keys]
        print(json.dumps({"config": shown}), flush=True)
    from longturn.server.run import serve

    explanation = threading.Timer(_PATIENCE_S, _explain_wait)
    explanation.daemon = True
    if sys.stderr.isatty():
        explanation.start()

    def ready(url: str) -> None:
        explanation.cancel()
        print(json.dumps({"ready": url}) if args.json else _ready_line(config, url), flush=True)

    try:
        serve(config, on_ready=ready)
    finally:
        explanation.cancel()
    return 0


def _explain_wait() -> None:
    what = "the first start with a model packs its weights and compiles kernels, later ones take seconds"
    print(f"longturn: starting; {what}", file=sys.stderr, flush=True)


def _ready_line(config: EngineConfig, url: str) -> str:
    from longturn.assemble import served_model

    name, _, _ = served_model(config)
    return f"Longturn serves {name} on {url} (Ctrl-C ends)"
