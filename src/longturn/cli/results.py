"""From measured records to a result, a table in the terminal, and files."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from longturn.bench.metrics import e2e_s, itl_s, lag_s, summarise, ttft_s
from longturn.bench.records import TurnRecord
from longturn.bench.replay import Replay, ReplayOptions
from longturn.bench.session import Session
from longturn.bench.target import TargetModel
from longturn.cli.machine import cpu_name, memory_bytes, system_name, usable_cores
from longturn.cli.terminal import table
from longturn.cli.version import installed_version, longturn_version
from longturn.report.page import count_text, percent_text, rate_text, ratio_text, seconds_text, write_page
from longturn.report.schema import Environment, Result, Run, Served, Totals, TurnResult, save_result, to_json


def make_run(name: str, server: str, replay: Replay, model: TargetModel | None = None) -> Run:
    """One pass as the result file has it.

    Args:
        name: of the run.
        server: how the server was started, or its address.
        replay: what was measured.
        model: what the server told of the model, if it was asked.
    """
    records = sorted(replay.records, key=lambda record: (record.session, record.index))
    summary = summarise([record.answer for record in records])
    totals = Totals(
        requests=summary.requests,
        errors=summary.errors,
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        output_tokens=summary.output_tokens,
        hit_rate=summary.hit_rate,
        duration_ms=_ms(summary.duration_s) or 0.0,
        ttft_sum_ms=_ms(summary.ttft_sum_s) or 0.0,
        ttft_p50_ms=_ms(summary.ttft_p50_s),
        ttft_p90_ms=_ms(summary.ttft_p90_s),
        itl_p50_ms=_ms(summary.itl_p50_s),
        itl_p90_ms=_ms(summary.itl_p90_s),
        e2e_p50_ms=_ms(summary.e2e_p50_s),
        e2e_p90_ms=_ms(summary.e2e_p90_s),
        interactivity_p50=summary.interactivity_p50,
        interactivity_p90=summary.interactivity_p90,
        total_tokens_per_s=summary.total_tokens_per_s,
        output_tokens_per_s=summary.output_tokens_per_s,
        lag_max_ms=_ms(summary.lag_max_s) or 0.0,
    )
    turns = tuple(_turn(record) for record in records)
    return Run(name, server, turns, totals, replay.partial, None if model is None else _served(model))


def _served(model: TargetModel) -> Served:
    return Served(
        engine=model.engine,
        version=model.version,
        quantisation=model.quantisation,
        weights=model.weights,
        kv_cache=model.kv_cache,
    )


def _turn(record: TurnRecord) -> TurnResult:
    answer = record.answer
    return TurnResult(
        session=record.session,
        index=record.index,
        label=record.label,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        ttft_ms=_ms(ttft_s(answer)),
        itl_ms=_ms(itl_s(answer)),
        e2e_ms=_ms(e2e_s(answer)) or 0.0,
        lag_ms=_ms(lag_s(answer)) or 0.0,
        finish=answer.finish,
        error=answer.error,
    )


def _ms(seconds: float | None) -> float | None:
    """Milliseconds, rounded to the microsecond."""
    return None if seconds is None else round(seconds * 1000, 3)


def make_result(
    title: str, command: str, model: str, sessions: Sequence[Session], options: ReplayOptions, runs: Sequence[Run]
) -> Result:
    """A result of one or more runs over the same sessions, measured here and now."""
    return Result(
        title=title,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        model=model,
        sessions=tuple(session.id for session in sessions),
        description=" ".join(session.description for session in sessions if session.description),
        lanes=options.lanes,
        pause_scale=options.pause_scale,
        fixed_output=options.fixed_output,
        separate_caches=options.separate_caches,
        environment=environment(),
        runs=tuple(runs),
    )


def environment() -> Environment:
    """This machine and its versions."""
    return Environment(
        longturn=longturn_version(),
        python=platform.python_version(),
        torch=installed_version("torch"),
        system=system_name(),
        cpu=cpu_name(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
    )


def show_and_save(result: Result, folder: Path, *, as_json: bool) -> None:
    """Print the result, then write `result.json` and `index.html`: a full disk must not cost what was measured.

    Raises:
        ResultError: a file cannot be written.
    """
    if as_json:
        sys.stdout.write(to_json(result).decode())
    else:
        print(result_table(result), end="\n\n")
        print("\n".join(line for run in result.runs for line in totals_lines(run)), end="\n\n")
    sys.stdout.flush()
    json_path, page_path = folder / "result.json", folder / "index.html"
    save_result(result, json_path)
    write_page(result, page_path)
    if not as_json:
        print(f"results: {json_path}\npage:    {page_path.resolve().as_uri()}")


def result_table(result: Result) -> str:
    """The turns, and beside them the second run if there is one."""
    main = result.runs[0]
    base = result.runs[1] if len(result.runs) > 1 else None
    several = len({turn.session for turn in main.turns}) > 1
    head = ["turn", "prompt", "cached", "output", "TTFT", "tok/s"]
    if base is not None:
        head += ["| TTFT off", "tok/s off", "TTFT ratio"]
    others = {(turn.session, turn.index): turn for turn in base.turns} if base is not None else {}
    rows = []
    for turn in main.turns:
        name = f"{turn.session} " if several else ""
        row = [
            f"{name}{turn.index + 1:>2} {turn.label}",
            count_text(turn.prompt_tokens),
            count_text(turn.cached_tokens),
        ]
        row += [count_text(turn.output_tokens)]
        row += ["failed", ""] if turn.error else [seconds_text(turn.ttft_ms), rate_text(turn.output_tokens_per_s)]
        if base is not None:
            other = others.get((turn.session, turn.index))
            ttft = other.ttft_ms if other is not None else None
            speed = other.output_tokens_per_s if other is not None else None
            row += [f"| {seconds_text(ttft)}", rate_text(speed), ratio_text(ttft, turn.ttft_ms)]
        rows.append(row)
    totals = main.totals
    foot = ["all", count_text(totals.prompt_tokens), count_text(totals.cached_tokens), count_text(totals.output_tokens)]
    foot += [_sum_text(main), rate_text(_median_speed(main))]
    if base is not None:
        foot += [f"| {_sum_text(base)}", rate_text(_median_speed(base))]
        foot += [ratio_text(base.totals.ttft_sum_ms, totals.ttft_sum_ms)]
    return table(head, rows, foot)


def _sum_text(run: Run) -> str:
    """All waiting for first tokens; of no answers it is no time, and not a short one."""
    return seconds_text(run.totals.ttft_sum_ms or None)


def _median_speed(run: Run) -> float | None:
    return 1000 / run.totals.itl_p50_ms if run.totals.itl_p50_ms else None


def totals_lines(run: Run) -> list[str]:
    """The run's latency, speed and volume in two lines."""
    t = run.totals
    return [
        f"{run.name}: hit rate {percent_text(t.hit_rate)}, TTFT median {seconds_text(t.ttft_p50_ms)} P90 "
        f"{seconds_text(t.ttft_p90_ms)}, ITL median {seconds_text(t.itl_p50_ms)} P90 {seconds_text(t.itl_p90_ms)}, "
        f"end to end median {seconds_text(t.e2e_p50_ms)} P90 {seconds_text(t.e2e_p90_ms)}",
        f"  P90 interactivity {rate_text(t.interactivity_p90)} tok/s, throughput {rate_text(t.total_tokens_per_s)} "
        f"tok/s (output {rate_text(t.output_tokens_per_s)}), {t.errors} of {t.requests} requests failed",
    ]
