"""The verb: points and page, sweeps, what-ifs, validation, and bad input in one line each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from longturn.cli import simulate_run
from longturn.cli.main import SIMULATE_VERBS, main
from longturn.cli.simulate_setup import SimulationPlan
from longturn.cli.simulate_sweep import winners
from longturn.report.point import Point, load_point
from longturn.report.schema import ResultError
from longturn.simulate.linear import steps_platform_text
from tests.bench.make_traces import row, session, shared
from tests.simulate.test_linear import PLATFORM


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A session of ten turns of some thousand tokens."""
    path = tmp_path / "small.json"
    rows = [row(4.0 * n, list(range(60 + 12 * n)), api=1.0, out=40, block=64) for n in range(10)]
    path.write_text(json.dumps({**session(rows, block=64), "id": "small"}))
    return str(path)


def simulate(out: Path, trace: str, *more: str) -> int:
    load = ["--traces", trace, "--preset", "quick", "--duration", "20", "--out", str(out)]
    return main(["simulate", *load, *more])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) != 0
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("longturn: error: ") and "\n" not in shown
    return shown


def test_points_with_bands_and_a_page(tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    more = ["--layout", "tp4,dp2tp4", "--concurrency", "1,3", "--drafter", "eagle3-gqa-m3:3"]
    assert simulate(out, trace, *more, "--events", str(tmp_path / "events")) == 0
    shown = capsys.readouterr().out
    points = [load_point(path) for path in sorted(out.glob("*.json"))]
    assert len(points) == 4 and (out / "index.html").exists() and "m3 on gb300 dp2tp4" in shown
    assert "formats nvfp4, kernels vllm-0.24 of 2026-" in shown and "(--kernels: " in shown
    assert "drafter eagle3-gqa-m3:3\n" in shown
    for point in points:
        assert point.source == "simulated" and point.band is not None and 0 < point.band.relative < 1
        slow, fast, speeds = point.band.slow.interactivity, point.band.fast.interactivity, point.metrics.interactivity
        assert slow is not None and fast is not None and speeds is not None
        assert slow.p90 < speeds.p90 < fast.p90
        assert (point.speculation.mode, point.speculation.acceptance_length) == ("synthetic", 2.78)
        assert point.layout.tensor == 4 and point.platform.chips in (4, 8) and point.layout.data in (1, 2)
        assert point.client is not None and point.client.startswith("longturn-simulate ")
        assert str(tmp_path) not in point.command and "--layout" in point.command
    page = (out / "index.html").read_text()
    assert "simulated, steps ±" in page
    assert len((tmp_path / "events").read_text().splitlines()) > 20


def test_why_points_are_not_valid_stands_below_the_table(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--traces", trace, "--preset", "agentx", "--duration", "30", "--concurrency", "1,2", "--no-band"]
    assert main(["simulate", "--out", str(tmp_path / "out"), *more]) == 0
    shown = capsys.readouterr().out
    points = [load_point(path) for path in (tmp_path / "out").glob("*.json")]
    assert any(not point.validity.valid for point in points) and "possible" in shown and "–" in shown
    for reason in {reason for point in points for reason in point.validity.reasons}:
        assert sum(line.startswith("not valid") and line.endswith(reason) for line in shown.splitlines()) == 1


def test_the_same_command_twice_gives_the_same_figures_and_events(tmp_path: Path, trace: str) -> None:
    for name in ("one", "two"):
        assert simulate(tmp_path / name, trace, "--events", str(tmp_path / f"{name}.txt"), "--concurrency", "2") == 0
    one, two = (load_point(next((tmp_path / name).glob("*.json"))) for name in ("one", "two"))
    assert one.metrics == two.metrics and one.band == two.band and one.timeline == two.timeline
    assert (tmp_path / "one.txt").read_bytes() == (tmp_path / "two.txt").read_bytes()


def test_a_sweep_names_winners_and_what_was_left_out(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--sweep", "--chips", "4", "--concurrency", "1,2", "--at", "20", "--at", "100000", "--no-band", "--json"]
    assert simulate(tmp_path / "out", trace, *more, "--platform", "b300") == 0
    shown = json.loads(capsys.readouterr().out)
    layouts = {point["flags"]["layout"] for point in shown["points"]}
    assert layouts >= {"tp2", "ep4", "dep4"} and "tp1" not in layouts
    reached, beyond = shown["winners"]
    assert reached["configuration"] is not None and reached["ahead"] >= 1 and beyond["configuration"] is None
    assert simulate(tmp_path / "out", trace, "--sweep", "--chips", "2", "--concurrency", "1", "--platform", "b300") == 0
    text = capsys.readouterr().out
    assert "left out: m3 in layout tp1 does not fit on b300" in text and "frontier" in text


def test_a_load_that_cannot_begin_costs_its_own_point_alone(
    tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from longturn.cli import simulate_run
    from longturn.simulate.runner import SimulationError

    whole = simulate_run.simulate_variant

    def overloaded(plan: Any, variant: Any, lanes: int, **more: Any) -> Any:
        if lanes == 3 or (lanes == 2 and more.get("scale", 1.0) > 1.0):
            raise SimulationError("the warm-up took longer than 1 s")
        return whole(plan, variant, lanes, **more)

    monkeypatch.setattr(simulate_run, "simulate_variant", overloaded)
    assert simulate(tmp_path / "out", trace, "--concurrency", "1,2,3") == 0
    assert "left out: m3 on gb300 tp4, 3 trees: the warm-up took longer" in capsys.readouterr().out
    one, two = (load_point(path) for path in sorted((tmp_path / "out").glob("*.json")))
    assert one.band is not None and two.band is None
    load = ("--traces", trace, "--preset", "quick", "--duration", "20", "--out", str(tmp_path / "out"))
    assert "warm-up took longer" in refused(capsys, "simulate", *load, "--concurrency", "3")


def test_winners_by_hand(tmp_path: Path, trace: str) -> None:
    assert simulate(tmp_path / "out", trace, "--no-band", "--concurrency", "1") == 0
    base = load_point(next((tmp_path / "out").glob("*.json")))
    assert base.metrics.interactivity is not None

    def point(name: str, speed: float, rate: float) -> Point:
        import msgspec

        speeds = msgspec.structs.replace(base.metrics.interactivity, p90=speed)
        metrics = msgspec.structs.replace(base.metrics, interactivity=speeds, total_tokens_per_s=rate)
        return msgspec.structs.replace(base, configuration=name, metrics=metrics)

    points = [point("a", 50, 100), point("a", 100, 40), point("b", 80, 60), point("b", 120, 30)]
    at = {one["interactivity"]: one for one in winners(points, [50, 75, 110, 130])}
    assert (at[50]["configuration"], at[50]["next"]) == ("a", "b") and at[50]["ahead"] == pytest.approx(100 / 60)
    assert at[75]["configuration"] == "a" and at[75]["total_tokens_per_s_per_chip"] == pytest.approx(70)
    assert at[110]["configuration"] == "b" and at[110]["next"] is None and at[130]["configuration"] is None


def test_published_replays_are_judged_by_configuration_or_by_frontier(tmp_path: Path, trace: str) -> None:
    import msgspec

    from longturn.cli.simulate_replays import judged

    assert simulate(tmp_path / "out", trace, "--concurrency", "1") == 0
    base = load_point(next((tmp_path / "out").glob("*.json")))
    assert base.metrics.interactivity is not None and base.band is not None

    def point(trees: int, speed: float, rate: float) -> Point:
        def at(scale: float) -> dict[str, Any]:
            speeds = msgspec.structs.replace(base.metrics.interactivity, p90=speed * scale)
            return {"interactivity": speeds, "total_tokens_per_s": rate * scale}

        slow, fast = (msgspec.structs.replace(base.band.slow, **at(scale)) for scale in (0.8, 1.25))
        band = msgspec.structs.replace(base.band, slow=slow, fast=fast)
        metrics = msgspec.structs.replace(base.metrics, **at(1.0))
        return msgspec.structs.replace(base, concurrency=trees, metrics=metrics, band=band)

    published = [(74.2, 69_900), (98.9, 47_500), (157.2, 35_000), (194.9, 22_600), (248.8, 17_100), (265.3, 9_200),
                 (353.4, 5_600), (375.9, 2_900)]  # fmt: skip
    b300 = [point(n + 1, 1.5 * speed, 0.9 * rate) for n, (speed, rate) in enumerate(published)]
    other = [point(n + 1, 1.4 * speed, 1.1 * rate) for n, (speed, rate) in enumerate(published)]
    third = [point(n + 1, 3.0 * speed, 0.7 * rate) for n, (speed, rate) in enumerate(published)]
    found = {"m3-b300": [b300, other, third], "m3-vr": [[point(1, 150.0, 100_000)]]}
    found |= {"m3-gb200": [[point(1, 200.0, 40_000)]], "m3.1-vr": [[point(1, 700.0, 3_000)]]}
    results, lines = judged(found, [], 3600.0)
    by_name = {one["point"]: one for one in results}
    first = by_name["M3 on B300, AgentX, tp2, 24 trees"]
    assert first["tok_s_chip_error"] == pytest.approx(-0.1) and first["tok_s_user_error"] == pytest.approx(0.5)
    assert first["tok_s_user_seeds"] == pytest.approx([1.5 * 74.2, 1.4 * 74.2, 3 * 74.2]), "the median counts"
    ends = first["tok_s_chip_low"], first["tok_s_chip_high"]
    assert ends == pytest.approx((0.9 * 0.8 * 69_900, 0.9 * 1.25 * 69_900)), "of the first seed"
    assert any("50% of tok/s/user and 10% of tok/s/chip; 0 and 8 of 8 within 25%; in the published" in x for x in lines)
    ratio = by_name["M3, Vera Rubin over GB200 with TensorRT-LLM's experts, at 150"]
    assert ratio["predicted"] == pytest.approx(2.5) and ratio["high"] == pytest.approx(2.5 * 1.25 / 0.8)
    assert ratio["low"] is None, "slower by a fifth, Vera Rubin does not reach 150"
    fastest = by_name["M3.1-Flash, Vera Rubin, fastest"]
    assert (fastest["predicted"], fastest["low"], fastest["high"]) == pytest.approx((700, 560, 875))
    swapped = judged({"m3-b300": [[b300[1], b300[0], *b300[2:]]]}, [], 3600.0)[1]
    assert any("not in the published order" in line for line in swapped)
    assert any("no figures" in line for line in judged({"m3-b300": [[base_without(base), *b300[1:]]]}, [], 3600.0)[1])


def base_without(point: Point) -> Point:
    """The point with no request that says how fast answers are."""
    import msgspec

    return msgspec.structs.replace(point, metrics=msgspec.structs.replace(point.metrics, interactivity=None))


def test_a_published_replay_is_run_in_its_configurations(
    monkeypatch: pytest.MonkeyPatch, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a short trace for a minute: the figures mean nothing, which runs are made does."""
    from longturn.cli import simulate_replays

    case = simulate_replays.CASES["m3-b300"]
    at = case.words.index("--like")
    words = (*case.words[:at], *case.words[at + 2 :], "--preset", "quick")
    monkeypatch.setattr(simulate_replays, "CASES", {"m3-b300": dataclasses.replace(case, words=words)})
    asked: list[tuple[str, str]] = []
    run_points = simulate_run.run_points

    def counting(plan: SimulationPlan, **more: Any) -> list[Point]:
        asked.append((plan.args.layout, plan.args.concurrency))
        assert plan.args.sets[-1] == "scheduler.chunk_tokens=512" and plan.seed in (42, 43)
        return run_points(plan, **more)

    monkeypatch.setattr(simulate_run, "run_points", counting)
    more = ["--case", "m3-b300", "--duration", "60", "--platform", "b300", "--seeds", "2"]
    assert main(["simulate", "validate", "--agentx", trace, *more, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = shown["agentx"]
    assert asked == [("tp2", "24"), ("tp4", "30"), ("tp4", "1,5,10,15,20"), ("tp8", "1")] * 2
    assert [one["point"].split(", ")[-2:] for one in found][:3] == [["tp2", "24 trees"], ["tp4", "30 trees"],
                                                                    ["tp4", "20 trees"]]  # fmt: skip
    assert all(len(one["tok_s_user_seeds"]) == 2 for one in found) and shown["agentx_sessions"]["turns_mean"] > 1
    assert main(["simulate", "validate", "--agentx", trace, *more]) == 0
    text = capsys.readouterr().out
    assert "sessions as those of AgentX sessions cc-traces-weka-062126" in text and "2 seeds, 60 s a point" in text
    assert text.startswith("sessions as those") and "no bands were made: --band" in text


def test_sessions_like_a_corpus(tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown 'x'" in refused(capsys, "simulate", "--traces", trace, "--like", "x")
    both = ["--like", "agentx-062126", "--median-input", "5"]
    assert "--like settles" in refused(capsys, "simulate", "--traces", trace, *both)
    donors = [str(shared("weka") / f"trace_{number}.json.gz") for number in ("0254", "0184", "0291", "0054")]
    more = ["--concurrency", "1", "--preset", "quick", "--duration", "60", "--no-band", "--out", str(tmp_path)]
    assert main(["simulate", "--traces", *donors, "--like", "agentx-062126", *more, "--layout", "tp4"]) == 0
    point = load_point(next(tmp_path.glob("*.json")))
    assert "--like agentx-062126" in point.command and point.metrics.requests > 0


def test_what_if_stands_beside_amdahl(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--traces", trace, "--preset", "quick", "--duration", "20", "--concurrency", "2"]
    assert main(["simulate", "what-if", *load, "--kernel", "experts=1.5", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["amdahl"] == pytest.approx(1 / (1 - found["shares"]["experts"] * (1 - 1 / 1.5)), rel=1e-3)
    assert found["after"]["itl_p50_ms"] < found["before"]["itl_p50_ms"]
    assert main(["simulate", "what-if", *load, "--chip-value", "hbm_bandwidth=2"]) == 0
    assert "better by" in capsys.readouterr().out


def test_locality_domains_on_and_off(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--traces", trace, "--preset", "quick", "--duration", "10", "--concurrency", "2"]
    assert main(["simulate", "what-if", *load, "--platform", "vr-nvl72", "--locality", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["configuration"].split()[-1] for one in found] == ["tp2", "tp4", "ep2", "ep4"]
    for one in found:
        assert one["amdahl"] is None and one["after"]["itl_p50_ms"] <= one["before"]["itl_p50_ms"] * 1.02
    assert "no locality domains" in refused(capsys, "simulate", "what-if", *load, "--locality", "--platform", "b300")


def test_validate_lists_what_it_does_not_predict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "validate", "--platform", "vr-nvl72"]) == 0
    shown = capsys.readouterr().out
    assert "vr-nvl72 experts: mean absolute error" in shown and "not predicted by the cost model alone:" in shown
    assert main(["simulate", "validate", "--platform", "vr-nvl72", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"] and found["not_modelled"] and found["agentx"] == []
    assert {one["platform"] for one in found["points"]} == {"vr-nvl72"} and found["own"] == []
    assert "--case: unknown 'x'" in refused(capsys, "simulate", "validate", "--case", "x")


def test_validate_shows_our_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "validate", "--platform", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["kind"] for one in found["own"]} == {"decode", "turn", "mixed", "prefill", "layer"}
    assert found["own_sessions"] == []
    assert main(["simulate", "validate", "--platform", "h200"]) == 0
    assert "our own runs" in capsys.readouterr().out


def test_a_platform_of_measured_steps(tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(steps_platform_text(PLATFORM))
    more = ["--platform", str(path), "--concurrency", "2", "--set", "scheduler.max_running=4"]
    assert simulate(tmp_path / "out", trace, *more, "--scale-context", "0.5") == 0
    point = load_point(next((tmp_path / "out").glob("*.json")))
    assert (point.model.name, point.platform.chip, point.model.quantisation) == ("tiny", "abacus", "q4_1")
    assert point.band is not None and point.band.relative == pytest.approx(0.05)
    assert (
        simulate(tmp_path / "paced", trace, *more, "--scale-context", "0.5", "--target-itl", "0,40", "--no-band") == 0
    )
    assert {load_point(one).flags["scheduler.target_itl_ms"] for one in (tmp_path / "paced").glob("*.json")} == {
        "0.0", "40.0",
    }  # fmt: skip
    text = refused(capsys, "simulate", "--platform", str(path), "--traces", trace, "--sweep", "--scale-context", "0.5")
    assert "nothing to sweep" in text
    assert "knows whole steps" in refused(
        capsys, "simulate", "what-if", "--platform", str(path), "--kernel", "experts=2", "--traces", trace,
        "--scale-context", "0.5",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--layout", "tp1", "--platform", "b200"], "short by"),
        (["--layout", "tp3"], "64 heads cannot be split 3 ways"),
        (["--layout", "wide"], "unknown layout 'wide'"),
        (["--platform", "b9000"], "unknown platform 'b9000'"),
        (["--model", "gpt"], "unknown model 'gpt'"),
        (["--kernels", "magic"], "kernel family 'magic'"),
        (["--formats", "int3"], "unknown formats 'int3'"),
        (["--drafter", "eagle3-m3"], "--drafter must be NAME:K"),
        (["--drafter", "eagle3-m3:99"], "1 to 8 drafts"),
        (["--router", "magic"], "unknown router 'magic'"),
        (["--set", "scheduler.magic=1"], "scheduler.magic"),
        (["--set", "magic"], "is not A.B=C"),
        (["--memory-share", "2"], "--memory-share"),
        (["--host-memory", "9999"], "host memory"),
        (["--target-itl", "fast"], "--target-itl"),
        (["--concurrency", "0"], "--concurrency"),
        (["--jobs", "0"], "--jobs"),
        (["--at", "-1"], "--at must be more than 0"),
        (["--at", "100"], "--at needs --sweep"),
        (["--sweep", "--events", "x"], "--events"),
        (["--routing", "0.5"], "--routing must be at least 1"),
        (["--platform", "h200", "--layout", "tp8", "--formats", "nvfp4"], "has no experts 'nvfp4'"),
    ],
)
def test_bad_flags(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    out = tmp_path / "out"
    shown = refused(capsys, "simulate", "--traces", trace, "--duration", "5", "--out", str(out), *flags)
    assert complaint in shown
    assert not list(tmp_path.glob("out/*.json"))


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untimed, timeless, config = tmp_path / "untimed.json", tmp_path / "timeless.json", tmp_path / "config.json"
    rows = [row(0.0, [1, 2], api=None), row(0.0, [1, 2, 3], api=None)]
    timeless.write_text(json.dumps(session(rows)))
    untimed.write_text(json.dumps(session([{k: v for k, v in one.items() if k != "t"} for one in rows])))
    config.write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2}))
    assert "all at one time" in refused(capsys, "simulate", "--traces", str(timeless))
    assert "untimed.json" in refused(capsys, "simulate", "--traces", str(untimed))
    shown = refused(capsys, "simulate", "--model", str(config))
    assert "the cost model needs num_attention_heads" in shown
    assert "no such file" in refused(capsys, "simulate", "--traces", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["what-if"], "say what is changed"),
        (["what-if", "--kernel", "magic=2"], "unknown kernel 'magic'"),
        (["what-if", "--kernel", "experts=2", "--locality"], "say what is changed"),
        (["what-if", "--chip-value", "magic=2"], "no magic is known"),
        (["validate", "--platform", "b9000"], "b9000"),
        (["validate", "--platform", "b9000", "--agentx", "x"], "b9000"),
        (["validate", "--platform", "b300"], "published session replays alone: give --agentx TRACES"),
        (["validate", "--platform", "b300", "--agentx", "x", "--case", "m3-vr"], "m3-vr is of platform vr-nvl72"),
        (["fit"], "--tables DIR"),
        (["fit", "--tables", "nowhere", "--platform", "b9000"], "b9000"),
        (["fit", "--measure", "x", "--points", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_verbs(capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str) -> None:
    assert complaint in refused(capsys, "simulate", *argv)


def test_help_of_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ([], *([name] for name in SIMULATE_VERBS)):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *verb, "--help"])
        assert ended.value.code == 0 and "usage: longturn simulate" in capsys.readouterr().out


def test_a_dense_model(tmp_path: Path, trace: str) -> None:
    more = ["--model", "llama-3.1-8b", "--platform", "h200", "--layout", "tp1", "--formats", "bf16", "--no-band"]
    assert simulate(tmp_path / "out", trace, *more, "--concurrency", "1") == 0
    point = load_point(next((tmp_path / "out").glob("*.json")))
    assert point.model.name == "llama-3.1-8b" and point.metrics.requests > 2


def test_formats_are_those_of_the_chip_and_routing_is_a_choice(tmp_path: Path, trace: str) -> None:
    speeds = {}
    for spread in ("1", "50"):
        out = tmp_path / spread
        more = ["--platform", "h200", "--layout", "tp8", "--concurrency", "1", "--no-band", "--routing", spread]
        assert simulate(out, trace, *more) == 0
        point = load_point(next(out.glob("*.json")))
        assert point.model.quantisation == "mxfp8" and point.flags["routing"] == spread
        assert "--formats mxfp8" in point.command and f"--routing {spread}" in point.command
        speeds[spread] = point.metrics.interactivity.p90 if point.metrics.interactivity else 0.0
    assert speeds["50"] != speeds["1"], "tokens that prefer the same experts read fewer of them"


def test_stretched_sessions_say_so(tmp_path: Path, trace: str) -> None:
    more = ["--median-input", "12000", "--median-output", "100", "--no-band", "--concurrency", "1"]
    assert simulate(tmp_path / "out", trace, *more) == 0
    point = load_point(next((tmp_path / "out").glob("*.json")))
    assert point.traces.scale_context is not None and point.traces.scale_context > 1
    assert point.flags["scale_output"] == "2.5" and "--median-input 12000" in point.command


def test_host_memory_shows_in_a_point(tmp_path: Path, trace: str) -> None:
    more = ["--host-memory", "100", "--drafter", "eagle3-m3:3", "--acceptance", "synthetic", "--no-band"]
    assert simulate(tmp_path / "out", trace, *more, "--concurrency", "1") == 0
    point = load_point(next((tmp_path / "out").glob("*.json")))
    assert point.flags["loaded_pages"] == "0" and point.flags["acceptance"] == "synthetic"
    assert "--acceptance synthetic" in point.command


def test_bands_that_cannot_be_are_refused(tmp_path: Path, trace: str) -> None:
    assert simulate(tmp_path / "out", trace, "--concurrency", "1") == 0
    path = next((tmp_path / "out").glob("*.json"))
    good = path.read_bytes()
    assert b'"relative": 0.' in good
    path.write_bytes(good.replace(b'"relative": 0.', b'"relative": 7.', 1))
    with pytest.raises(ResultError, match=r"band\.relative must be 0 or more and below 1"):
        load_point(path)


def test_several_processes_give_the_same_points(tmp_path: Path, trace: str) -> None:
    for name, jobs in (("one", "1"), ("two", "2")):
        more = ["--layout", "tp4,ep4", "--concurrency", "1", "--no-band", "--jobs", jobs]
        assert simulate(tmp_path / name, trace, *more) == 0
    one, two = ([load_point(path) for path in sorted((tmp_path / name).glob("*.json"))] for name in ("one", "two"))
    assert [point.metrics for point in one] == [point.metrics for point in two] and len(one) == 2
