"""Points made of replay results, so that one page shows both.

A replay's file has each turn's latencies and not its clock times, so the records are rebuilt with every turn starting
at 0; what depends on the clock (duration, throughput) is taken from the file's totals.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from longturn.bench.point_metrics import measure
from longturn.bench.records import Answer, Chunk, TurnRecord
from longturn.bench.target import UNKNOWN
from longturn.cli.points import measured_figures
from longturn.report.point import Engine, Measured, Model, Platform, Point, Traces, Validity
from longturn.report.schema import Result, Run, Served, TurnResult

_NS_PER_MS = 1e6


def points_of_result(result: Result) -> list[Point]:
    """One point for each run, in the order of the file."""
    return [_point(result, run) for run in result.runs]


def _point(result: Result, run: Run) -> Point:
    ours = run.server.startswith("longturn serve")
    pauses = "" if result.pause_scale == 1 else f", pauses × {result.pause_scale:g}"
    lengths = "fixed answer lengths" if result.fixed_output else "answers of the model's own length"
    caches = "a cache each" if result.separate_caches else "a shared cache"
    conditions = f"replay: sessions with {caches}, {lengths}{pauses}; compares with the same replay alone"
    reasons = (conditions,) if not run.partial else ("partial: turns are missing", conditions)
    environment = result.environment
    # Files of earlier versions do not hold what the server told, but whether it was ours.
    served = run.served or Served(engine="longturn" if ours else None, version=environment.longturn if ours else None)
    return Point(
        configuration=run.name if len(result.runs) > 1 else result.model,
        concurrency=result.lanes,
        created=result.created,
        command=result.command,
        source="measured",
        engine=Engine(name=served.engine or UNKNOWN, version=served.version or UNKNOWN),
        model=Model(name=result.model, quantisation=served.quantisation or UNKNOWN, kv_cache=served.kv_cache),
        platform=Platform(chip=environment.cpu if ours else UNKNOWN, chips=1),
        traces=Traces(name=", ".join(result.sessions) + pauses, seed=0, preset="replay"),
        validity=Validity(valid=not run.partial, reasons=reasons),
        metrics=_metrics(run),
        flags=({} if served.weights is None else {"model.weights": served.weights})
        | (dict(_settings(run.server)) if ours else {}),
        client=f"longturn-bench {environment.longturn} (replay)",
        environment=environment,
    )


def _settings(command: str) -> Iterator[tuple[str, str]]:
    """What `--set` of a command says."""
    words = shlex.split(command)
    for flag, value in itertools.pairwise(words):
        name, equals, text = value.partition("=")
        if flag == "--set" and equals:
            yield name, text


def _metrics(run: Run) -> Measured:
    figures = measured_figures(measure([_record(turn) for turn in run.turns], chips=1))
    totals = run.totals
    seconds = totals.duration_ms / 1000

    def rate(tokens: int | None) -> float | None:
        return tokens / seconds if tokens is not None and seconds > 0 else None

    return msgspec.structs.replace(
        figures,
        duration_ms=totals.duration_ms,
        total_tokens_per_s=totals.total_tokens_per_s,
        input_tokens_per_s=rate(totals.prompt_tokens),
        cached_tokens_per_s=rate(figures.cached_tokens),
        output_tokens_per_s=totals.output_tokens_per_s,
    )


def _record(turn: TurnResult) -> TurnRecord:
    lag, end = _ns(turn.lag_ms), _ns(turn.e2e_ms)
    chunks: Sequence[Chunk] = ()
    if turn.ttft_ms is not None:
        chunks = (Chunk(_ns(turn.ttft_ms), _first_tokens(turn)),)
    answer = Answer(
        intended_ns=-lag,
        sent_ns=0,
        end_ns=end,
        chunks=tuple(chunks),
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        output_tokens=turn.output_tokens,
        finish=turn.finish,
        error=turn.error,
    )
    return TurnRecord(turn.session, turn.index, turn.label, 0, answer)


def _first_tokens(turn: TurnResult) -> int | None:
    """Tokens of the first event, which the file does not hold: its ITL says how many came later."""
    if turn.ttft_ms is None or turn.output_tokens is None:
        return None
    if not turn.itl_ms:
        return turn.output_tokens  # nothing was left to time
    return turn.output_tokens - round((turn.e2e_ms - turn.ttft_ms) / turn.itl_ms)


def _ns(ms: float) -> int:
    return round(ms * _NS_PER_MS)
