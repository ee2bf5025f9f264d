"""The demo and the child server, with a fake server in place of `longturn serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longturn.cli import local_server as local_server_module
from longturn.cli.local_server import ServerStartError, local_server
from longturn.cli.main import main
from longturn.config import CacheConfig, EngineConfig
from longturn.report.point import load_point
from longturn.report.schema import load_result
from tests.bench.fake_server import FakeServer, running


@contextmanager
def fake_local_server(config: EngineConfig, *, on_wait: Callable[[], None] | None = None) -> Iterator[str]:
    with running(FakeServer(caching=config.cache.prefix_caching, prefill_s_per_token=2e-5)) as url:
        yield url


def test_demo_measures_both_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_server_module, "local_server", fake_local_server)
    assert main(["demo", "--pause-scale", "0", "--no-agents", "--out", str(tmp_path), "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "index.html").resolve().as_uri() in shown
    result = load_result(tmp_path / "result.json")
    assert [run.name for run in result.runs] == ["cache on", "cache off"]
    on, off = result.runs
    assert result.command == "longturn demo --pause-scale 0 --no-agents --set executor.threads=1"
    assert off.server == "longturn serve --set executor.threads=1 --set cache.prefix_caching=false"
    assert [t.prompt_tokens for t in on.turns] == [t.prompt_tokens for t in off.turns]
    assert on.totals.cached_tokens > 0 == off.totals.cached_tokens


def test_demo_replays_agents_on_each_server_and_writes_their_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_server_module, "local_server", fake_local_server)
    argv = ["demo", "--pause-scale", "0", "--concurrency", "1,2", "--duration", "1", "--out", str(tmp_path)]
    assert main([*argv, "--api-key", "secret"]) == 0
    shown = capsys.readouterr().out
    page = tmp_path / "agents" / "index.html"
    assert page.resolve().as_uri() in shown and (tmp_path / "index.html").resolve().as_uri() in shown
    assert "agent sessions, cache on" in shown and "agent sessions, cache off" in shown
    on, off = (
        [load_point(tmp_path / "agents" / name / f"agentx-{count:04d}.json") for count in (1, 2)]
        for name in ("cache-on", "cache-off")
    )
    for point in (*on, *off):
        assert point.traces.name == "desk.jsonl" and point.traces.preset == "quick" and point.metrics.errors == 0
        assert point.validity.valid and point.metrics.requests > 0
        assert "secret" not in point.command
    assert {point.configuration for point in on} == {"cache on"} and {point.configuration for point in off} == {
        "cache off"
    }
    assert all(point.metrics.cached_tokens for point in on) and not any(point.metrics.cached_tokens for point in off)
    data = re.search(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None
    shown_data = json.loads(data[1])
    assert shown_data["series"][shown_data["baseline"]]["name"] == "cache off"
    assert {point["concurrency"] for point in shown_data["points"]} == {1, 2}
    assert load_result(tmp_path / "result.json").command == (
        "longturn demo --pause-scale 0 --concurrency 1,2 --duration 1"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--concurrency", "0"], "--concurrency must be between 1"), (["--duration", "0"], "--duration must be at least")],
)
def test_bad_values_are_refused_before_anything_starts(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *argv, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ServerStartError("the server could not start: x"), 6, "the server could not start: x"),
    ],
)
def test_an_end_before_the_second_run_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    end: BaseException,
    code: int,
    message: str,
) -> None:
    @contextmanager
    def only_once(config: EngineConfig, *, on_wait: Callable[[], None] | None = None) -> Iterator[str]:
        if not config.cache.prefix_caching:
            raise end
        with fake_local_server(config, on_wait=on_wait) as url:
            yield url

    monkeypatch.setattr(local_server_module, "local_server", only_once)
    assert main(["demo", "--pause-scale", "0", "--no-agents", "--out", str(tmp_path)]) == code
    result = load_result(tmp_path / "result.json")
    assert [run.name for run in result.runs] == ["cache on"]
    assert message in capsys.readouterr().err


def test_ctrl_c_while_the_server_stops_keeps_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def stuck(config: EngineConfig, *, on_wait: Callable[[], None] | None = None) -> Iterator[str]:
        with fake_local_server(config, on_wait=on_wait) as url:
            yield url
        raise KeyboardInterrupt

    monkeypatch.setattr(local_server_module, "local_server", stuck)
    assert main(["demo", "--pause-scale", "0", "--no-agents", "--out", str(tmp_path)]) == 130
    assert len(load_result(tmp_path / "result.json").runs[0].turns) == 12


SERVER = """
import json, sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *a): pass
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
assert config["cache"]["prefix_caching"] is False
http.server.HTTPServer((config["server"]["host"], config["server"]["port"]), Handler).serve_forever()
"""


def use_as_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Make the child run `code` instead of the command line."""
    script = tmp_path / "server.py"
    script.write_text(code)
    real = local_server_module.subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        return real([sys.executable, str(script), *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(local_server_module.subprocess, "Popen", popen)


def test_a_child_server_gets_the_configuration_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_as_server(monkeypatch, tmp_path, SERVER)
    waited: list[int] = []
    config = EngineConfig(cache=CacheConfig(prefix_caching=False))
    with local_server(config, on_wait=lambda: waited.append(1)) as url:
        assert local_server_module._is_ready(url)
    assert waited
    assert not local_server_module._is_ready(url)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys; print('loading'); print('longturn: error: no such model'); sys.exit(3)",
            "the server could not start: no such model",
        ),
        ("import sys; sys.exit(3)", "the server could not start: exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "the server could not start: killed by signal 9"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use_as_server(monkeypatch, tmp_path, code)
    with pytest.raises(ServerStartError) as caught, local_server(EngineConfig()):
        raise AssertionError("it must not get this far")
    assert str(caught.value) == message
    assert main(["demo", "--json", "--out", str(tmp_path / "out")]) == ServerStartError.exit_code
    assert json.loads(capsys.readouterr().out)["error"] == message


def test_a_server_that_never_gets_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_as_server(monkeypatch, tmp_path, "import time\nprint('compiling', flush=True)\ntime.sleep(60)")
    with (
        pytest.raises(ServerStartError, match=r"not ready in 0\.5 s: compiling"),
        local_server(EngineConfig(), timeout_s=0.5),
    ):
        raise AssertionError("it must not get this far")


def test_sigterm_stops_the_child_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_as_server(monkeypatch, tmp_path, SERVER)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as caught,
        local_server(EngineConfig(cache=CacheConfig(prefix_caching=False))) as url,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal must end this block")
    assert caught.value.code == 128 + signal.SIGTERM
    assert not local_server_module._is_ready(url)
    assert signal.getsignal(signal.SIGTERM) == before
