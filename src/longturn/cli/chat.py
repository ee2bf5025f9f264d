"""Talk to a model in the terminal: a running server (--url), or one that is started for the conversation."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longturn.cli.options import add_config_flags, check_number, config_from_args, given

if TYPE_CHECKING:
    from longturn.bench.client import ChatClient
    from longturn.bench.records import Answer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """/reset  forget the conversation
/stats  tokens of the conversation so far
/exit   leave (Ctrl-D does too); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="a running server; one is started if left out")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer [512]")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="X", help="0 takes the most likely token [0.7]"
    )
    parser.add_argument("--top-p", type=float, default=0.95, metavar="X", help="[0.95]")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_number("--max-tokens", args.max_tokens, 1)
    config = config_from_args(args)

    from longturn.cli.local_server import client_key, local_server

    key = client_key(config)
    with ExitStack() as stack:
        if args.url is None:
            from longturn.cli.terminal import Progress

            progress = Progress("chat")
            stack.callback(progress.close)
            progress.waiting("starting the server, which takes longer the first time")
            url = stack.enter_context(local_server(config, on_wait=progress.tick))
            progress.close()
            model = None
        else:
            url, model = args.url, config.model.path
        sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p}
        if given(args, "seed") is not None:
            sampling["seed"] = given(args, "seed")
        return _talk(url, model, key, args.system, sampling, as_json=args.json)


@dataclass(slots=True)
class _Conversation:
    """Messages so far and what they cost."""

    system: str | None
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def reset(self) -> None:
        self.session_id = uuid.uuid4().hex
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.turns = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def count(self, answer: Answer) -> None:
        self.turns += 1
        self.prompt_tokens += answer.prompt_tokens or 0
        self.cached_tokens += answer.cached_tokens or 0
        self.output_tokens += answer.output_tokens or 0

    def figures(self) -> dict[str, int]:
        names = ("turns", "prompt_tokens", "cached_tokens", "output_tokens")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> str:
        share = f" ({100 * self.cached_tokens / self.prompt_tokens:.0f} %)" if self.prompt_tokens else ""
        return (
            f"{self.turns} turn{'' if self.turns == 1 else 's'}: {self.prompt_tokens:,} prompt tokens, "
            f"{self.cached_tokens:,} cached{share}, {self.output_tokens:,} output"
        )


def _talk(
    url: str, model: str | None, key: str | None, system: str | None, sampling: dict[str, Any], *, as_json: bool
) -> int:
    from longturn.bench.client import ChatClient

    conversation = _Conversation(system)
    conversation.reset()
    interactive = sys.stdin.isatty() and not as_json
    failed = False
    with asyncio.Runner() as runner, _history(interactive):
        client = ChatClient(url, api_key=key)
        runner.run(client.__aenter__())
        try:
            name = runner.run(client.choose_model(model))
            if interactive:
                print(f"{name} at {url}. /help lists commands.")
            for line in _lines(interactive):
                if line.startswith("/"):
                    if not _command(line, conversation, as_json):
                        break
                    continue
                body = {**sampling, "model": name}
                failed = not _turn(runner, client, conversation, body, line, as_json) or failed
        finally:
            runner.run(client.__aexit__(None, None, None))
    # A script that pipes its questions in needs to know; a person has seen the message.
    return 1 if failed and not interactive else 0


