"""`longturn VERB ...`: finds the verb, and turns errors into one line and an exit code.

A verb's module is imported only when it is asked for, and imports what it needs when it runs, so that `--help` of any
verb starts fast. What every run of a verb needs is imported just before it (see `interrupts`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

from longturn.cli import interrupts
from longturn.errors import ConfigError, LongturnError

INTERRUPTED = interrupts.INTERRUPTED

VERBS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a model in the terminal",
    "demo": "replay an agent session with the prefix cache on and off, and write a page",
    "report": "put points of many runs on one page: frontiers, ratios, latencies",
    "explain": "how much of the ratio between two configurations each setting accounts for",
    "bench": "measure a server, or a model's quality: `longturn bench` lists how",
    "simulate": "agent sessions on hardware you don't have: the real scheduler in virtual time",
    "trace": "show what is in recorded agent traces: turns, tokens, hit rate, agents",
    "inspect": "show what a checkpoint is: family, size, formats, cache bytes per token",
    "convert": "rewrite a MiniMax-M3 checkpoint in BF16, MXFP8 or NVFP4",
    "make-checkpoint": "write a random checkpoint in the shape of a real model",
    "tune": "measure kernel plans on this GPU and keep the better ones for later starts",
    "doctor": "check this machine: Python, PyTorch, compiler, model, device, cache directory",
    "version": "print the version",
}

BENCH_VERBS = {
    "replay": "replay recorded agent sessions against a server",
    "agentx": "throughput against interactivity: session trees in a closed loop, by AgentX rules",
    "quality": "compare the answers of two configurations of a model",
    "self-test": "measure the load client itself, against a server without a model",
    "step": "step times of the GPU executor, on random weights",
}

SIMULATE_VERBS = {
    "validate": "predicted beside published points, with the error of each",
    "fit": "derive a calibration from kernel tables, or from steps measured here",
    "what-if": "what a faster kernel does under queueing, beside Amdahl's estimate",
}
"""`simulate` alone is a verb too."""

_REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""What an operating system says of files that a user has named, where a verb has no words of its own for it."""

# Verbs whose module has another name than the verb.
_MODULES = {"inspect": "inspect_model", "make-checkpoint": "make_checkpoint", "self-test": "self_test"}

LOADS: dict[str, tuple[str, ...]] = {
    "serve": ("longturn.server.run", "longturn.assemble"),
    "chat": ("longturn.bench.client", "longturn.cli.local_server"),
    "demo": ("longturn.bench.replay", "longturn.cli.results", "longturn.cli.local_server", "longturn.cli.agentx_sweep"),
    "report": ("longturn.cli.comparison", "longturn.report.store", "longturn.report.sweep"),
    "explain": ("longturn.cli.explain_run", "longturn.cli.explain_text", "longturn.report.explanation_page"),
    "replay": ("longturn.bench.replay", "longturn.bench.client", "longturn.cli.results"),
    "agentx": ("longturn.cli.agentx_sweep", "longturn.report.sweep"),
    "quality": ("longturn.cli.quality_run", "longturn.cli.quality_result"),
    "self-test": ("longturn.bench.self_test",),
    "step": ("torch", "longturn.cli.steps.run", "longturn.cli.steps.harness"),
    "simulate": ("longturn.cli.simulate_run", "longturn.cli.simulate_fleet", "longturn.report.sweep"),
    "simulate_validate": ("longturn.simulate.published", "longturn.simulate.own_sessions"),
    "simulate_fit": ("longturn.simulate.fit.run",),
    "simulate_what_if": ("longturn.cli.simulate_run", "longturn.simulate.what_if"),
    "trace": ("longturn.bench.traces.stat",),
    "inspect": ("longturn.models.inspect",),
    "convert": ("longturn.models.convert",),
    "make-checkpoint": ("longturn.models.make_checkpoint",),
    "tune": ("torch", "longturn.cli.steps.tuning"),
    "doctor": ("torch", "longturn.assemble"),
}
"""What takes long to import of what a verb needs."""


