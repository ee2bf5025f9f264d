"""What people type, pipe in and run out of: bytes that are no UTF-8, names that no file has, full disks."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from longturn import assemble
from longturn.bench.records import Answer, TurnRecord
from longturn.bench.replay import Replay
from longturn.bench.traces.load import load_shipped, shipped_traces
from longturn.cli import agentx, chat, local_server, quality, serve
from longturn.cli.agentx_target import OpenTarget
from longturn.cli.comparison import _levels, comparison_text
from longturn.cli.explain_plan import compare
from longturn.cli.main import main, verb_parser
from longturn.cli.named_traces import SHIPPED, named_traces
from longturn.cli.options import add_config_flags, check_number, config_from_args, config_from_options
from longturn.cli.results import make_run, result_table
from longturn.cli.terminal import size_text
from longturn.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, ServerConfig, config_from_dict
from longturn.errors import ConfigError, ModelError
from longturn.prepared import prepared_entry, require_writable
from longturn.report.explanation import explanation_from_json
from longturn.report.point import save_point
from longturn.report.schema import Result
from longturn.report.series import group
from longturn.source import resolve_source
from tests.report.points import point


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "replay", "--url", "http://h", "--title", "\udcff"], r"the argument '\udcff' is not UTF-8"),
        (["simulate", "sweep"], "unknown verb 'simulate sweep' (known: simulate alone, simulate validate, "),
        (["bench", "self-test", "--streams", "4097"], "--streams must be between 1 and 4096, not 4097"),
        (["bench", "agentx", "--url", "http://h", "--engine", ":1"], "--engine must be NAME or NAME:VERSION, not ':1'"),
        (["bench", "replay", "--url", "http://h", "--pause-scale", "inf"], "must be a number of at least 0, not inf"),
    ],
)
def test_one_line_that_names_it(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_output_into_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["bench", "--help"]) == 2  # short enough to wait in a buffer until the end
    assert capsys.readouterr().err == "longturn: error: the output: No space left on device\n"


@pytest.mark.parametrize("verb", [["report"], ["bench", "agentx", "--url", "http://h", "--traces"], ["explain"]])
def test_names_that_no_file_can_have(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert main([*verb, name]) == 2
    assert capsys.readouterr().err == f"longturn: error: {name}: File name too long\n"
    with pytest.raises(OSError, match="too long"):
        main([*verb, name, "--debug"])


def test_a_yaml_mistake_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {}\nscheduler: [1\n")
    assert main(["doctor", "--config", str(path)]) == 2
    line = capsys.readouterr().err
    assert f"{path}: not YAML: line 3, column 1: expected ',' or ']'" in line
    assert "unicode string" not in line


def test_byte_counts_in_files_have_units(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    path = tmp_path / "c.yaml"
    path.write_text("cache: {memory_bytes: 2Gi, host_memory_bytes: 5}\nserver: {max_body_bytes: '1000'}\n")
    config = config_from_args(parser.parse_args(["--config", str(path)]))
    sizes = (config.cache.memory_bytes, config.cache.host_memory_bytes, config.server.max_body_bytes)
    assert sizes == (2 << 30, 5, 1000)
    path.write_text("cache: &all {more: *all}\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'cache\.more'"):
        config_from_args(parser.parse_args(["--config", str(path)]))
    path.write_text("cache: {memory_bytes: lots}\n")
    with pytest.raises(ConfigError, match=r"'cache\.memory_bytes': 'lots' is not a number of bytes"):
        config_from_args(parser.parse_args(["--config", str(path)]))


def test_a_default_of_nothing_has_no_unit() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    assert "keeps none. [0]" in " ".join(parser.format_help().split())


def test_numbers_that_are_none() -> None:
    check_number("--x", 3.5, 1)
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ConfigError, match="--x must be a number of at least 1"):
            check_number("--x", value, 1)


def test_options_by_short_name() -> None:
    assert config_from_options(["prefix-caching=false", "threads=2"], "--a").cache.prefix_caching is False
    for options, message in ((["port"], "--a needs NAME=VALUE"), (["prt=1"], "--a: unknown setting 'prt'")):
        with pytest.raises(ConfigError, match=message):
            config_from_options(options, "--a")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no-such-owner/Model-7B", "`hf download no-such-owner/Model-7B --local-dir DIR`"),
        ("no-such-owner/sub/Model-7B", "no such model file or directory$"),
        ("x" * 300, "File name too long"),
    ],
)
def test_models_that_are_not_there(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_source(ModelConfig(path=path))


@pytest.mark.parametrize("folder", ["/proc/none", "/tmp/" + "x" * 300])
def test_cache_directories_that_no_file_system_makes(folder: str) -> None:
    for attempt in (lambda: require_writable(folder), lambda: prepared_entry(folder, "key", lambda path: None)):
        with pytest.raises(ConfigError, match=re.escape(f"cache directory {folder} cannot be written")):
            attempt()


def test_a_missing_file_of_a_builder_is_no_complaint_about_the_cache(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "never-written").read_bytes()

    with pytest.raises(FileNotFoundError):
        prepared_entry(tmp_path, "key", build)


def test_piped_bytes_that_are_no_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n\n na\xc3\xafve\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", text)
    assert list(chat._lines(False)) == ["caf\ufffd", " naïve"]


def test_a_new_conversation_counts_from_nothing() -> None:
    conversation = chat._Conversation(None, turns=3, prompt_tokens=100, cached_tokens=50, output_tokens=7)
    conversation.reset()
    assert conversation.summary() == "0 turns: 0 prompt tokens, 0 cached, 0 output"


def test_a_wrong_point_is_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(args: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(quality, "_measure", never)
    (tmp_path / "other.json").write_text("{}")
    for name in ("none.json", "other.json"):
        assert main(["bench", "quality", "--attach", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err


def test_two_single_points_have_two_edges_not_four() -> None:
    from longturn.bench.frontier import frontier_of

    one, other = frontier_of([(10.0, 100.0)]), frontier_of([(20.0, 50.0)])
    assert one is not None
    assert other is not None
    assert _levels([one, other]) == [10.0, 20.0]


def test_long_names_stand_before_the_tables_once() -> None:
    from longturn.report.series import Series

    names = ["a" * 60, "short"]
    series = [Series(name, "measured", ()) for name in names]
    matched = {"name": "short", "interactivity": 5.0, "total_tokens_per_s_per_chip": 7.0, "place": "inside"}
    matched |= {"baseline_total_tokens_per_s_per_chip": 8.0, "baseline_place": "inside", "ratio": 0.9, "clamped": False}
    text = comparison_text([], series, {"statistic": "p90", "baseline": names[0], "matched": [matched]})
    assert text.startswith(f"[1] {names[0]}\n[2] short\n\nlatencies")
    assert text.count(names[0]) == 1
    assert "against [1]:" in text
    assert max(map(len, text.splitlines()[3:])) < 100


def test_curves_of_an_explanation_say_what_they_are() -> None:
    found = compare(None, None, ["prefix_caching=false:true", "run_ahead=false:true"])
    everything = frozenset(found.names)
    assert found.curve(frozenset()) == "prefix_caching=false, run_ahead=false"
    assert found.curve(frozenset({"run_ahead"})) == "prefix_caching=false"
    assert found.curve(everything) == "defaults"
    long = compare("served_name=" + "x" * 80, None, ["run_ahead=false:true"])
    assert long.curve(frozenset()) == "A"


def test_a_slow_start_is_explained_and_a_ready_server_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pytest.importorskip("longturn.server.run")
    explained: list[str] = []

    def serve_nothing(config: EngineConfig, *, on_ready: Callable[[str], None]) -> None:
        deadline = time.monotonic() + 10
        while "starting" not in "".join(explained) and time.monotonic() < deadline:
            time.sleep(0.005)
            explained.append(capsys.readouterr().err)
        on_ready("http://h:1")

    monkeypatch.setattr(run, "serve", serve_nothing)
    monkeypatch.setattr(serve, "_PATIENCE_S", 0.01)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("longturn.assemble.served_model", lambda config: ("some-model", "/m", 64))
    assert main(["serve"]) == 0
    assert "longturn: starting; the first start" in "".join(explained)
    assert capsys.readouterr().out == "Longturn serves some-model on http://h:1 (Ctrl-C ends)\n"


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 2_530_528, 97_600_000, 71_000_000_000, 306_000)] == [
        "0.0 kB",
        "2.53 MB",
        "97.6 MB",
        "71.0 GB",
        "306.0 kB",
    ]


def test_points_of_an_engine_of_ones_own_hold_its_settings() -> None:
    from longturn.bench.presets import rules_of
    from longturn.bench.target import TargetModel
    from longturn.cli.agentx_setting import make_setting
    from longturn.cli.config_text import engine_settings, told_settings

    parser = verb_parser("agentx", "longturn bench agentx", agentx, "")
    args = parser.parse_args(["--inproc", "--set", "cache.prefix_caching=false", "--model", "models/m"])
    config = EngineConfig(
        model=ModelConfig(path="models/m", served_name="m"),
        cache=CacheConfig(prefix_caching=False),
        server=ServerConfig(api_keys=("secret",)),
        cache_dir="/home/someone",
    )
    settings = engine_settings(config)
    assert settings == {"cache.prefix_caching": "false"}
    # A server shows the same tree, its secrets hidden; one of a later version may show what is not known here.
    shown = dataclasses.asdict(config) | {"server": {"api_keys": "***"}, "cache_dir": "***"}
    assert told_settings(shown) == settings
    assert told_settings({**shown, "scheduler": {"of_tomorrow": 1}}) == {}
    opened = SimpleNamespace(kind="inproc", model=TargetModel("m", weights="packed"), settings=settings)
    made = make_setting(args, rules_of("quick", None), [], 0, cast(OpenTarget, opened), 1, "run")
    assert made.settings == settings
    assert made.configuration == "m, no HTTP, prefix_caching=false"


def test_what_happened_in_a_run_explains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(name: str, total: float, **flags: str) -> str:
        path = tmp_path / f"{name}.json"
        save_point(point(name, 1, total, 10.0, flags={"duration_s": "60", **flags}), path)
        return str(path)

    without = save("without", 100.0, server_state="5 samples", busy="0.9", **{"cache.prefix_caching": "false"})
    normal = save("normal", 200.0, server_state="7 samples", busy="0.2", evictions="4")
    longer = save("longer", 210.0, duration_s="600")
    again = save("again", 205.0, server_state="9 samples")
    out = ["--metric", "total", "--json", "--out", str(tmp_path / "out")]
    assert main(["explain", without, normal, "--points", again, *out]) == 0
    made = explanation_from_json(capsys.readouterr().out.encode())
    assert [switch.name for switch in made.switches] == ["cache.prefix_caching"]
    assert [len(run.points) for run in made.runs] == [1, 2]
    assert main(["explain", normal, again, *out]) == 2
    assert "A and B have the same flags" in capsys.readouterr().err
    assert main(["explain", without, longer, *out]) == 2
    assert "A and B differ in more than flags: duration_s" in capsys.readouterr().err


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("longturn.executor.threads.usable_cores", lambda: 3)
    assert [assemble._threads(ExecutorConfig(threads=count)) for count in (None, 2, 3)] == [3, 2, 3]
    assert not caplog.records
    assert assemble._threads(ExecutorConfig(threads=4)) == 4
    assert "executor.threads is 4, more than the usable cores (3)" in caplog.text


def test_a_server_of_ones_own_takes_no_part_in_what_is_for_the_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`longturn chat --config serve.yaml` beside the server of that file: no TLS, and none of its ports."""
    served: list[EngineConfig] = []

    class Ended:
        returncode = 1

        def __init__(self, command: list[str], **options: object) -> None:
            served.append(config_from_dict(EngineConfig, json.loads(Path(command[-1]).read_text())))

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(local_server.subprocess, "Popen", Ended)
    keys = tmp_path / "keys"
    keys.write_text("# of the agents\nfirst\nsecond\n")
    outside = ServerConfig(
        host="0.0.0.0", port=8000, ssl_certfile="c.pem", ssl_keyfile="k.pem", api_keys_file=str(keys)
    )
    config = EngineConfig(server=outside, cache=CacheConfig(events_endpoint="tcp://*:5557"), seed=7)
    with (
        pytest.raises(local_server.ServerStartError, match="exit code 1"),
        local_server.local_server(config),
    ):
        raise AssertionError("it did not start")
    (found,) = served
    assert (found.server.host, found.server.ssl_certfile, found.server.ssl_keyfile) == ("127.0.0.1", None, None)
    assert found.server.port not in (0, 8000)
    assert found.cache.events_endpoint is None
    assert (found.seed, found.server.api_keys_file) == (7, str(keys))
    assert local_server.client_key(config) == "first"
    assert local_server.client_key(EngineConfig()) is None
    both = ServerConfig(api_keys=("given",), api_keys_file=str(keys))
    assert local_server.client_key(EngineConfig(server=both)) == "given"


