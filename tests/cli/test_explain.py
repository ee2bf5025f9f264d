from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longturn.cli import explain_result, explain_run
from longturn.cli.config_text import changed_settings
from longturn.cli.explain_plan import compare, run_digest
from longturn.cli.explain_run import RunError, check_load
from longturn.cli.main import main
from longturn.config import EngineConfig, ModelConfig, ServerConfig
from longturn.errors import ConfigError
from longturn.report.explanation import explanation_from_json, explanation_to_json, load_explanation
from longturn.report.explanation_page import render_explanation
from longturn.report.figures_of import figure_kind, figure_of
from longturn.report.point import Point, Validity, save_point
from longturn.report.schema import ResultError
from tests.bench.fake_server import FakeServer, running
from tests.report.points import changed, metrics, point
from tests.report.test_page import read

SWITCHES = ["--switch", "prefix_caching=false:true", "--switch", "run_ahead=false:true"]


class Bench:
    """Stands for servers and loads: the throughput of a configuration is a function of its settings."""

    def __init__(self, total: Callable[[EngineConfig, int], float], stop_after: int | None = None) -> None:
        self.total = total
        self.stop_after = stop_after
        self.stop: BaseException = KeyboardInterrupt()
        self.labels: list[str] = []

    def measure(
        self, config: EngineConfig, load: list[str], label: str, flags: dict[str, str], tick: Callable[[], None]
    ) -> Point:
        if self.stop_after is not None and len(self.labels) >= self.stop_after:
            raise self.stop
        self.labels.append(label)
        total = self.total(config, self.labels.count(label))
        return point(label, 1, total, total / 100, flags={**flags, "explain.wall_s": str(10.0 * len(self.labels))})


def product(config: EngineConfig, run: int) -> float:
    """Prefix caching triples, run-ahead adds a tenth, both together are worth a fifth more; runs differ by 1 %."""
    caching, ahead = config.cache.prefix_caching, config.scheduler.run_ahead
    factor = (3.0 if caching else 1.0) * (1.1 if ahead else 1.0) * (1.2 if caching and ahead else 1.0)
    return 1000.0 * factor * (1.01 if run % 2 else 1 / 1.01)


def use(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    monkeypatch.setattr(explain_result, "measure", bench.measure)
    return bench


def explain(out: Path, *more: str) -> int:
    return main(["explain", *SWITCHES, "--repeat", "2", "--metric", "total", "--out", str(out), *more])


# --- measuring -------------------------------------------------------------------------------------------------------


def test_every_combination_is_measured_in_turns_and_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = use(monkeypatch, Bench(product))
    assert explain(tmp_path) == 0
    once = ["A", "B", "A with prefix_caching", "A with run_ahead"]
    assert bench.labels == once * 2  # all once before any again
    (found,) = load_explanation(tmp_path / "explanation.json").figures
    assert (found.a, found.b) == pytest.approx((1000.0, 3960.0))
    caching, ahead = found.switches
    assert (caching.name, ahead.name) == ("prefix_caching", "run_ahead")
    for effect, ratio in (
        (found.total, 3.96),
        (caching.on_alone, 3.0),
        (caching.off_alone, 3.6),
        (caching.in_sequence, 3.0),
        (ahead.on_alone, 1.1),
        (ahead.off_alone, 1.32),
        (ahead.in_sequence, 1.32),
        (caching.mean_of_orders, math.sqrt(3.0 * 3.6)),
        (found.interaction, 1.2),
    ):
        assert effect is not None
        assert effect.ratio == pytest.approx(ratio)
    assert caching.in_sequence is not None
    assert caching.in_sequence.share == pytest.approx(math.log(3) / math.log(3.96))
    # Each run lies log 1.01 from its mean of two: variance 2 log(1.01)^2 with 4 degrees of freedom.
    assert found.run_spread == pytest.approx(math.sqrt(2) * math.log(1.01))
    assert found.degrees_of_freedom == 4
    shown = capsys.readouterr().out
    # 3 times and over exp(2.776 * sqrt(2) * log 1.01): 1.0398
    assert "prefix_caching  3.00× [2.89-3.12]   80 %" in shown
    assert "1.20× [1.14-1.27], +13 % of the whole: together they do more than the product." in shown
    assert (tmp_path / "index.html").as_uri() in shown


def test_an_effect_within_the_spread_is_called_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wobbly(config: EngineConfig, run: int) -> float:
        ahead = 1.02 if config.scheduler.run_ahead else 1.0
        return 1000.0 * (3.0 if config.cache.prefix_caching else 1.0) * ahead * (1.05 if run == 1 else 1 / 1.05)

    use(monkeypatch, Bench(wobbly))
    assert explain(tmp_path) == 0
    (found,) = load_explanation(tmp_path / "explanation.json").figures
    ahead = found.switches[1].on_alone
    assert ahead is not None
    assert (ahead.verdict, found.interaction and found.interaction.verdict) == ("noise", "noise")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run_ahead"))
    assert line.split()[1:3] == ["1.02×", "[0.842-1.24]"]
    assert line.count("noise") == 4


def test_an_interrupted_explanation_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Bench(product, stop_after=1))
    assert explain(tmp_path) == 130
    assert "1 of 8 runs are saved" in capsys.readouterr().err
    assert not (tmp_path / "explanation.json").exists()  # B has no run
    use(monkeypatch, Bench(product, stop_after=2))
    assert explain(tmp_path) == 130
    assert "3 of 8 runs are saved" in capsys.readouterr().err
    partial = load_explanation(tmp_path / "explanation.json").figures[0]
    assert partial.total.verdict == "unknown"
    assert partial.switches[1].on_alone is None
    again = use(monkeypatch, Bench(product))
    assert explain(tmp_path) == 0
    assert len(again.labels) == 5
    # More repeats keep what there is; another load or setting does not.
    again = use(monkeypatch, Bench(product))
    assert explain(tmp_path, "--repeat", "3") == 0
    assert len(again.labels) == 4
    assert explain(tmp_path, "--load", "agentx --duration 5") == 0
    assert len(again.labels) == 4 + 8


