"""Requests that cannot be answered: the right status, one line that names the field, and a server that goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from .conftest import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def post(server: Server, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{server.url}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refused(server: Server, path: str, body: bytes | dict[str, Any], status: int = 400) -> dict[str, Any]:
    found, answer = post(server, path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert found == status, answer
    error: dict[str, Any] = answer["error"]
    assert "\n" not in error["message"] and error["message"]
    assert error["type"] == "invalid_request_error" and error["code"]
    # Whatever it was, the next request is answered.
    assert post(server, TEXT, json.dumps({"prompt": "a", "max_tokens": 1}).encode())[0] == 200
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"messages": NaN}', b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"],
    ids=["nothing", "cut", "not UTF-8", "array", "null", "NaN", "deep"],
)
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        assert refused(server, path, body)["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 1 << 40),
        ("min_tokens", 9),
        ("n", 0),
        ("n", 129),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [10**9]),
        ("logit_bias", {"10000000": 1}),
        ("logit_bias", {"5": 101}),
        ("top_logprobs", 3),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("response_format", "json"),
        ("guided_regex", "a{1000000000}"),
        ("messages", []),
        ("messages", "hi"),
        ("tools", 5),
    ],
)
def test_fields_of_a_wrong_type_or_out_of_range(server: Server, field: str, value: object) -> None:
    error = refused(server, CHAT, {**HELLO, field: value})
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([*HELLO["messages"], {"role": "user", "content": 5}], "messages[1].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
    ],
)
def test_malformed_messages_are_named(server: Server, messages: list[Any], param: str) -> None:
    error = refused(server, CHAT, {"messages": messages, "max_tokens": 1})
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize("levels", [600, 900, 950])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools"])
def test_nested_values_are_answered_or_refused(server: Server, field: str, levels: int) -> None:
    value = '{"a":' * levels + "1" + "}" * levels
    value = value if field == "chat_template_kwargs" else f"[{value}]"
    body = f'{{"messages": {json.dumps(HELLO["messages"])}, "max_tokens": 1, "{field}": {value}}}'
    status, answer = post(server, CHAT, body.encode())
    assert status in (200, 400), answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context(server: Server, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 9000}], "stream": stream}
    error = refused(server, CHAT, body)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "8192" in error["message"]
    assert refused(server, TEXT, {"prompt": [1] * 9000})["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[], "", [[]], ["a", 5], [-1], [10**9], [1 << 63], 5, None, ["a"] * 200])
def test_prompts_that_are_none(server: Server, prompt: object) -> None:
    assert refused(server, TEXT, {"prompt": prompt, "max_tokens": 1})["param"].startswith("prompt")


@pytest.mark.parametrize("tokens", [[-5], [10**9], [1 << 63], "a", None])
def test_tokens_that_are_none(server: Server, tokens: object) -> None:
    assert refused(server, "/detokenize", {"tokens": tokens})["param"].startswith("tokens")


def test_models_and_paths_that_do_not_exist(server: Server) -> None:
    error = refused(server, CHAT, {**HELLO, "model": "gpt-4"}, 404)
    assert error["code"] == "model_not_found" and "gpt-4" in error["message"]
    assert "/v1/nope" in refused(server, "/v1/nope", {}, 404)["message"]
    assert "/health" in refused(server, "/health", {}, 405)["message"]


def test_nothing_is_left_running(server: Server) -> None:
    assert server.metric("longturn_requests_running") == 0
