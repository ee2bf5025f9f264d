"""What `bench agentx` writes of the server's state, of derived system prompts, and of a run that never began."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from longturn.cli.main import main
from longturn.report.point import load_point
from tests.bench.fake_server import FakeServer, running
from tests.bench.make_traces import row, session


@dataclass
class Watched(FakeServer):
    """Tells its queue under vLLM's names."""

    scrapes: int = 0

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        lines = [f'vllm:num_requests_running{{engine="0"}} {self.alive}', "vllm:num_requests_waiting 2"]
        return web.Response(text="\n".join([*lines, "vllm:kv_cache_usage_perc 0.25", ""]))


def trace(folder: Path, **more: object) -> str:
    """Two sessions' worth of prompts that part after two blocks."""
    rows = [row(float(n), [0, 1, *range(10 * n + 10, 10 * n + 18)], api=0.5, out=5) for n in range(4)]
    path = folder / "small.json"
    path.write_text(json.dumps(session(rows, **more)))
    return str(path)


def measure(url: str, folder: Path, *more: str) -> int:
    out = ["--out", str(folder / "o"), "--duration", "1.5", "--seed", "1", "--token-ids", "100-900"]
    return main(["bench", "agentx", "--url", url, "--api", "completions", "--no-split", *out, *more])


def test_queue_and_cache_over_time_are_in_the_point(tmp_path: Path) -> None:
    fake = Watched(token_s=0.01)
    with running(fake) as url:
        assert measure(url, tmp_path, "--traces", trace(tmp_path)) == 0
    point = load_point(tmp_path / "o" / "agentx-0001.json")
    assert 2 <= len(point.server) == fake.scrapes
    assert {(sample.waiting, sample.cache_used) for sample in point.server} == {(2, 0.25)}
    times = [sample.at_ms for sample in point.server]
    assert times == sorted(times) and 0 <= times[0] < 1000
    assert point.flags["server_state"] == f"{len(times)} samples, 1 s apart"


def test_a_server_without_metrics_is_no_failure_and_is_told(tmp_path: Path) -> None:
    with running(FakeServer()) as url:
        assert measure(url, tmp_path, "--traces", trace(tmp_path)) == 0
    point = load_point(tmp_path / "o" / "agentx-0001.json")
    assert point.server == () and point.flags["server_state"] == f"none: {url}/metrics answered 404: 404: Not Found"


def test_a_derived_system_prompt_is_shared_by_replays_and_told(tmp_path: Path) -> None:
    prompts: dict[bool, list[list[int]]] = {}
    for derive in (False, True):
        fake = FakeServer()
        with running(fake) as url:
            more = ["--derive-system", "--preset", "agentx"] if derive else []
            assert measure(url, tmp_path, "--traces", trace(tmp_path), "--concurrency", "2", *more) == 0
        point = load_point(tmp_path / "o" / "agentx-0002.json")
        prompts[derive] = [body["prompt"] for body in fake.requests]
        assert ("derive_system" in point.flags) is derive is ("--derive-system" in point.command)
        assert any("derived system prompts" in reason for reason in point.validity.reasons) is derive
    # Two blocks of four tokens are common to every prompt once they are known to be the system prompt.
    assert len({tuple(ids[:8]) for ids in prompts[True]}) == 1
    assert len({tuple(ids[:8]) for ids in prompts[False]}) > 1


def test_a_declared_system_prompt_is_not_derived_again(tmp_path: Path) -> None:
    fake = FakeServer()
    with running(fake) as url:
        assert measure(url, tmp_path, "--traces", trace(tmp_path, system_tokens=4), "--derive-system") == 0
    assert len({tuple(body["prompt"][:4]) for body in fake.requests}) == 1
    assert len({tuple(body["prompt"][:8]) for body in fake.requests}) > 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_ctrl_c_in_the_warm_up_saves_nothing_and_says_so(tmp_path: Path) -> None:
    fake = FakeServer(token_s=30.0)
    with running(fake) as url:
        argv = ["bench", "agentx", "--url", url, "--traces", trace(tmp_path), "--out", str(tmp_path / "o")]
        with subprocess.Popen(
            [sys.executable, "-m", "longturn.cli.main", *argv],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            deadline = time.monotonic() + 30
            while not fake.alive and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=20)
    assert process.returncode == 130, complaint
    assert complaint.splitlines()[-1] == "longturn: interrupted, nothing was measured"
    assert not list((tmp_path / "o").glob("*.json"))