def test_a_run_that_fails_ends_it_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = use(monkeypatch, Bench(product, stop_after=2))
    bench.stop = RunError("A with prefix_caching: it broke")
    assert explain(tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "longturn: error: A with prefix_caching: it broke"
    assert len(load_explanation(tmp_path / "explanation.json").runs) == 2


def test_a_plan_measures_nothing_and_knows_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = use(monkeypatch, Bench(product, stop_after=3))
    assert explain(tmp_path, "--dry-run") == 0
    assert bench.labels == []
    assert "8 runs to take, in a time that the first one will tell" in capsys.readouterr().out
    assert explain(tmp_path, "--dry-run", "--load", "agentx --duration 90", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["runs_to_take"], plan["seconds"]) == (8, 720.0)
    explain(tmp_path)
    capsys.readouterr()
    assert explain(tmp_path, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "A: 1 of 2 runs measured" in shown
    assert "A with run_ahead: 0 of 2 runs measured" in shown
    assert "5 runs to take, in about 2 min, 20 s each" in shown


def run_once(monkeypatch: pytest.MonkeyPatch, load: list[str], *, caching: bool = True) -> Point:
    @contextmanager
    def fake(config: EngineConfig, *, on_wait: Callable[[], None]) -> Iterator[str]:
        with running(FakeServer(caching=config.cache.prefix_caching)) as url:
            yield url

    monkeypatch.setattr(explain_run, "local_server", fake)
    config = compare(f"prefix_caching={str(caching).lower()}", None, ["run_ahead=true:false"]).a
    return explain_run.measure(config, load, "A", changed_settings(config), lambda: None)


def test_a_run_is_a_server_and_a_load_that_give_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    on = run_once(monkeypatch, ["replay", "--pause-scale", "0"])
    off = run_once(monkeypatch, ["replay", "--pause-scale", "0"], caching=False)
    assert on.metrics.requests == off.metrics.requests == 12
    assert on.metrics.cached_tokens and not off.metrics.cached_tokens
    assert (off.configuration, off.flags["cache.prefix_caching"]) == ("A", "false")
    assert "cache.prefix_caching" not in on.flags
    assert re.fullmatch(r"\d+\.\d+", on.flags[explain_run.WALL])
    trees = run_once(monkeypatch, ["agentx", "--duration", "0.3", "--concurrency", "2"])
    assert (trees.concurrency, trees.traces.preset, trees.engine.name) == (2, "quick", "longturn")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (["agentx", "--duration", "0.2", "--concurrency", "1,2"], "gives 2 points, and an explanation needs one"),
        (
            ["replay", "--session", "missing.json"],
            "`longturn bench replay --session missing.json` ended with exit code 2",
        ),
    ],
)
def test_a_load_that_gives_no_point_or_several(monkeypatch: pytest.MonkeyPatch, load: list[str], message: str) -> None:
    with pytest.raises(RunError, match=re.escape(message)):
        run_once(monkeypatch, load)