def test_no_answer_is_no_short_wait() -> None:
    failed = Answer(intended_ns=0, sent_ns=0, end_ns=10**9, error="timed out")
    run = make_run("measured", "http://h", Replay((TurnRecord("s", 0, "task", 0, failed),), 2, False))
    foot = result_table(cast(Result, SimpleNamespace(runs=(run,)))).splitlines()[-1]
    assert foot.split() == ["all", "0", "0", "0", "–", "–"]


@pytest.mark.parametrize("argv", [["inspect"], ["convert", "a"], ["make-checkpoint"]])
def test_homes_of_nobody(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "~no-such-user/x"]) == 2
    assert "~no-such-user/x: no such home directory" in capsys.readouterr().err


def test_no_home_to_cache_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="no home directory to cache in; name a directory with 'cache_dir'"):
        require_writable(None)


def test_traces_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(SHIPPED) == shipped_traces()
    assert main(["trace", "stat", "workshp.json"]) == 2
    known = "nor a trace of the package (arrivals.jsonl, desk.jsonl"
    assert f"workshp.json: no such file or folder, {known}" in capsys.readouterr().err
    assert main(["trace", "stat", "folder/none.json"]) == 2
    assert "folder/none.json: no such file or folder\n" in capsys.readouterr().err
    trees = named_traces(["desk.jsonl", "workshop.json", "desk.jsonl"], split=True)
    assert len(trees) == len(load_shipped("desk.jsonl")) + 1


def test_what_nobody_has_told_is_in_no_name() -> None:
    told = point("m", 1, 100.0, 10.0)
    untold = msgspec.structs.replace(
        told,
        engine=msgspec.structs.replace(told.engine, name="unknown", version="unknown"),
        model=msgspec.structs.replace(told.model, quantisation="unknown", kv_cache=None),
    )
    named, bare = group([told, untold])
    assert named.points != bare.points  # they do not share a curve for it
    assert f"{told.engine.name} {told.engine.version}" in named.name
    assert "unknown" not in bare.name
    assert bare.name == "m"
