"""Recorded agent sessions: what was sent in every turn, what came back, and how long the agent's tools took.

A session file is one JSON object. A message's text is a string or a list of lines, which keeps long prompts reviewable:

    {"format": 1, "id": "fix", "description": "...",
     "messages": [{"role": "system", "content": ["You are ...", "..."]}],
     "turns": [{"label": "task", "pause_s": 0, "append": [{"role": "user", "content": "Fix it."}],
                "max_tokens": 40, "assistant": "I'll look at the tests."}]}

`assistant` is the recorded answer. The next turn's prompt carries it, not what the server under test wrote, so that
every server and every configuration is asked for exactly the same tokens.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from longturn.errors import LongturnError

FORMAT = 1
ROLES = ("system", "user", "assistant", "tool")


class SessionError(LongturnError):
    """A session file is missing, is not JSON, or breaks the format; the message names the file and the place."""

    exit_code = 2
    http_status = 400


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[str]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(self.content)

    def as_request(self) -> dict[str, str]:
        """The message as the chat API takes it."""
        return {"role": self.role, "content": self.text}


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: str
    """What this turn is, for tables and charts: the tool that ran, or `task`."""
    append: tuple[Message, ...]
    """Messages that are new in this turn's prompt: a user's message or tool results."""
    max_tokens: int
    """Output tokens to ask for."""
    assistant: str | list[str]
    """The recorded answer, which the following prompts carry."""
    pause_s: float = 0.0
    """Recorded time between the end of the last answer and this request: tools that ran, or a person reading."""

    @property
    def assistant_text(self) -> str:
        return self.assistant if isinstance(self.assistant, str) else "\n".join(self.assistant)


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    id: str
    messages: tuple[Message, ...]
    """The conversation's start: the system prompt."""
    turns: tuple[Turn, ...]
    description: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool definitions sent as `tools` with every request; empty where the system prompt describes them in text."""

    def prompt(self, turn: int) -> list[dict[str, str]]:
        """The messages of request number `turn` (from 0), recorded answers of earlier turns included."""
        messages = [message.as_request() for message in self.messages]
        for earlier in self.turns[:turn]:
            messages.extend(message.as_request() for message in earlier.append)
            messages.append({"role": "assistant", "content": earlier.assistant_text})
        messages.extend(message.as_request() for message in self.turns[turn].append)
        return messages


def parse_session(data: bytes, name: str) -> Session:
    """Read a session from JSON.

    Args:
        data: UTF-8 JSON.
        name: what errors call it, usually the file's path.

    Raises:
        SessionError: not JSON, an unknown or missing field, a wrong type or a value out of range.
    """
    try:
        session = msgspec.json.decode(data, type=Session)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionError(f"{name}: {error}") from error
    if session.format != FORMAT:
        raise SessionError(f"{name}: session format {session.format} is not known (this version reads {FORMAT})")
    if not session.turns:
        raise SessionError(f"{name}: a session needs at least one turn")
    for message in session.messages:
        _check_role(message, name, "messages")
    for index, turn in enumerate(session.turns):
        place = f"turns[{index}]"
        if not turn.append:
            raise SessionError(f"{name}: {place}.append is empty: every turn sends something new")
        if turn.max_tokens < 1:
            raise SessionError(f"{name}: {place}.max_tokens must be at least 1, not {turn.max_tokens}")
        if not 0 <= turn.pause_s < float("inf"):
            raise SessionError(f"{name}: {place}.pause_s must be 0 or more, not {turn.pause_s}")
        for message in turn.append:
            _check_role(message, name, place)
    return session


def _check_role(message: Message, name: str, place: str) -> None:
    if message.role not in ROLES:
        raise SessionError(f"{name}: {place}: unknown role {message.role!r} (known: {', '.join(ROLES)})")


def load_session(path: Path) -> Session:
    """Read a session file.

    Raises:
        SessionError: the file cannot be read or is not a session.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror or error}") from error
    return parse_session(data, str(path))


def shipped_sessions() -> list[str]:
    """Names of the sessions that come with the package."""
    folder = resources.files("longturn.bench").joinpath("sessions")
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_named_session(name: str) -> Session:
    """A session by the name of a shipped one (`repo_fix`) or by its file's path.

    Raises:
        SessionError: there is no such session.
    """
    shipped = shipped_sessions()
    if name in shipped:
        item = resources.files("longturn.bench").joinpath("sessions", f"{name}.json")
        return parse_session(item.read_bytes(), name)
    path = Path(name)
    if not path.exists():
        raise SessionError(f"no session '{name}': neither a file nor a shipped session ({', '.join(shipped)})")
    return load_session(path)