# --- what the command line means -------------------------------------------------------------------------------------


def test_configurations_come_from_files_options_and_switches(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cache:\n  prefix_caching: false\nserver:\n  port: 9000\n")
    found = compare(str(file), "weights=fp32,max_running=4", ["run_ahead=true:false"])
    assert found.names == ["run_ahead", "weights", "prefix_caching", "max_running"]
    middle = found.config(frozenset({"weights", "run_ahead"}))
    assert (middle.model.weights, middle.scheduler.run_ahead) == ("fp32", False)
    assert (middle.cache.prefix_caching, middle.scheduler.max_running) == (False, 16)
    assert (found.config(frozenset()).server.port, found.config(frozenset()).cache.prefix_caching) == (9000, False)
    assert changed_settings(found.b) == {
        "model.weights": "fp32", "scheduler.max_running": "4", "scheduler.run_ahead": "false",
    }  # fmt: skip


def test_keys_and_folders_are_not_shown() -> None:
    config = EngineConfig(model=ModelConfig(path="/home/someone/model.gguf"), server=ServerConfig(api_keys=("secret",)))
    assert changed_settings(config) == {"model.path": "model.gguf", "server.api_keys": "(not shown)"}


def test_settings_thrown_together_and_the_order() -> None:
    options = "weights=fp32,prefix_caching=false,max_running=4"
    found = compare(options, "defaults", [], ["weights,max_running"], ["prefix_caching"])
    assert found.names == ["prefix_caching", "weights+max_running"]
    both = found.config(frozenset({"weights+max_running"}))
    assert (both.model.weights, both.scheduler.max_running, both.cache.prefix_caching) == ("auto", 16, False)
    assert [found.label(on) for on in found.combinations()] == [
        "A", "B", "A with prefix_caching", "A with weights+max_running",
    ]  # fmt: skip


def test_a_run_is_known_by_what_decides_it() -> None:
    base = EngineConfig()
    elsewhere = compare("port=9000", "port=9000,run_ahead=false", []).a
    assert run_digest(base, "replay", "1") == run_digest(elsewhere, "replay", "1")
    names = {run_digest(base, "replay", "1"), run_digest(base, "replay", "2"), run_digest(base, "agentx", "1")}
    assert len(names | {run_digest(compare("seed=1", None, ["run_ahead=true:false"]).a, "replay", "1")}) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(None, None, []), "A and B are the same configuration"),
        (lambda: compare("port=1", "port=2", []), "A and B are the same configuration"),
        (lambda: compare("nonsense", None, []), "A: 'nonsense' is no file of settings"),
        (lambda: compare("speed=3", None, []), "A: unknown setting 'speed'"),
        (lambda: compare("dtype=fp32,weights", None, []), "is no file of settings"),
        (lambda: compare(None, None, ["run_ahead"]), "--switch needs NAME=OFF:ON"),
        (lambda: compare(None, None, ["run_ahead=maybe:true"]), "scheduler.run_ahead"),
        (lambda: compare(None, None, ["run_ahead=true:true"]), "same value off and on"),
        (lambda: compare(None, "run_ahead=false", [], ["weights,run_ahead"]), "'model.weights' does not differ"),
        (lambda: compare(None, "run_ahead=false", [], ["run_ahead", "run_ahead"]), "is in two groups"),
        (lambda: compare(None, "run_ahead=false", [], [], ["weights"]), "--order: no switch 'weights'"),
        (lambda: check_load([]), "--load starts with agentx or replay, not ''"),
        (lambda: check_load(["quality"]), "not 'quality'"),
        (lambda: check_load(["replay", "--out=x"]), "--out is set by explain"),
        (lambda: check_load(["replay", "--lane", "2"]), "unrecognized arguments: --lane 2 (see `longturn bench replay"),
        (
            lambda: check_load(["agentx", "--concurrency", "1,2"]),
            "--load: an explanation needs one concurrency, not 1,2",
        ),
        (lambda: check_load(["agentx", "--duration", "0"]), "--duration must be more than 0, not 0.0"),
        (lambda: check_load(["agentx", "--max-context", "1"]), "--max-context must be at least 2, not 1"),
        (lambda: compare(None, "run_ahead=false", [], [], ["run_ahead", "run_ahead"]), "'run_ahead' is there twice"),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()


