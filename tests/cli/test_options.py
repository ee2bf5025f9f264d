from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from longturn.cli.main import Parser
from longturn.cli.options import add_config_flags, byte_count, config_from_args, repeat_flags, settings
from longturn.config import EngineConfig
from longturn.errors import ConfigError


def parse(*argv: str) -> EngineConfig:
    parser = Parser(prog="longturn test", allow_abbrev=False)
    add_config_flags(parser)
    return config_from_args(parser.parse_args(argv))


def test_nothing_given_is_the_default() -> None:
    assert parse() == EngineConfig()


def test_every_leaf_of_the_tree_has_a_flag_and_a_help_text() -> None:
    def leaves(value: object, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            inner = getattr(value, field.name)
            name = f"{prefix}{field.name}"
            found |= leaves(inner, f"{name}.") if dataclasses.is_dataclass(inner) else {name}
        return found

    assert {setting.name for setting in settings()} == leaves(EngineConfig())
    assert all(setting.help for setting in settings())
    assert "page pool" in next(s.help for s in settings() if s.name == "cache.memory_bytes")


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["models/a"], "model.path", "models/a"),
        (["--model", "models/a"], "model.path", "models/a"),
        (["--served-model-name", "x"], "model.served_name", "x"),
        (["--weights", "fp32"], "model.weights", "fp32"),
        (["--max-model-len", "4096"], "model.max_context_tokens", 4096),
        (["--kv-cache-dtype", "fp16"], "cache.dtype", "fp16"),
        (["--cache-memory-bytes", "1GiB"], "cache.memory_bytes", 1 << 30),
        (["--no-enable-prefix-caching"], "cache.prefix_caching", False),
        (["--max-num-seqs", "3"], "scheduler.max_running", 3),
        (["--max-num-batched-tokens", "256"], "scheduler.step_tokens", 256),
        (["--scheduler-target-itl-ms", "80"], "scheduler.target_itl_ms", 80.0),
        (["--threads", "2"], "executor.threads", 2),
        (["--host", "0.0.0.0"], "server.host", "0.0.0.0"),
        (["--port", "0"], "server.port", 0),
        (["--api-key", "a", "--api-key", "b"], "server.api_keys", ("a", "b")),
        (["--seed", "7"], "seed", 7),
        (["--set", "cache.prefix_caching=false"], "cache.prefix_caching", False),
        (["--set", "model.path=null"], "model.path", None),
        (["--set", "cache.memory_bytes=64MiB"], "cache.memory_bytes", 64 << 20),
        (["--set", "server.api_keys=[a, b]"], "server.api_keys", ("a", "b")),
    ],
)
def test_flags_reach_their_setting(argv: list[str], path: str, value: object) -> None:
    node: object = parse(*argv)
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: 1, host: h}\nscheduler:\n  max_running: 5\n")
    config = parse("--config", str(path), "--port", "2", "--max-num-seqs", "6", "--set", "server.port=3")
    assert (config.server.port, config.server.host, config.scheduler.max_running) == (3, "h", 6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set", "cache.nope=1"], "unknown setting 'cache.nope'"),
        (["--set", "seed.x=1"], "'seed' must be int|unknown setting 'seed.x'"),
        (["--set", "server.port=abc"], "'server.port' must be int"),
        (["--set", "server.port"], "NAME=VALUE"),
        (["--set", "cache.memory_bytes=lots"], "not a number of bytes"),
        (["--set", "model.served_name=2024-99-99"], "not a YAML value"),
        (["--set", "executor.threads=0"], "'executor.threads' must be from 1 to 1024, not 0"),
        (["--port", "65536"], "'server.port' must be from 0 to 65535, not 65536"),
        ([""], "'model.path' must not be empty"),
        (["--port", "x"], "--port"),
        (["--weights", "q9"], "--weights"),
        (["--wieghts", "fp32"], "unrecognized arguments: --wieghts"),
        (["--cache-memory-bytes", "3 apples"], "not a number of bytes"),
        (["a", "--model", "b"], "two models"),
        (["--config", "/nonexistent/c.yaml"], "cannot read /nonexistent/c.yaml"),
    ],
)
def test_mistakes_are_one_line_that_names_them(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "1: 2", "\x00"])
def test_config_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        parse("--config", str(path))


def test_byte_counts() -> None:
    assert [byte_count(t) for t in ("17", "2k", "1.5KiB", "3MB", "4 GiB", "5g", "6Ti", "7TB")] == [
        17,
        2_000,
        1536,
        3_000_000,
        4 << 30,
        5_000_000_000,
        6 << 40,
        7 * 10**12,
    ]
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count("-1")
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count("1i")


def test_repeat_flags_give_the_same_configuration_without_secrets(tmp_path: Path) -> None:
    parser = Parser(prog="longturn test", allow_abbrev=False)
    add_config_flags(parser)
    given = ["--threads", "2", "--no-enable-prefix-caching", "--weights", "fp32", "--served-model-name", "a b"]
    private = ["--api-key", "secret", "--cache-dir", str(tmp_path), "--set", "server.api_keys=[secret]"]
    flags = repeat_flags(parser.parse_args([*given, "--set", "cache.memory_bytes=64MiB", *private]))
    assert parse(*flags) == parse(*given, "--set", "cache.memory_bytes=64MiB")
    assert "secret" not in str(flags) and str(tmp_path) not in str(flags)
    assert repeat_flags(parser.parse_args(["--config", "/home/me/c.yaml"])) == ["--config", "c.yaml"]
