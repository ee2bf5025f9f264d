"""What names a session: headers and fields of every dialect, which comes first, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from longturn.server.sessions import MAX_CHARS, SESSION_HEADERS, session_in_user_id, session_of
from tests.server.dialects import Scripted, client

UUID = "0b5a2b9e-3a68-4a83-8d5e-2f4a8f8f5f11"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
COMPLETION = ("/v1/completions", {"prompt": "x"})
RESPONSES = ("/v1/responses", {"input": "x"})
MESSAGES = ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9})
ALL = (CHAT, COMPLETION, RESPONSES, MESSAGES)


async def session(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str | None:
    service = Scripted("hm")
    async with client(service) as http:
        reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return service.requests[-1].session_id


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_every_dialect_takes_every_header(path: str, body: dict[str, Any]) -> None:
    assert await session(path, body) is None
    for name in SESSION_HEADERS:
        assert await session(path, body, {name: "s"}) == "s"
    assert await session(path, body, {"X-Session-ID": "a", "conversation_id": "b"}) == "a"
    assert await session(path, body | {"session_id": "c"}, {"X-Session-ID": "a"}) == "c"
    assert await session(path, body | {"prompt_cache_key": "d"}) == "d"
    assert await session(path, body | {"prompt_cache_key": "d"}, {"X-Session-ID": "a"}) == "a"
    assert await session(path, body | {"session_id": "", "prompt_cache_key": ""}, {"X-Session-ID": ""}) is None


async def test_the_user_of_the_messages_api() -> None:
    path, body = MESSAGES
    assert await session(path, body | {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}) == UUID
    assert await session(path, body | {"metadata": {"user_id": "me"}}, {"X-Claude-Code-Session-Id": "s"}) == "s"
    assert await session(path, body | {"metadata": {}}) is None


@pytest.mark.parametrize(
    ("user_id", "expected"),
    [
        (None, None),
        ("", None),
        ("me@example.com", "me@example.com"),
        (f"user_0123abc_account_x_session_{UUID}", UUID),
        ("session_7", "7"),
        ("my_session_notes.txt", "my_session_notes.txt"),
        (f'{{"device_id":"d","session_id":"{UUID}"}}', UUID),
        ('{"device_id":"d"}', '{"device_id":"d"}'),
        ('{"session_id":5}', '{"session_id":5}'),
        ("{broken", "{broken"),
        ('{"a":' * 800, '{"a":' * 800),
    ],
)
def test_sessions_in_user_ids(user_id: str | None, expected: str | None) -> None:
    assert session_in_user_id(user_id) == expected


def test_long_names_become_digests() -> None:
    names = [session_of(Headers({}), "x" * n) for n in (MAX_CHARS, MAX_CHARS + 1, MAX_CHARS + 2)]
    assert names[0] == "x" * MAX_CHARS and len({*names}) == 3
    assert all(name is not None and len(name) <= MAX_CHARS for name in names)
    assert session_of(Headers({}), "\ud800" * 300) is not None
