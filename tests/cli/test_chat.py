from __future__ import annotations

import io
import json
from typing import Any

import pytest
from aiohttp import web

from longturn.cli.main import main
from tests.bench.fake_server import FakeServer, running


def chat(monkeypatch: pytest.MonkeyPatch, url: str, lines: list[str], *more: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--url", url, "--max-tokens", "3", *more])


def test_a_conversation(
    monkeypatch: pytest.MonkeyPatch, fake: FakeServer, fake_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["hello there", "again", "/stats", "/reset", "fresh", "/what", "/exit", "never sent"]
    assert chat(monkeypatch, fake_url, lines, "--system", "Be brief.", "--seed", "5", "--api-key", "k") == 0
    shown = capsys.readouterr().out
    sent = [[m["content"] for m in request["messages"]] for request in fake.requests]
    assert sent == [
        ["Be brief.", "hello there"],
        ["Be brief.", "hello there", "w w w ", "again"],
        ["Be brief.", "fresh"],
    ]
    assert "2 turns: " in shown
    assert "3 output" in shown
    assert "unknown command /what" in shown
    assert all(request["seed"] == 5 and request["max_tokens"] == 3 for request in fake.requests)
    assert fake.headers[0]["Authorization"] == "Bearer k"
    session_ids = [headers["X-Session-ID"] for headers in fake.headers]
    assert session_ids[0] == session_ids[1] != session_ids[2]


def test_json_is_one_line_an_answer(
    monkeypatch: pytest.MonkeyPatch, fake_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, fake_url, ["a b c d e f g h i j", "k"], "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["text"] for a in answers] == ["w w w ", "w w w "]
    assert answers[0]["cached_tokens"] == 0
    assert answers[1]["cached_tokens"] == 8


def test_json_has_commands_as_objects_too(
    monkeypatch: pytest.MonkeyPatch, fake_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, fake_url, ["hi", "/stats", "/what", "/exit"], "--json") == 0
    answer, stats, unknown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert stats["turns"] == 1 and stats["text"].startswith("1 turn: ")
    assert stats["prompt_tokens"] == answer["prompt_tokens"]
    assert "unknown command /what" in unknown["text"]


def test_a_failed_answer_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(fail_turns={0: "500"})
    with running(fake) as url:
        assert chat(monkeypatch, url, ["one", "two"]) == 1
    assert [m["content"] for m in fake.requests[1]["messages"]] == ["two"]
    assert "longturn: error: HTTP 500: scripted failure" in capsys.readouterr().err


class ThinkingServer(FakeServer):
    """Thinks before each answer, under both names of the field or under one."""

    names = ("reasoning", "reasoning_content")

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await FakeServer._event(response, event)
        if event.get("choices") and event["choices"][0].get("delta", {}).get("role"):
            for piece in ("I ", "think"):
                delta = dict.fromkeys(ThinkingServer.names, piece)
                await FakeServer._event(response, {"choices": [{"index": 0, "delta": delta}]})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("names", [("reasoning", "reasoning_content"), ("reasoning",)])
def test_reasoning_is_dim_and_apart(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    monkeypatch.setattr(ThinkingServer, "names", names)
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    fake = ThinkingServer()
    with running(fake) as url:
        assert chat(monkeypatch, url, ["one", "two"]) == 0
    assert screen.getvalue().count("\x1b[2mI think\x1b[0m\n\nw w w ") == 2
    assert [m["content"] for m in fake.requests[1]["messages"]] == ["one", "w w w ", "two"]


def test_scripts_read_the_answer_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ThinkingServer()) as url:
        assert chat(monkeypatch, url, ["one"]) == 0
        assert "think" not in capsys.readouterr().out
        assert chat(monkeypatch, url, ["one"], "--json") == 0
        answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["reasoning"]) == ("w w w ", "I think")
