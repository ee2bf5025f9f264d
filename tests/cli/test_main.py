from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from longturn.cli import serve
from longturn.cli.main import VERBS, main
from longturn.config import EngineConfig
from longturn.errors import LongturnError, ModelError

HEAVY = {"torch", "numpy", "aiohttp", "yaml", "starlette", "uvicorn", "zmq", "transformers", "jinja2"}


@pytest.mark.parametrize("argv", [[verb] for verb in VERBS] + [["bench", "replay"], ["bench", "agentx"]])
def test_help_of_every_verb_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom longturn.cli.main import main\n"
        f"try:\n    main({[*argv, '--help']!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"heavy = set(sys.modules) & {HEAVY!r}\nassert not heavy, heavy"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "usage: longturn" in shown.stdout


def test_the_package_is_the_command_line_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "longturn", "version", "--json"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0 and "longturn" in json.loads(shown.stdout)
    wrong = subprocess.run([sys.executable, "-m", "longturn", "sevre"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("longturn: error: unknown verb 'sevre'")


def test_an_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ModelError("models/x: no config.json")

    monkeypatch.setattr(serve, "run", fail)
    assert main(["serve"]) == ModelError.exit_code
    shown = capsys.readouterr()
    assert shown.err == "longturn: error: models/x: no config.json\n"
    assert shown.out == ""
    assert main(["serve", "--json"]) == ModelError.exit_code
    assert json.loads(capsys.readouterr().out) == {"error": "models/x: no config.json", "exit_code": 3}
    with pytest.raises(LongturnError):
        main(["serve", "--debug"])


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", stop)
    assert main(["serve"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sevre"], "unknown verb 'sevre'"),
        (["bench", "x"], "unknown verb 'bench x'"),
        (["serve", "--prot", "1"], "--prot"),
        (["bench", "replay"], "--url"),
        (["bench", "replay", "--url", "http://h", "--lanes", "0"], "--lanes must be at least 1"),
        (["bench", "replay", "--url", "http://h", "--pause-scale", "nan"], "--pause-scale"),
        (["bench", "replay", "--url", "http://h", "--pause-scale", "inf"], "--pause-scale"),
        (["bench", "replay", "--url", "http://h", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["demo", "--session", "nope"], "no session 'nope'"),
        (["demo", "--pause-scale", "inf"], "--pause-scale"),
        (["demo", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["demo", "--threads", "0"], "'executor.threads' must be"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_wrong_usage_exits_2_with_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_no_verb_prints_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["python"] == sys.version.split()[0]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("longturn ")


def test_serve_hands_over_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pytest.importorskip("longturn.server.run")
    served: list[EngineConfig] = []

    def serve_nothing(config: EngineConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
        served.append(config)
        if on_ready is not None:
            on_ready("http://127.0.0.1:1")

    monkeypatch.setattr(run, "serve", serve_nothing)
    assert main(["serve", "models/a", "--port", "0", "--api-key", "secret", "--json"]) == 0
    assert served[0].model.path == "models/a"
    assert served[0].server.api_keys == ("secret",)
    shown = capsys.readouterr().out
    first, second = map(json.loads, shown.splitlines())
    assert first["config"]["server"]["port"] == 0
    assert second == {"ready": "http://127.0.0.1:1"}
    assert "secret" not in shown
