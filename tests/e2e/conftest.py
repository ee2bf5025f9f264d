"""One real server on the embedded model for all end-to-end tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.source import resolve_source

SERVE = (sys.executable, "-m", "longturn.cli.main", "serve", "--port", "0", "--json", "--threads", "1")
"""One thread: a second one waits for a core whenever other tests run beside these."""


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)  # type: ignore[arg-type]

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            body = response.read().decode()
        found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", body, re.M)
        assert found is not None, f"/metrics has no {name}"
        return float(found[1])


@pytest.fixture(scope="session")
def embedded_model() -> None:
    try:
        resolve_source(ModelConfig())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(embedded_model: None) -> Iterator[Server]:
    process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = (json.loads(line) for line in process.stdout)
    url = next((line["ready"] for line in lines if "ready" in line), None)
    assert url is not None, "the server did not start"
    yield Server(url, process.pid)
    process.terminate()
    assert process.wait(20) == 0
