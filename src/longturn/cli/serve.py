"""Serve a model over HTTP, with the OpenAI API."""

from __future__ import annotations

import argparse
import dataclasses
import json

from longturn.cli.options import add_config_flags, config_from_args


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

    serve(config, on_ready=_print_ready if args.json else None)
    return 0


def _print_ready(url: str) -> None:
    print(json.dumps({"ready": url}), flush=True)
