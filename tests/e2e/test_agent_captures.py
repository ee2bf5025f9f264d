"""Requests that real agents sent, replayed: what they send is known and answered as they read it, and every turn
continues the tokens of the one before.

`tests/fixtures/agents/` holds whole sessions of six requests: an answer that thinks, speaks and calls, an edit without
reasoning, two calls at once of which one fails, an answer in words, and another question of the user's with one more
call. In `claude_code_search` the model searches for tools, whose definitions then come late. They were captured between
the agent and a server on `scripted_agent`; what the agent says of itself (prompts, descriptions) is left out, all
but a few of its tools are, and names, ids and paths are neutral.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from longturn.config import PAGE_TOKENS
from longturn.server.sessions import session_of
from tests.e2e.agent_events import Heard, heard
from tests.e2e.scripted_agent import FAMILIES

ROOT = Path(__file__).parents[2]
CAPTURES = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "tests/fixtures/agents").glob("*.json"))}
SETTINGS = {
    "server": {"port": 0, "unsupported_tools": "drop", "model_aliases": ["gpt-*"]},
    "model": {"served_name": "scripted", "max_context_tokens": 1 << 15},
}
QUESTION = 4
"""The turn with the user's second question."""
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def bodies(capture: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**capture["common"], **turn["body"]} for turn in capture["turns"]]


