"""Nothing of one client's prompts shows in another's answers: not in counts, headers, probabilities or texts.

The oracle is the answer to whoever asked first: everybody who asks the same later, under another key or another salt,
must get it to the letter, whatever others have said in between. The embedded model computes the same bits cold and
warm, so that every difference is one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SERVE

KEYS = ("key-one", "key-two")
SESSION = "0b5a2b9e-3a68-4a83-8d5e-2f4a8f8f5f11"
CLIENTS: list[dict[str, Any]] = [
    {"key": KEYS[0], "salt": None},
    {"key": KEYS[0], "salt": "a"},
    {"key": KEYS[0], "salt": "b"},
    {"key": KEYS[1], "salt": None},
    {"key": KEYS[1], "salt": "a"},
]
SECRET = "The password of the vault is tulip-7, and only Anna knows it. " * 9
SYSTEM = f"x-billing-header: number=1\nYou keep secrets. {SECRET}"
TIMES = frozenset({"id", "created", "created_at", "completed_at"})
OWN = frozenset({"date", "x-request-id", "request-id", "content-length"})


@pytest.fixture(scope="module")
def url(embedded_model: None) -> Iterator[str]:
    keys = [part for key in KEYS for part in ("--api-key", key)]
    process = subprocess.Popen([*SERVE, *keys], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = (json.loads(line) for line in process.stdout)
    found = next((line["ready"] for line in lines if "ready" in line), None)
    assert found is not None, "the server did not start"
    yield found
    process.terminate()
    assert process.wait(20) == 0


def plain(value: Any) -> Any:
    """Without what is another in every answer."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in TIMES}
    return [plain(item) for item in value] if isinstance(value, list) else value


def ask(url: str, who: dict[str, Any], path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Everything that a client can see of an answer."""
    fields = {"seed": 1, "temperature": 0, "session_id": who.get("session"), "cache_salt": who["salt"], **body}
    reply = httpx.post(
        url + path, json=fields, headers={"Authorization": f"Bearer {who['key']}"}, timeout=60, trust_env=False
    )
    assert reply.status_code == 200, reply.text
    headers = {name: value for name, value in reply.headers.items() if name not in OWN}
    return {"headers": headers, "body": plain(reply.json())}


def messages(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


TALK = messages(f"Is it true? {SECRET}", "It is tulip-7.", "Say it again.")
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": SYSTEM}, *TALK],
            "max_tokens": 5,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    ("/v1/completions", {"prompt": f"<|im_start|>user\n{SECRET}<|im_end|>\n", "max_tokens": 5, "logprobs": 3}),
    ("/v1/messages", {"system": SYSTEM, "messages": TALK, "max_tokens": 5}),
    ("/v1/responses", {"instructions": SYSTEM, "input": TALK, "max_output_tokens": 5, "store": False}),
]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["headers"]["x-longturn-cached-tokens"])


@pytest.mark.parametrize(
    ("path", "body", "session"),
    [*((*request, None) for request in REQUESTS), (*REQUESTS[0], "a-name-that-is-guessed")],
    ids=[*(path for path, _ in REQUESTS), "session"],
)
def test_every_client_is_the_first(url: str, path: str, body: dict[str, Any], session: str | None) -> None:
    # The dialects share the cache: each gets prompts of its own.
    own = json.loads(json.dumps(body).replace("tulip-7", f"tulip-{REQUESTS.index((path, body))}{session is None}"))
    answers = []
    for who in CLIENTS:
        asker = {**who, "session": session}
        answers.append(ask(url, asker, path, own))
        # The others go on meanwhile: they say it again, change the header and continue the conversation.
        again = ask(url, asker, path, own)
        assert cached(again) > 0, "nothing is cached: the test would prove nothing"
        ask(url, asker, path, json.loads(json.dumps(own).replace("number=1", "number=2")))
    assert cached(answers[0]) == 0
    for answer in answers[1:]:
        assert answer == answers[0]


def test_stored_responses_and_generations_are_their_owners(url: str) -> None:
    body = {"input": f"Remember: {SECRET}", "max_output_tokens": 3}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    made = httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=60, trust_env=False).json()
    other = {"Authorization": f"Bearer {KEYS[1]}"}
    refusals = []
    for response_id in (made["id"], "resp_0123456789abcdef"):
        path = f"{url}/v1/responses/{response_id}"
        got = httpx.get(path, headers=other, timeout=60, trust_env=False)
        continued = httpx.post(
            f"{url}/v1/responses",
            json={"input": "What?", "previous_response_id": response_id},
            headers=other,
            timeout=60,
            trust_env=False,
        )
        refusals.append([(reply.status_code, reply.text.replace(response_id, "ID")) for reply in (got, continued)])
    # What is another's and what never was are refused in the same words.
    assert refusals[0] == refusals[1] and {status for status, _ in refusals[0]} == {400, 404}
    mine = httpx.get(f"{url}/v1/responses/{made['id']}", headers=headers, timeout=60, trust_env=False)
    assert mine.status_code == 200


def test_the_open_endpoints_show_no_text(url: str) -> None:
    for path in ("/metrics", "/health", "/ping"):
        assert "tulip" not in httpx.get(url + path, timeout=60, trust_env=False).text
