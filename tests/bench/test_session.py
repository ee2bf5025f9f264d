from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longturn.bench.session import (
    SessionError,
    load_named_session,
    load_session,
    parse_session,
    shipped_sessions,
)


def small() -> dict[str, Any]:
    return {
        "format": 1,
        "id": "s",
        "messages": [{"role": "system", "content": ["a", "b"]}],
        "turns": [
            {"label": "t", "append": [{"role": "user", "content": "q1"}], "max_tokens": 3, "assistant": "r1"},
            {
                "label": "u",
                "append": [{"role": "user", "content": "q2"}],
                "max_tokens": 4,
                "assistant": ["r", "2"],
                "pause_s": 1.5,
            },
        ],
    }


def parse(data: Any) -> Any:
    return parse_session(json.dumps(data).encode(), "file.json")


def test_prompts_carry_the_recorded_answers() -> None:
    session = parse(small())
    assert session.prompt(0) == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "q1"}]
    assert session.prompt(1) == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "r1"},
        {"role": "user", "content": "q2"},
    ]
    assert session.turns[1].assistant_text == "r\n2"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "session format 2 is not known"),
        (("turns",), [], "at least one turn"),
        (("surprise",), 1, "unknown field `surprise`"),
        (("turns", 1, "max_tokens"), 0, r"turns\[1\].max_tokens must be at least 1"),
        (("turns", 1, "max_tokens"), "4", r"\$.turns\[1\].max_tokens"),
        (("turns", 0, "pause_s"), -1.0, r"turns\[0\].pause_s"),
        (("turns", 0, "append"), [], r"turns\[0\].append is empty"),
        (("messages", 0, "role"), "wizard", "unknown role 'wizard'"),
        (("turns", 0, "append", 0, "role"), "wizard", r"turns\[0\]: unknown role"),
    ],
)
def test_broken_sessions_say_where(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = small()
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(SessionError, match=message) as caught:
        parse(data)
    assert str(caught.value).startswith("file.json: ")
    assert "\n" not in str(caught.value)


def test_a_missing_field_is_an_error() -> None:
    data = small()
    del data["turns"][0]["assistant"]
    with pytest.raises(SessionError, match="assistant"):
        parse(data)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff\xfe"])
def test_not_a_session_at_all(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(SessionError, match=r"x\.json"):
        load_session(path)


def test_unknown_names_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="neither a file nor a shipped session"):
        load_named_session("nope")
    with pytest.raises(SessionError, match="directory"):
        load_session(tmp_path)


def test_shipped_sessions_load_and_grow() -> None:
    assert "repo_fix" in shipped_sessions()
    for name in shipped_sessions():
        session = load_named_session(name)
        assert session.id == name
        assert session.description
        for turn in range(1, len(session.turns)):
            earlier, later = session.prompt(turn - 1), session.prompt(turn)
            assert later[: len(earlier)] == earlier, "a turn must extend the turn before it"
    assert len(load_named_session("repo_fix").turns) == 12


def test_the_tool_calls_of_repo_fix_are_json() -> None:
    for turn in load_named_session("repo_fix").turns[:-2]:
        inside = turn.assistant_text.partition("<tool_call>\n")[2].removesuffix("\n</tool_call>")
        assert set(json.loads(inside)) == {"name", "arguments"}