def _turn(
    runner: asyncio.Runner,
    client: ChatClient,
    conversation: _Conversation,
    body: dict[str, Any],
    line: str,
    as_json: bool,
) -> bool:
    """One question and its answer. Returns whether it succeeded; a failed one leaves no trace in the history."""
    conversation.messages.append({"role": "user", "content": line})
    shown = _Shown(show=not as_json, dim=sys.stdout.isatty())
    body["messages"] = conversation.messages
    try:
        sending = client.send(
            body, session_id=conversation.session_id, on_text=shown.text, on_reasoning=shown.reasoning
        )
        answer = runner.run(sending)
    except KeyboardInterrupt:
        # The dropped connection makes the server abort the request; what was said so far stays.
        shown.end()
        print("\n[stopped]")
        conversation.messages.append({"role": "assistant", "content": "".join(shown.texts)})
        return True
    shown.end()
    if answer.error is not None:
        conversation.messages.pop()
        print(f"longturn: error: {answer.error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": answer.error}), flush=True)
        return False
    conversation.messages.append({"role": "assistant", "content": answer.text})
    conversation.count(answer)
    _show_cost(answer, "".join(shown.thoughts), as_json)
    return True


@dataclass(slots=True)
class _Shown:
    """An answer on its way to the screen. On a terminal its reasoning is dim and above it; elsewhere it is left out, so
    that what a script reads is the answer."""

    show: bool
    dim: bool
    """The output is a terminal."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    _thinking: bool = False

    def text(self, piece: str) -> None:
        self.end()
        self.texts.append(piece)
        self._write(piece)

    def reasoning(self, piece: str) -> None:
        self.thoughts.append(piece)
        if self.dim:
            self._write(piece if self._thinking else f"{DIM}{piece}")
            self._thinking = True

    def end(self) -> None:
        """The reasoning is over; what is printed next is not dim."""
        if self._thinking:
            self._thinking = False
            self._write(f"{PLAIN}\n\n")

    def _write(self, text: str) -> None:
        if self.show:
            sys.stdout.write(text)
            sys.stdout.flush()


def _show_cost(answer: Answer, reasoning: str, as_json: bool) -> None:
    from longturn.bench.metrics import output_tokens_per_s, ttft_s

    first, speed = ttft_s(answer), output_tokens_per_s(answer)
    if as_json:
        figures = {"ttft_s": first, "output_tokens_per_s": speed, "finish": answer.finish}
        tokens = {"prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens}
        thought = {"reasoning": reasoning} if reasoning else {}
        shown = {"text": answer.text, **thought, **tokens, "output_tokens": answer.output_tokens, **figures}
        print(json.dumps(shown), flush=True)
        return
    parts = [f"{answer.prompt_tokens or 0:,} prompt tokens, {answer.cached_tokens or 0:,} cached"]
    parts.append(f"{answer.output_tokens or 0:,} output")
    parts += [f"first token {first:.2f} s"] if first is not None else []
    parts += [f"{speed:.1f} tok/s"] if speed is not None else []
    text = f"[{', '.join(parts)}]"
    print(f"\n{DIM}{text}{PLAIN}" if sys.stdout.isatty() else f"\n{text}", flush=True)


def _command(line: str, conversation: _Conversation, as_json: bool) -> bool:
    """Do a slash command; returns whether the conversation goes on. With `as_json` its answer is a JSON object too."""
    command = line.strip()
    if command in ("/exit", "/quit"):
        return False
    figures: dict[str, Any] = {}
    match command:
        case "/reset":
            conversation.reset()
            text = "forgotten"
        case "/stats":
            figures = conversation.figures()
            text = conversation.summary()
        case "/help":
            text = HELP
        case _:
            text = f"unknown command {command}\n{HELP}"
    print(json.dumps({"command": command, "text": text, **figures}) if as_json else text, flush=True)
    return True


def _lines(interactive: bool) -> Iterator[str]:
    """Questions, until the end of input. On a terminal Ctrl-C clears the line, as shells do."""
    while True:
        try:
            line = input("\n> " if interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if line.strip():
            # Bytes that are no UTF-8 come as lone surrogates, which no request can hold.
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextmanager
def _history(interactive: bool) -> Iterator[None]:
    """Line editing and a history that lasts, where Python has readline."""
    if not interactive:
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    from longturn.prepared import cache_directory

    path = Path(cache_directory(None)) / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        # A history that cannot be kept is no reason to fail a conversation that has ended well.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