# --- points that exist -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Points of two flags in all four states, one of them twice, and some that do not belong."""
    totals = {("off", "1"): 100.0, ("on", "1"): 200.0, ("off", "4"): 150.0, ("on", "4"): 240.0}
    for (cache, ahead), total in totals.items():
        made = point(f"{cache}{ahead}", 2, total, 50.0, flags={"cache": cache, "ahead": ahead, "run_id": cache + ahead})
        save_point(made, tmp_path / f"{cache}{ahead}.json")
    twice = point("again", 2, 100.0 * 1.02, 50.0, flags={"cache": "off", "ahead": "1", "run_id": "x"})
    save_point(twice, tmp_path / "again.json")
    save_point(changed(twice, concurrency=4), tmp_path / "other-concurrency.json")
    save_point(changed(twice, flags={"cache": "half", "ahead": "1"}), tmp_path / "other-state.json")
    save_point(changed(twice, flags={**twice.flags, "extra": "1"}), tmp_path / "other-flag.json")
    return tmp_path


def test_two_points_are_explained_by_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [str(folder / "off1.json"), str(folder / "on4.json")]
    out = ["--metric", "total", "--out", str(folder / "out"), "--json"]
    assert main(["explain", *ends, "--points", str(folder), *out]) == 0
    made = explanation_from_json(capsys.readouterr().out.encode())
    assert {run.on: len(run.points) for run in made.runs} == {
        (): 2, ("cache", "ahead"): 1, ("cache",): 1, ("ahead",): 1,
    }  # fmt: skip
    (found,) = made.figures
    assert found.a == pytest.approx(100.0 * math.sqrt(1.02))
    assert found.interaction is not None
    assert found.interaction.ratio == pytest.approx(240 * 100 * math.sqrt(1.02) / (200 * 150))
    # Without the others there is the whole ratio, and no part of it.
    assert main(["explain", *ends, *out]) == 0
    (found,) = explanation_from_json(capsys.readouterr().out.encode()).figures
    assert found.total.ratio == pytest.approx(2.4)
    assert [one.on_alone for one in found.switches] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{f}/off1.json", "{f}/again.json"], "A and B have the same flags"),
        (["{f}/off1.json", "defaults"], "two points or two configurations"),
        (["{f}/off1.json", "{f}/on1.json", "--switch", "run_ahead=true:false"], "--switch and --together"),
        (["{f}/off1.json", "{f}/other-concurrency.json", "--order", "x"], "A and B have the same flags"),
        (["{f}/off1.json", "{f}/on4.json", "--order", "x"], "--order: no switch 'x'"),
        (["{f}/off1.json", "{f}/on4.json", "--points", "{f}/none.json"], "none.json: No such file"),
        (["defaults", "run_ahead=false", "--points", "{f}"], "--points is for two points"),
        (["--metric", "speed"], "no figure 'speed'"),
        (["--metric", "ttft.p80"], "no figure 'ttft.p80'"),
        (["--repeat", "0"], "--repeat must be at least 1"),
    ],
)
def test_bad_points(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled = [argument.replace("{f}", str(folder)) for argument in arguments]
    assert main(["explain", *filled, "--out", str(folder / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_points_of_other_conditions_are_not_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = point("b", 2, 240.0, 50.0, chip="B300", flags={"cache": "on", "ahead": "4"})
    save_point(other, folder / "chip.json")
    assert main(["explain", str(folder / "off1.json"), str(folder / "chip.json")]) == 2
    assert "A and B differ in more than flags: chip" in capsys.readouterr().err


# --- figures and the page --------------------------------------------------------------------------------------------


def test_figures_by_name() -> None:
    made = point("c", 1, 500.0, 40.0)
    values = {
        name: figure_of(made, figure_kind(name)) for name in ("total", "output", "hit_rate", "ttft.p50", "job.p90")
    }
    assert values == {"total": 500.0, "output": 5.0, "hit_rate": 8.7 / 9, "ttft.p50": 750.0, "job.p90": 1.75e6}
    assert figure_of(made, figure_kind("interactivity.p90")) == pytest.approx(40.0)
    bare = changed(made, metrics=metrics(None, 40.0, interactivity=None, ttft_ms=None, jobs=None))
    for name in ("total", "interactivity.p50", "ttft.p50", "job.mean"):
        assert figure_of(bare, figure_kind(name)) is None
    assert [figure_kind(name).higher_is_better for name in ("total", "ttft.p90")] == [True, False]


def test_the_page_says_everything_and_keeps_text_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Bench(product))
    assert explain(tmp_path, "--metric", "ttft.p50") == 0
    made = load_explanation(tmp_path / "explanation.json")
    text = read((tmp_path / "index.html").read_text()).text
    for part in ("3.96× [3.81-4.12]", "prefix_caching", "Interaction", "noise", "cache.prefix_caching", "P50 ttft"):
        assert part.lower() in text.lower(), part
    evil = '</style><img src=x onerror=alert(1)>"&'
    dirty = msgspec.structs.replace(
        made,
        a=evil,
        command=evil,
        load=evil,
        model=evil,
        switches=(msgspec.structs.replace(made.switches[0], name=evil), made.switches[1]),
        figures=tuple(
            msgspec.structs.replace(
                figure, switches=(msgspec.structs.replace(figure.switches[0], name=evil), *figure.switches[1:])
            )
            for figure in made.figures
        ),
    )
    page = read(render_explanation(dirty))
    assert "onerror" not in {name for name, _ in page.attributes}
    assert evil in page.text
    assert not re.search(r"https?://|@import|url\(|<script", render_explanation(made))


def test_a_report_shows_an_explanation_beside_its_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Bench(product))
    assert explain(tmp_path / "e") == 0
    page = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "e"), "--out", str(page)]) == 0
    text = read(page.read_text()).text
    assert "8 points of 4 configurations" in text
    assert "Where a ratio comes from" in text and "3.96× [3.81-4.12]" in text
    assert main(["report", str(tmp_path / "e" / "points"), "--out", str(page)]) == 0
    assert "Where a ratio comes from" not in page.read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "e" / "explanation.json"), "--out", str(page)]) == 2
    assert "shown beside the points" in capsys.readouterr().err