def post(url: str, capture: dict[str, Any], body: dict[str, Any], path: str | None = None) -> httpx.Response:
    # Brotli and zstd are offered by some agents; nothing is compressed here.
    headers = {"Authorization": "Bearer any", **capture["headers"]}
    return httpx.post(f"{url}{path or capture['path']}", json=body, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on the script of each family of models."""
    folder = tmp_path_factory.mktemp("scripted")
    scripts = {name: [turn["answer"] for turn in capture["turns"]] for name, capture in CAPTURES.items()}
    scripts |= {"texts": with_texts(scripts["claude_code"]), "default": [{"text": "Hello."}]}
    (folder / "scripts.json").write_text(json.dumps(scripts))
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    command = [sys.executable, "-m", "tests.e2e.scripted_agent", str(folder / "model"), family]
    command += [str(folder / "scripts.json"), str(folder / "settings.json")]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = next((found for line in process.stdout if (found := re.search(r"http://\S+", line))), None)
    assert found is not None, "the server did not start"
    yield found[0]
    process.terminate()
    assert process.wait(20) == 0


def with_texts(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of a model that writes a text where the tool wants a number, and a number as JavaScript does not."""
    said = json.loads(json.dumps(answers))
    said[0]["calls"][0][1]["timeout"] = "5000.0"
    return said


def expected(body: dict[str, Any], answer: dict[str, Any]) -> Heard:
    custom = {tool["name"] for tool in body["tools"] if tool.get("type") == "custom" and "format" in tool}
    calls = [(name, arguments["input"] if name in custom else arguments) for name, arguments in answer["calls"]]
    return Heard(answer["reasoning"], answer["text"], calls)


@pytest.mark.parametrize("agent", sorted(CAPTURES))
def test_every_turn_is_heard_as_it_was_said_and_continues_the_one_before(url: str, family: str, agent: str) -> None:
    capture, forgets = CAPTURES[agent], family == "qwen"  # its template drops reasoning once the user speaks again
    computed = begun = 0
    for turn, (body, entry) in enumerate(zip(bodies(capture), capture["turns"], strict=True)):
        reply = post(url, capture, body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        answer, wanted = heard(capture["path"], reply.text), expected(body, entry["answer"])
        assert (answer.reasoning, answer.text, answer.calls) == (wanted.reasoning, wanted.text, wanted.calls), turn
        assert reply.headers["x-longturn-cached-tokens"] == str(answer.cached_tokens)
        assert "x-longturn-volatile" not in reply.headers, turn
        reuse = reply.headers["x-longturn-reuse"]
        if forgets and turn == QUESTION:
            # Written anew from the first answer's reasoning on, as the template wants it.
            assert reuse == "rerendered" and int(reply.headers["x-longturn-diverged-at"]) >= begun
            assert begun // PAGE_TOKENS * PAGE_TOKENS <= answer.cached_tokens < computed
        elif turn:
            # All whole pages of the turn before, and nothing else can be there: the rest of the prompt is new.
            assert reuse == "extended" and "x-longturn-diverged-at" not in reply.headers, turn
            assert answer.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS, turn
        else:
            assert reuse == "first_turn"
            begun = answer.prompt_tokens
        # The last sampled token, which ends the answer, was never computed.
        computed = answer.prompt_tokens + answer.output_tokens - 1
    assert computed > 5 * PAGE_TOKENS


def test_a_text_of_which_the_agent_makes_a_number_keeps_the_turn(url: str) -> None:
    capture = json.loads(json.dumps(CAPTURES["claude_code"]).replace("@script:claude_code@", "@script:texts@"))
    first, second = bodies(capture)[:2]
    answer = heard(capture["path"], post(url, capture, {**first, "cache_salt": "texts"}).text)
    assert answer.calls[0][1]["timeout"] in ("5000.0", 5000)  # by how the model writes calls
    assert second["messages"][-2]["content"][-1]["input"]["timeout"] == 5000
    reply = post(url, capture, {**second, "cache_salt": "texts"})
    assert reply.headers["x-longturn-reuse"] == "extended", reply.text
    computed = answer.prompt_tokens + answer.output_tokens - 1
    assert reply.headers["x-longturn-cached-tokens"] == str(computed // PAGE_TOKENS * PAGE_TOKENS)


@pytest.mark.parametrize("agent", sorted(CAPTURES))
def test_plain_answers_say_the_same(url: str, agent: str) -> None:
    capture = CAPTURES[agent]
    body = {**bodies(capture)[0], "stream": False}
    body.pop("stream_options", None)
    reply = post(url, capture, {**body, "cache_salt": "plain"})
    assert reply.status_code == 200, reply.text
    wanted = capture["turns"][0]["answer"]
    said = json.dumps(reply.json(), ensure_ascii=False)
    assert wanted["reasoning"] in said and wanted["text"] in said and wanted["calls"][0][0] in said


@pytest.mark.parametrize("agent", sorted(CAPTURES))
def test_every_field_that_is_sent_is_documented(agent: str) -> None:
    capture = CAPTURES[agent]
    chat = capture["path"] == "/v1/chat/completions"
    table = (ROOT / "docs" / ("api.md" if chat else "agents.md")).read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w*) ?\| (\w*) ?\|", table, re.M)
    column = 1 if capture["path"].startswith("/v1/messages") else 0
    known = {row[0]: row[1 + column] for row in rows}
    for body in bodies(capture):
        for name in body:
            assert known.get(name) in ("honoured", "ignored", "refused"), name
            # What is refused passes only because this value of it asks for nothing.


@pytest.mark.parametrize("agent", sorted(CAPTURES))
def test_its_headers_name_the_session(agent: str) -> None:
    capture = CAPTURES[agent]
    session = session_of({name.lower(): value for name, value in capture["headers"].items()}, None)
    assert session is not None and "0000" in session


def test_counting_tokens_agrees_with_the_answer(url: str) -> None:
    capture = CAPTURES["claude_code"]
    body = bodies(capture)[0]
    counted = post(url, capture, {k: body[k] for k in ("model", "messages", "tools", "system", "thinking")},
                   "/v1/messages/count_tokens?beta=true")  # fmt: skip
    assert counted.status_code == 200, counted.text
    answer = heard(capture["path"], post(url, capture, body).text)
    # The effort, which is no part of what is counted here, is a line of the prompt where the template knows it.
    assert 0 <= answer.prompt_tokens - counted.json()["input_tokens"] < 32


def test_images_are_refused_in_words(url: str) -> None:
    capture = CAPTURES["claude_code"]
    body = json.loads(json.dumps(bodies(capture)[1]))
    source = {"type": "base64", "data": IMAGE, "media_type": "image/png"}
    body["messages"][-1]["content"][0]["content"] = [{"type": "image", "source": source}]
    reply = post(url, capture, body)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
    message = reply.json()["error"]["message"]
    assert "messages[3].content[0].content[0]" in message and "'image' is not supported" in message
    # In these words Claude Code knows that it is the image, leaves it out and goes on.
    assert "could not process image" in message.lower()
    capture = CAPTURES["codex"]
    body = json.loads(json.dumps(bodies(capture)[1]))
    body["input"][-1]["output"] = [{"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}]
    reply = post(url, capture, body)
    assert reply.status_code == 400 and "'input_image' is not supported" in reply.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_said_so_that_agents_compact(url: str) -> None:
    # Claude Code and Codex look for the code, and make room instead of giving up.
    for agent, place in (("claude_code", "messages"), ("codex", "input")):
        capture = CAPTURES[agent]
        body = json.loads(json.dumps(bodies(capture)[0]))
        part = body[place][0]["content"][0]
        part["text"] = "~" * (1 << 15)
        reply = post(url, capture, body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text


def test_a_billing_line_is_reported(url: str) -> None:
    capture = CAPTURES["claude_code"]
    first = {**bodies(capture)[0], "cache_salt": "volatile"}
    other = json.loads(json.dumps(first))
    line = other["system"][0]
    assert line["text"].startswith("x-anthropic-billing-header: cc_version=2.1.332.")
    # It depends on the conversation's first message.
    line["text"] = re.sub(r"(2\.1\.332)\.\w+", r"\1.0f0", line["text"])
    other["messages"][0]["content"][1]["text"] = "Something else."
    assert "x-longturn-volatile" not in post(url, capture, first).headers
    reply = post(url, capture, other)
    assert reply.status_code == 200 and "kind=header" in reply.headers["x-longturn-volatile"]
    assert heard(capture["path"], reply.text).text == "Hello." and reply.headers["x-longturn-cached-tokens"] == "0"
