"""Session trees against simulated engines: closed forms, and what must hold whatever the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from longturn.bench.hit_rate import hit_rate
from longturn.bench.metrics import e2e_s, itl_s, ttft_s
from longturn.bench.traces.load import load_traces
from longturn.errors import ConfigError
from longturn.simulate.acceptance import Acceptance, survival_of
from longturn.simulate.cost.options import KERNELS, CostOptions, HostTime
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.deployment import Target, engine_spec, parse_deployment
from longturn.simulate.flights import check_timings
from longturn.simulate.formats import formats_named
from longturn.simulate.platform import load_platform
from longturn.simulate.pricing import PlatformModel
from longturn.simulate.runner import Outcome, SimulationError, simulate
from longturn.simulate.shapes import load_shape
from tests.bench.make_traces import row, shared
from tests.bench.make_traces import tree as make_tree
from tests.simulate.helpers import cost
from tests.simulate.sessions import PlainModel, rules, run, spec, tree

FROM_START = rules(window=(0.0, 0.0), tree_idle_s=None, system_idle_s=None)
"""Sessions begin with their first request, and no pause is cut."""


def lines_of(*args: object, **more: object) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    return simulate(*args, lines.append, **more), lines  # type: ignore[arg-type]


def test_one_session_alone_takes_what_its_steps_take() -> None:
    """Prompts of 640, 1,152, 1,664 tokens in chunks of 512, all but the last page of the one before cached."""
    model = PlainModel(fixed=1_000_000, row=10_000, token=1_000, host=70_000)
    session = tree("s", turns=3, start=160, step=128, out=20)  # blocks of 4 tokens
    request_ns = 5_000_000
    done = simulate(spec(model), run([session], 1, rules=FROM_START, request_ns=request_ns))
    turns = [turn.record.answer for turn in done.measurement.turns][:3]
    cached = [0, 640, 1152]
    assert [answer.cached_tokens for answer in turns] == cached
    for answer, hit, chunks in zip(turns, cached, [[512, 128], [512], [512]], strict=True):
        assert answer.prompt_tokens == hit + sum(chunks)
        steps_ns = sum(1_000_000 + 1_000 * count for count in chunks)
        assert ttft_s(answer) == pytest.approx((request_ns + 70_000 + steps_ns) / 1e9, abs=1e-12)
        assert itl_s(answer) == pytest.approx(1_010_000 / 1e9, abs=1e-12)
        assert e2e_s(answer) == pytest.approx((ttft_s(answer) or 0) + 19 * 1_010_000 / 1e9, abs=1e-9)
    # The recorded pause after each answer.
    assert turns[1].sent_ns - turns[0].end_ns == 1_000_000_000


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_drafter_takes_as_many_steps_as_its_draws_say(run_ahead: bool) -> None:
    model = PlainModel(fixed=1_000_000, row=0, token=0, tokens_per_row=4)
    acceptance = Acceptance(survival_of([1.79, 2.39, 2.78], 3), seed=7)
    engines = dataclasses.replace(spec(model, scheduler={"run_ahead": run_ahead}), acceptance=acceptance)
    done = simulate(engines, run([tree("s", turns=1, start=32, step=0, out=1001)], 1, rules=FROM_START))
    answer = done.measurement.turns[0].record.answer
    steps = len(acceptance.progress("s:0:0:0:0", 1001)) - 1
    assert answer.output_tokens == 1001
    assert answer.end_ns - answer.chunks[0].at_ns == steps * 1_000_000, "the closed form"
    assert itl_s(answer) == pytest.approx(1e-3 / acceptance.mean, rel=0.05)


def test_draws_are_equal_whatever_the_speed() -> None:
    acceptance = Acceptance((0.8, 0.5), seed=7)
    load = run(sessions(), 1, rules=dataclasses.replace(FROM_START, duration_s=30.0))  # type: ignore[arg-type]
    steps = []
    for scale in (1.0, 3.0):
        model = PlainModel(fixed=1_000_000, row=0, token=0, tokens_per_row=3)
        done = simulate(dataclasses.replace(spec(model), acceptance=acceptance, scale=scale), load)
        answers = [turn.record.answer for turn in done.measurement.turns][:8]
        steps.append([round((answer.end_ns - answer.chunks[0].at_ns) / scale / 1e6) for answer in answers])
    assert steps[0] == steps[1] and len(set(steps[0])) > 1


def test_one_session_alone_on_a_platform_takes_what_the_cost_model_says() -> None:
    built = cost(options=CostOptions())
    session = tree("s", turns=1, start=160, step=0, out=20)  # 640 tokens
    done = simulate(dataclasses.replace(spec(), model=PlatformModel(built)), run([session], 1, rules=FROM_START))
    answer = done.measurement.turns[0].record.answer
    chunks = [StepShape(chunks=((0, 512),)), StepShape(chunks=((512, 128),), samples=1)]
    ttft_ns = built.options.host.ns(1) + sum(map(built.step_ns, chunks))
    decode_ns = sum(built.step_ns(step_shape([640 + n], attend_limit=2048)) for n in range(1, 20))
    assert answer.chunks[0].at_ns - answer.sent_ns == ttft_ns
    assert answer.end_ns - answer.chunks[0].at_ns == decode_ns


def test_kernels_that_cost_nothing_leave_host_time() -> None:
    host = HostTime(step_ns=250_000, row_ns=4_000)
    free = PlatformModel(cost(options=CostOptions(host=host, factors=dict.fromkeys(KERNELS, 0.0))))
    session = tree("s", turns=2, start=64, step=0, out=9)
    base = spec()
    done = simulate(dataclasses.replace(base, model=free), run([session], 1, rules=FROM_START))
    first = done.measurement.turns[0].record.answer
    assert ttft_s(first) == pytest.approx(2 * 254_000 / 1e9), "one step, and host time that nothing hides before it"
    assert itl_s(first) == pytest.approx(254_000 / 1e9)
    assert set(done.tally.shares()) == {*KERNELS, "host"} and done.tally.shares()["host"] == pytest.approx(1.0)


def sessions() -> list[object]:
    return [tree(f"t{n}", turns=5, start=40 + 30 * n, step=24, out=12 + n, pause=0.4) for n in range(6)]


def test_equal_runs_write_equal_lines_and_other_seeds_do_not() -> None:
    small = spec(pages=40, engines=2)
    load = run(sessions(), 4, rules=rules(20.0))  # type: ignore[arg-type]
    one, two = (lines_of(small, load, engine_events=True)[1] for _ in range(2))
    assert one == two and len(one) > 1000 and any(" plan " in line for line in one)
    other = lines_of(small, dataclasses.replace(load, seed=8), engine_events=True)[1]
    assert other != one


@pytest.mark.parametrize("lanes", [2, 3, 5])
def test_more_pages_never_lower_hits(lanes: int) -> None:
    rates = []
    for pages in (12, 16, 24, 32, 64, 128):
        load = run(sessions(), lanes, rules=rules(40.0))  # type: ignore[arg-type]
        answers = [turn.record.answer for turn in simulate(spec(pages=pages), load).measurement.turns]
        assert all(answer.ok for answer in answers)
        rates.append(sum(a.cached_tokens or 0 for a in answers) / sum(a.prompt_tokens or 0 for a in answers))
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]


def test_faster_steps_end_sooner() -> None:
    ends = []
    for scale in (2.0, 1.0, 0.5):
        load = run(sessions(), 3, rules=rules(30.0))  # type: ignore[arg-type]
        done = simulate(dataclasses.replace(spec(), scale=scale), load)
        answers = [turn.record.answer for turn in done.measurement.turns]
        ends.append(sum(e2e_s(answer) for answer in answers) / len(answers))
    assert ends == sorted(ends, reverse=True)


def test_requests_beyond_the_context_end_their_session_as_overflows() -> None:
    long = tree("long", turns=4, start=100, step=200, out=5)
    done = simulate(spec(pages=9), run([long], 1, rules=FROM_START))
    assert done.measurement.conduct.overflows > 0
    failed = [turn.record.answer for turn in done.measurement.turns if not turn.record.answer.ok]
    assert failed and all("does not fit the cache" in (answer.error or "") for answer in failed)


def test_a_warm_up_that_is_refused_ends_the_simulation() -> None:
    long = tree("long", turns=4, start=600, step=0, out=5)
    with pytest.raises(SimulationError, match="warm-up of session long failed"):
        simulate(spec(pages=9), run([long], 1, rules=rules(window=(0.9, 0.9))))


def test_sessions_stay_on_their_engine_and_hit_more_than_scattered_requests() -> None:
    hits = {}
    for router in ("session", "round-robin", "least-loaded"):
        load = run(sessions(), 4, router=router, rules=rules(30.0))  # type: ignore[arg-type]
        done, lines = lines_of(spec(engines=3), load)
        homes: dict[str, set[str]] = {}
        for words in (line.split() for line in lines):
            if words[1] == "send":
                homes.setdefault(words[2].split("/")[0], set()).add(words[4])
        if router == "session":
            assert all(len(engines) == 1 for engines in homes.values())
        answers = [turn.record.answer for turn in done.measurement.turns]
        hits[router] = sum(a.cached_tokens or 0 for a in answers) / sum(a.prompt_tokens or 0 for a in answers)
    assert hits["session"] > max(hits["round-robin"], hits["least-loaded"])


def test_unknown_router_is_one_line() -> None:
    with pytest.raises(ConfigError, match="unknown router 'magic'"):
        simulate(spec(), run([tree("s")], 1, router="magic"))


def test_sessions_without_times_are_refused() -> None:
    timeless = make_tree([row(0.0, [1, 2], api=None), row(0.0, [1, 2, 3], api=None)])
    with pytest.raises(ConfigError, match="2 requests, all at one time"):
        check_timings([timeless])
    check_timings([tree("s"), make_tree([row(0.0, [1])])])


def test_recorded_sessions_on_a_platform() -> None:
    trees = load_traces(sorted(shared("weka").iterdir())[:6])
    target = Target(load_platform("gb300"), load_shape("m3"), formats_named("nvfp4"), CostOptions())
    built = engine_spec(target, parse_deployment("tp4"))
    done = simulate(built, run(trees, 4, rules=rules(60.0)))
    answers = [turn.record.answer for turn in done.measurement.turns]
    assert len(answers) > 10 and all(answer.ok for answer in answers)
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    assert 0 < cached <= sum(answer.prompt_tokens or 0 for answer in answers)
    assert cached / sum(answer.prompt_tokens or 0 for answer in answers) > 0.5 * hit_rate(trees).by_tokens
    assert all(answer.output_tokens == turn.asked.output_tokens for answer, turn in zip(
        answers, done.measurement.turns, strict=True))  # fmt: skip
    assert 0 < done.tally.band < 1 and done.evictions == 0