class Verb(Protocol):
    """What a verb's module holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Returns the exit code. Raises LongturnError for what a user can mend."""
        ...


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors: one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def verb_parser(name: str, prog: str, module: Verb, description: str) -> Parser:
    """The parser of one verb, with the flags that every verb has."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    module.add_arguments(parser)
    if len(parser._actions) > 25:  # argparse would print half a screen of flags before the first explanation
        parser.usage = f"{prog} [DIR] [OPTION ...]" if _has_positional(parser) else f"{prog} [OPTION ...]"
    common = parser.add_argument_group("every verb")
    common.add_argument("--json", action="store_true", help="print JSON on standard output")
    common.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    return parser


def _has_positional(parser: argparse.ArgumentParser) -> bool:
    return any(not action.option_strings for action in parser._actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; `sys.argv` if None, and then this process is the command line's:
            Ctrl-C may end it.

    Returns:
        The exit code.
    """
    if argv is None:
        interrupts.leave_at_once()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Both flags also count where parsing itself fails.
    as_json = "--json" in arguments
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure is one line, and not at exit
        return code
    except LongturnError as error:
        if "--debug" in arguments:
            raise
        print(f"longturn: error: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python would complain again when it flushes at exit.
        sys.stdout = None
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if "--debug" in arguments or not (full or (error.errno in _REFUSALS and error.filename is not None)):
            raise
        if error.filename is None:
            sys.stdout = None  # a write has no file's name: it was standard output, which Python would flush again
        print(f"longturn: error: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_code
    except Exception as error:
        # A module that is imported late, while the verb runs.
        if "--debug" in arguments or not interrupts.was_interrupted(error):
            raise
        return _interrupted()


def _interrupted() -> int:
    print("longturn: interrupted", file=sys.stderr)
    return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    for argument in arguments:
        # Python takes bytes that are no UTF-8 as lone surrogates, which no request, result file or terminal can hold.
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"the argument {argument!r} is not UTF-8")
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        name = "version"
    if name not in VERBS:
        raise ConfigError(f"unknown verb '{name}' (known: {', '.join(VERBS)})")
    prog = f"longturn {name}"
    if name == "bench":
        if not rest or rest[0] in ("-h", "--help"):
            lines = [f"  {verb:<11}{text}" for verb, text in BENCH_VERBS.items()]
            lines += ["", "`longturn bench VERB --help` shows a verb's options."]
            print("\n".join(["usage: longturn bench VERB [OPTION ...]", "", "verbs:", *lines]))
            return 0 if rest else 2
        if rest[0] not in BENCH_VERBS:
            raise ConfigError(f"unknown verb 'bench {rest[0]}' (known: bench {', bench '.join(BENCH_VERBS)})")
        name, prog, rest = rest[0], f"longturn bench {rest[0]}", rest[1:]
    if name == "simulate" and rest and not rest[0].startswith("-"):
        if rest[0] not in SIMULATE_VERBS:
            known = ", simulate ".join(SIMULATE_VERBS)
            raise ConfigError(f"unknown verb 'simulate {rest[0]}' (known: simulate alone, simulate {known})")
        name, prog, rest = f"simulate_{rest[0].replace('-', '_')}", f"longturn simulate {rest[0]}", rest[1:]
    module = cast(Verb, import_module(f"longturn.cli.{_MODULES.get(name, name)}"))
    parser = verb_parser(name, prog, module, (module.__doc__ or "").strip())
    args = parser.parse_args(rest)
    if interrupts.leaves_at_once():
        for needed in LOADS.get(name, ()):
            with contextlib.suppress(ImportError):  # what is missing the verb says itself, if it matters
                import_module(needed)
        interrupts.leave_in_order()
    return module.run(args)


def _overview() -> str:
    lines = ["usage: longturn VERB [OPTION ...]", "", "Serves large language models to agents.", "", "verbs:"]
    lines += [f"  {name:<17}{text}" for name, text in VERBS.items()]
    lines += ["", "`longturn VERB --help` shows a verb's options."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
