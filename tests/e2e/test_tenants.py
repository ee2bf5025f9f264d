"""Nothing that one key's user sent shows to another: not in cached tokens, not in conversations, not in aborts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SERVE

CHAT = "/v1/chat/completions"
PROMPT = [{"role": "user", "content": "A secret plan, told in many words. " * 40}]


@pytest.fixture(scope="module")
def url(embedded_model: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# more\nthree\n")
    command = [*SERVE, "--api-key", "one", "--api-key", "two", "--api-keys-file", str(keys)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert "one" not in first["config"]["server"]["api_keys"]
    yield next(line["ready"] for line in map(json.loads, process.stdout) if "ready" in line)
    process.terminate()
    assert process.wait(20) == 0


def cached(url: str, key: str, messages: Any = PROMPT, **options: Any) -> int:
    body = {"messages": messages, "max_tokens": 1, **options}
    reply = httpx.post(f"{url}{CHAT}", json=body, headers={"x-api-key": key}, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    tokens: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_each_key_and_each_salt_has_a_cache_of_its_own(url: str) -> None:
    assert cached(url, "one") == 0
    assert cached(url, "one") >= 256
    for key in ("two", "three"):
        assert cached(url, key) == 0, "whether another user sent this prompt is none of this user's business"
        assert cached(url, key) >= 256
    assert cached(url, "one", cache_salt="s") == 0
    assert cached(url, "one", cache_salt="s") >= 256
    assert cached(url, "two", cache_salt="s") == 0
    # Salts and keys are no text that can be joined to make another's.
    assert cached(url, "one", cache_salt="") == 0


def test_a_session_id_opens_nobodys_session(url: str) -> None:
    prompt = [{"role": "user", "content": "Another plan, in other words. " * 40}]
    body = {"messages": prompt, "max_tokens": 60, "session_id": "shared", "ignore_eos": True}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        answer = http.post(CHAT, json=body, headers={"x-api-key": "one"}).json()["choices"][0]["message"]["content"]
    turn = [*prompt, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    assert cached(url, "two", turn, session_id="shared") == 0
    assert cached(url, "one", turn, session_id="shared") >= 256


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/server_info", "/tokenize", "/openapi.json", "/version"])
def test_all_but_health_and_metrics_needs_a_key(url: str, path: str) -> None:
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}):
        for ask in (httpx.get, httpx.post):
            assert ask(f"{url}{path}", headers=headers, trust_env=False).status_code == 401
    for open_path in ("/health", "/ping", "/metrics"):
        assert httpx.get(f"{url}{open_path}", trust_env=False).status_code == 200
