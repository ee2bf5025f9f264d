"""What operators rely on: abort, reset, drain, keys, TLS, logs, and what the server says of itself."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from longturn.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from longturn.engine.clock import SystemClock
from longturn.errors import ConfigError
from longturn.frontend.inprocess_engine import InProcessEngine
from longturn.json_log import JsonFormatter
from longturn.server.keys import accepted_keys
from longturn.server.overload import MOST_S, UNKNOWN_S, QueuePace
from longturn.server.tls import check_certificate
from tests.server.engine_mock import LetterExecutor, ShownEngine
from tests.server.served import Start, serving
from tests.server.test_run import ready

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
LONG = {"messages": USER, "max_tokens": 1_000_000}


async def running(served: Any, count: int) -> None:
    async with asyncio.timeout(5):
        while served.engine.stats().running != count:
            await asyncio.sleep(0.005)


# --- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_ends_with_that_reason(start: Start, stream: bool) -> None:
    served = await start()
    async with served.http() as http:
        asked = http.post(CHAT, json={**LONG, "stream": stream}, headers={"X-Request-Id": "mine"})
        task = asyncio.create_task(asked)
        await running(served, 1)
        reply = await http.post("/abort_requests", json={"request_ids": ["mine", "nobody's"]})
        answer = await task
    assert len(reply.json()["aborted"]) == 1
    assert answer.status_code == 200 and '"finish_reason":"abort"' in answer.text
    await running(served, 0)


async def test_all_choices_of_an_answer_are_aborted_by_its_id(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        lines = http.stream("POST", CHAT, json={**LONG, "n": 3, "stream": True})
        async with lines as stream:
            reader = stream.aiter_lines()
            answer_id = json.loads((await anext(reader)).removeprefix("data: "))["id"]
            await running(served, 3)
            reply = await http.post("/abort_requests", json={"request_ids": [answer_id]})
            rest = [line async for line in reader]
    assert reply.json()["aborted"] == [f"{answer_id}-{i}" for i in range(3)]
    assert sum('"finish_reason":"abort"' in line for line in rest) == 3 and "data: [DONE]" in rest


async def test_nobody_aborts_what_another_key_asked_for(start: Start) -> None:
    served = await start(config=EngineConfig(server=ServerConfig(api_keys=("one", "two"))))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with served.http() as http:
        task = asyncio.create_task(http.post(CHAT, json=LONG, headers={**mine, "X-Request-Id": "r"}))
        await running(served, 1)
        for body in ({"request_ids": ["r"]}, {"abort_all": True}):
            assert (await http.post("/abort_requests", json=body, headers=other)).json() == {"aborted": []}
        assert not task.done() and served.engine.stats().running == 1
        assert len((await http.post("/abort_requests", json={"abort_all": True}, headers=mine)).json()["aborted"]) == 1
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_an_abort_without_names_aborts_nothing(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        task = asyncio.create_task(http.post(CHAT, json=LONG))
        await running(served, 1)
        assert (await http.post("/abort_requests")).json() == {"aborted": []}
        assert (await http.post("/abort_requests", json={})).json() == {"aborted": []}
        assert (await http.post("/abort_requests", json={"request_ids": 5})).status_code == 400
        assert served.engine.stats().running == 1
        task.cancel()


# --- cache, info -----------------------------------------------------------------------------------------------------


def test_the_prefix_cache_is_reset_through_the_engine_process(tmp_path: Path) -> None:
    with (
        ready(tmp_path, "tests.server.engine_mock:build_real") as (_, url),
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
    ):
        # The mock text side names no pages, so there is nothing cached: the way there and back is what is tested.
        assert http.post("/reset_prefix_cache").json() == {"pages": 0}


async def test_server_info_has_no_secret(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("in-file\n")
    server = ServerConfig(api_keys=("very-secret",), api_keys_file=str(file))
    served = await start(config=EngineConfig(server=server))
    async with served.http(headers={"x-api-key": "in-file"}) as http:
        reply = await http.get("/server_info")
        refused = await httpx.AsyncClient().get(f"{served.url}/server_info")
    info = reply.json()
    assert refused.status_code == 401 and "very-secret" not in reply.text and str(file) not in reply.text
    assert info["config"]["server"]["api_keys"] == "***" and info["config"]["scheduler"]["max_running"] == 16
    assert set(info["model"]) >= {"name", "quantisation", "weights", "kv_cache", "device", "max_context_tokens"}
    assert info["engine"] == {"alive": True, "health": "ok", "restarts": 0, "page_tokens": 128, "pages": 99}
    assert info["versions"]["python"]


# --- keys, TLS -------------------------------------------------------------------------------------------------------


def test_keys_come_from_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\n\n  a \nb\na\n")
    assert accepted_keys(ServerConfig(api_keys=("b", "c"), api_keys_file=str(file))) == ("b", "c", "a")


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"server\.api_keys_file: .*keys"):
        accepted_keys(ServerConfig(api_keys=("x",), api_keys_file=str(file)))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        made = subprocess.run([*command, "-out", cert, "-keyout", key], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate")
    if made.returncode:
        pytest.skip("openssl cannot make the certificate")
    return cert, key


def test_certificates_are_checked_before_anything_starts(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    assert not check_certificate(ServerConfig())
    assert check_certificate(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    for server, says in (
        (ServerConfig(ssl_keyfile=key), "without server.ssl_certfile"),
        (ServerConfig(ssl_certfile=str(tmp_path / "no"), ssl_keyfile=key), "server.ssl_certfile: cannot read"),
        (ServerConfig(ssl_certfile=cert, ssl_keyfile=str(tmp_path / "no")), "server.ssl_keyfile: cannot read"),
        (ServerConfig(ssl_certfile=str(junk), ssl_keyfile=key), "ssl_certfile .*junk.pem holds no certificate in PEM$"),
        (ServerConfig(ssl_certfile=key, ssl_keyfile=key), "holds no certificate in PEM$"),
        (ServerConfig(ssl_certfile=cert, ssl_keyfile=str(junk)), "ssl_keyfile .*junk.pem holds no private key in PEM$"),
        (ServerConfig(ssl_certfile=cert), "holds no private key: name it in server.ssl_keyfile$"),
        (ServerConfig(ssl_certfile=str(broken), ssl_keyfile=key), "ssl_certfile .*broken.pem cannot be used: "),
    ):
        with pytest.raises(ConfigError, match=says):
            check_certificate(server)


def test_https_is_served(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    directory = tmp_path / "run"
    directory.mkdir()
    with ready(directory, more={"ssl_certfile": cert, "ssl_keyfile": key}) as (process, url):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{url}/health", verify=context, trust_env=False).json() == {"status": "ok"}
        process.terminate()
        assert process.wait(10) == 0


# --- overload, drain -------------------------------------------------------------------------------------------------


def test_the_wait_is_half_of_the_queue_at_its_pace() -> None:
    now = 100.0
    pace = QueuePace(monotonic_s=lambda: now)
    assert pace.retry_after_s(1000) == UNKNOWN_S
    for _ in range(10):
        now += 0.5
        pace.ended()
    # Ten ends in 4.5 s since the first of them: one each 0.45 s.
    assert pace.retry_after_s(40) == 9
    assert pace.retry_after_s(0) == 1 and pace.retry_after_s(1_000_000) == MOST_S
    now += 61
    assert pace.retry_after_s(40) == UNKNOWN_S


async def test_a_full_queue_answers_429_and_when_to_come_back(start: Start) -> None:
    served = await start()
    body = {"messages": [{"role": "user", "content": "@refuse"}]}
    async with served.http() as http:
        for stream in (False, True):
            reply = await http.post(CHAT, json={**body, "stream": stream})
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) == UNKNOWN_S
            assert reply.headers.get_list("retry-after") == [str(UNKNOWN_S)]
            assert reply.json()["error"]["type"] == "rate_limit_error"


async def test_one_request_more_than_may_wait_is_refused_and_the_others_are_not() -> None:
    bounds = SchedulerConfig(max_running=1, max_waiting=1)
    engine = InProcessEngine(ShownEngine(LetterExecutor(), bounds, CacheConfig(), SystemClock()))
    try:
        async with serving(engine) as served, served.http() as http:
            first = asyncio.create_task(http.post(CHAT, json={"messages": USER, "max_tokens": 300}))
            await running(served, 1)
            second = asyncio.create_task(http.post(CHAT, json={"messages": USER, "max_tokens": 1}))
            async with asyncio.timeout(5):
                while engine.stats().waiting != 1:
                    await asyncio.sleep(0.002)
            third = await http.post(CHAT, json={"messages": USER, "max_tokens": 1})
            assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
            assert [(await task).status_code for task in (first, second)] == [200, 200]
    finally:
        engine.close()


async def test_a_burst_fills_the_rows_and_the_queue_and_no_more() -> None:
    """All at once, before the engine has planned anything: the requests that can run are not counted as waiting."""
    bounds = SchedulerConfig(max_running=4, max_waiting=3)
    engine = InProcessEngine(ShownEngine(LetterExecutor(), bounds, CacheConfig(), SystemClock()))
    try:
        async with serving(engine) as served, served.http() as http:
            body = {"messages": USER, "max_tokens": 1000}
            replies = await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(12)))
            assert sorted(reply.status_code for reply in replies) == [200] * 7 + [429] * 5
    finally:
        engine.close()


def test_a_draining_server_finishes_and_refuses(tmp_path: Path) -> None:
    with ready(tmp_path) as (process, url):
        body = {"messages": USER, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            for _ in range(20):
                next(lines)
            health = httpx.get(f"{url}/health", trust_env=False)
            new = httpx.post(f"{url}{CHAT}", json=body, trust_env=False)
            scraped = httpx.get(f"{url}/metrics", trust_env=False)
            rest = list(lines)
        assert health.status_code == new.status_code == 503 and scraped.status_code == 200
        assert "is stopping" in new.json()["error"]["message"] and "retry-after" in new.headers
        assert "data: [DONE]" in rest, "what was running is finished"
        assert process.wait(10) == 0


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    with ready(tmp_path, drain_s=60) as (process, url):
        body = {"messages": USER, "max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.terminate()
            # Two signals that wait together are one; the first must have been heard.
            while httpx.get(f"{url}/health", trust_env=False).status_code != 503:
                next(lines)
            process.terminate()
            assert process.wait(20) == 0, "the drain is a minute"


# --- logs ------------------------------------------------------------------------------------------------------------


async def test_each_request_is_a_line_of_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longturn.access")
    served = await start()
    async with served.http() as http:
        await http.post(CHAT, json={"messages": USER, "max_tokens": 1}, headers={"X-Request-Id": "abc"})
        await http.get("/health")
        await http.get("/a%0Ab")
    lines = [record for record in caplog.records if record.name == "longturn.access"]
    assert [(record.request_id, record.status, record.path) for record in lines][:1] == [("abc", 200, CHAT)]  # type: ignore[attr-defined]
    assert len(lines) == 2 and "\n" not in lines[1].getMessage(), "probes are not logged; lines stay lines"


async def test_json_lines_say_which_request_they_are_about(start: Start) -> None:
    from longturn.server.request_context import current_request_id

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(current_request_id))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        served = await start()
        crash = {"messages": [{"role": "user", "content": "@crash"}]}
        async with served.http() as http:
            await http.post(CHAT, json=crash, headers={"X-Request-Id": "it-crashed"})
    finally:
        root.removeHandler(handler)
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines() if "it-crashed" in line]
    assert line["request_id"] == "it-crashed" and line["level"] == "error" and "ZeroDivisionError" in line["trace"]
    assert line["time"].endswith("Z")


def test_the_engines_output_becomes_json_lines_too(tmp_path: Path) -> None:
    with ready(tmp_path, more={"log_format": "json", "log_level": "info"}) as (process, url):
        httpx.post(f"{url}{CHAT}", json={"messages": USER, "max_tokens": 1}, trust_env=False)
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert any(line["message"] == "a library prints to standard output" for line in lines)
    (asked,) = [line for line in lines if line["logger"] == "longturn.access"]
    assert asked["status"] == 200 and asked["path"] == CHAT and asked["duration_ms"] > 0 and asked["request_id"]