def test_invalid_points_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(product)

    def measure(*args: Any) -> Point:
        made = bench.measure(*args)
        return made if made.configuration != "B" else changed(made, validity=Validity(valid=False, reasons=("cut",)))

    monkeypatch.setattr(explain_result, "measure", measure)
    assert explain(tmp_path) == 0
    assert "invalid points among the runs of: prefix_caching + run_ahead" in capsys.readouterr().out
    assert "invalid: prefix_caching + run_ahead" in (tmp_path / "index.html").read_text()


def test_the_record_survives_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Bench(product))
    assert explain(tmp_path) == 0
    made = load_explanation(tmp_path / "explanation.json")
    assert explanation_from_json(explanation_to_json(made)) == made
    with pytest.raises(ResultError, match="not a longturn-explanation file"):
        explanation_from_json(b'{"kind": "longturn-point"}')


def test_a_load_with_an_open_quote_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(tmp_path, "--load", 'agentx "--seed 1') == ConfigError.exit_code
    assert capsys.readouterr().err == 'longturn: error: --load: No closing quotation: agentx "--seed 1\n'


def test_a_figure_asked_for_twice_is_explained_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, Bench(product))
    assert explain(tmp_path, "--metric", "total", "--metric", "output") == 0
    assert [figure.figure for figure in load_explanation(tmp_path / "explanation.json").figures] == ["total", "output"]
