"""One self-contained HTML page of a result: no library, no request, readable from `file://` and without scripts.

Tables and figures are written here, so that they are there without scripts; `page.js` adds the charts from the same
data, which the page carries as JSON.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from longturn.report.assets import assets, filled, script_data
from longturn.report.schema import Environment, Result, Run, Totals, TurnResult, write_whole

DASH = "–"


def render_page(result: Result) -> str:
    """The page as HTML."""
    main = result.runs[0]
    baseline = result.runs[1] if len(result.runs) > 1 else None
    parts = {
        "TITLE": escape(result.title),
        "LEDE": escape(_lede(result)),
        "NOTICE": _notice(result),
        "CARDS": _cards(main, baseline),
        "TTFT_TEXT": _ttft_text(baseline),
        "TOKENS_TEXT": escape(_tokens_text(main)),
        "TABLE": turn_table(main, baseline),
        "TOTALS": totals_table(result.runs),
        "ENVIRONMENT": _environment(result),
        "STYLE": assets("page.css"),
        "SCRIPT": assets("page.js", "theme.js"),
        "DATA": script_data(result),
    }
    return filled("page.html", parts)


def write_page(result: Result, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ResultError: the folder cannot be written.
    """
    write_whole(path, render_page(result).encode())


# --- figures as text -------------------------------------------------------------------------------------------------


def count_text(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def seconds_text(value_ms: float | None) -> str:
    """A time for people, with three figures: `2.15 ms`, `0.412 s`, `41.2 s`."""
    if value_ms is None:
        return DASH
    if value_ms < 99.95:
        return f"{value_ms:.{2 if value_ms < 9.995 else 1}f} ms"
    seconds = value_ms / 1000
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def rate_text(value: float | None) -> str:
    return DASH if value is None else f"{value:,.1f}"


def percent_text(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def ratio_text(numerator: float | None, denominator: float | None) -> str:
    """How many times `denominator` goes into `numerator`."""
    if not numerator or not denominator:
        return DASH
    ratio = numerator / denominator
    return f"{ratio:.1f}×" if ratio < 100 else f"{ratio:.0f}×"


# --- sections --------------------------------------------------------------------------------------------------------


def _lede(result: Result) -> str:
    turns = sum(1 for _ in result.runs[0].turns)
    sessions = "session" if len(result.sessions) == 1 else "sessions"
    return (
        f"{result.model}, {turns} turns of the {sessions} {', '.join(result.sessions)}. {result.description} "
        f"Measured {result.created[:10]} on {result.environment.cpu}, {result.environment.cores} cores."
    )


def _notice(result: Result) -> str:
    """What a reader must know before any figure."""
    lines = []
    for run in result.runs:
        if run.partial:
            errors = f", {run.totals.errors} of {run.totals.requests} requests failed" if run.totals.errors else ""
            lines.append(f"Partial: the run “{run.name}” is incomplete{errors}; its totals compare with nothing.")
    return "".join(f'<p class="notice">{escape(line)}</p>' for line in lines)


def _card(what: str, figure: str, detail: str) -> str:
    what, figure, detail = escape(what), escape(figure), escape(_unbroken(detail))
    return f'<div class="card"><span class="what">{what}</span><b>{figure}</b><span>{detail}</span></div>'


def _unbroken(text: str) -> str:
    """No line break between a figure and its unit."""
    return re.sub(r"(?<=\d) (?=m?s\b|tok/s|%)", "\u00a0", text)


def _cards(main: Run, baseline: Run | None) -> str:
    totals = main.totals
    cards = []
    if baseline is not None:
        last, last_base = _last_pair(main, baseline)
        cards.append(
            _card(
                "Waiting for first tokens",
                _shorter(totals.ttft_sum_ms, baseline.totals.ttft_sum_ms),
                f"{seconds_text(totals.ttft_sum_ms)} in all turns together; "
                f"{seconds_text(baseline.totals.ttft_sum_ms)} with {baseline.name}",
            )
        )
        cards.append(
            _card(
                "First token of the last turn",
                seconds_text(last),
                f"{seconds_text(last_base)} with {baseline.name}: {ratio_text(last_base, last)}",
            )
        )
    else:
        cards.append(
            _card(
                "Time to first token",
                seconds_text(totals.ttft_p50_ms),
                f"median; P90 {seconds_text(totals.ttft_p90_ms)}",
            )
        )
        cards.append(
            _card(
                "Throughput",
                rate_text(totals.total_tokens_per_s),
                "tokens per second, input and output, pauses included",
            )
        )
    cards.append(
        _card(
            "Prompt tokens from cache",
            percent_text(totals.hit_rate),
            f"{totals.cached_tokens:,} of {totals.prompt_tokens:,}",
        )
    )
    speed = 1000 / totals.itl_p50_ms if totals.itl_p50_ms else None
    cards.append(
        _card(
            "Output speed",
            f"{rate_text(speed)} tok/s",
            f"median; P90 interactivity {rate_text(totals.interactivity_p90)} tok/s",
        )
    )
    return "\n".join(cards)


def _shorter(time_ms: float, than_ms: float) -> str:
    """How two times compare, in words that fit either way."""
    if time_ms <= than_ms:
        return f"{ratio_text(than_ms, time_ms)} shorter"
    return f"{ratio_text(time_ms, than_ms)} longer"


def _last_pair(main: Run, baseline: Run) -> tuple[float | None, float | None]:
    """TTFT of the last turn that both runs have."""
    for turn in reversed(main.turns):
        other = _same_turn(baseline, turn)
        if turn.ttft_ms is not None and other is not None and other.ttft_ms is not None:
            return turn.ttft_ms, other.ttft_ms
    return None, None


def _same_turn(run: Run, turn: TurnResult) -> TurnResult | None:
    return next((t for t in run.turns if t.session == turn.session and t.index == turn.index), None)


def _ttft_text(baseline: Run | None) -> str:
    """As HTML; narrow charts have no room for figures above the bars, nor for the words about them."""
    text = "How long the agent waits in each turn before the model starts to answer."
    if baseline is not None:
        text += f' <span class="wide">Above: times longer with {escape(baseline.name)}.</span>'
    return text


def _tokens_text(main: Run) -> str:
    if all(turn.cached_tokens is None for turn in main.turns):
        return "The server does not report how many of them came from its cache."
    return f"An agent repeats itself: {percent_text(main.totals.hit_rate)} of what it sent had been computed before."


def turn_table(main: Run, baseline: Run | None) -> str:
    """The turn-by-turn table as HTML."""
    second = baseline is not None
    head = '<tr><th class="left" rowspan="2" scope="col">Turn</th><th rowspan="2" scope="col">Prompt<br>tokens</th>'
    head += f'<th class="group" colspan="4" scope="colgroup">{escape(main.name)}</th>'
    if baseline is not None:
        head += f'<th class="group" colspan="2" scope="colgroup">{escape(baseline.name)}</th>'
        head += '<th rowspan="2" scope="col">TTFT<br>ratio</th>'
    head += "</tr><tr>" + "".join(f'<th scope="col">{name}</th>' for name in ("cached", "output", "TTFT", "tok/s"))
    head += '<th scope="col">TTFT</th><th scope="col">tok/s</th>' if second else ""
    rows = []
    for turn in main.turns:
        other = _same_turn(baseline, turn) if baseline is not None else None
        rows.append(_turn_row(turn, other, second))
    totals = main.totals
    foot = f'<tr><th scope="row">All turns</th><td>{totals.prompt_tokens:,}</td><td>{totals.cached_tokens:,}</td>'
    foot += f"<td>{totals.output_tokens:,}</td><td>{seconds_text(totals.ttft_sum_ms)}</td><td></td>"
    if baseline is not None:
        foot += f"<td>{seconds_text(baseline.totals.ttft_sum_ms)}</td><td></td>"
        foot += f'<td class="gain">{ratio_text(baseline.totals.ttft_sum_ms, totals.ttft_sum_ms)}</td>'
    return f"<table><thead>{head}</tr></thead><tbody>{''.join(rows)}</tbody><tfoot>{foot}</tr></tfoot></table>"


def _turn_row(turn: TurnResult, other: TurnResult | None, second: bool) -> str:
    cells = (
        f'<tr data-session="{escape(turn.session)}"><th scope="row"><span class="label" title="{escape(turn.label)}">'
    )
    cells += f'<span class="number">{turn.index + 1}</span>{escape(turn.label)}</span></th>'
    cells += f"<td>{count_text(turn.prompt_tokens)}</td>"
    if turn.error is not None:
        cells += f'<td class="failed" colspan="4">{escape(turn.error)}</td>'
    else:
        cells += f"<td>{count_text(turn.cached_tokens)}</td><td>{count_text(turn.output_tokens)}</td>"
        cells += f"<td>{seconds_text(turn.ttft_ms)}</td><td>{rate_text(turn.output_tokens_per_s)}</td>"
    if second:
        ttft, speed = (other.ttft_ms, other.output_tokens_per_s) if other is not None else (None, None)
        cells += f"<td>{seconds_text(ttft)}</td><td>{rate_text(speed)}</td>"
        sooner = ttft is not None and turn.ttft_ms is not None and ttft >= 1.1 * turn.ttft_ms
        cells += ('<td class="gain">' if sooner else "<td>") + f"{ratio_text(ttft, turn.ttft_ms)}</td>"
    return cells + "</tr>"


_TOTAL_ROWS: tuple[tuple[str, str], ...] = (
    ("TTFT median / P90", "ttft"),
    ("ITL median / P90", "itl"),
    ("End to end median / P90", "e2e"),
    ("Interactivity P50 / P90, tok/s", "interactivity"),
)


def totals_table(runs: tuple[Run, ...]) -> str:
    """Latency, speed and volume of every run side by side: one can be bought with another."""
    columns = [_totals_column(run.totals) for run in runs]
    head = '<tr><th class="left" scope="col"></th>' + "".join(
        f'<th scope="col">{escape(run.name)}</th>' for run in runs
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{column[name]}</td>" for column in columns) + "</tr>"
        for name in columns[0]
    )
    return f'<table class="totals"><thead>{head}</tr></thead><tbody>{body}</tbody></table>'


def _totals_column(totals: Totals) -> dict[str, str]:
    column = {
        "Requests": f"{totals.requests:,}",
        "Failed requests": f"{totals.errors:,}",
        "Prompt tokens": f"{totals.prompt_tokens:,}",
        "Prompt tokens from cache": f"{totals.cached_tokens:,}",
        "Hit rate": percent_text(totals.hit_rate),
        "Output tokens": f"{totals.output_tokens:,}",
    }
    for name, field in _TOTAL_ROWS:
        if field == "interactivity":
            column[name] = f"{rate_text(totals.interactivity_p50)} / {rate_text(totals.interactivity_p90)}"
            continue
        p50 = getattr(totals, f"{field}_p50_ms")
        p90 = getattr(totals, f"{field}_p90_ms")
        column[name] = _unbroken(f"{seconds_text(p50)} / {seconds_text(p90)}")
    column["Throughput total / output, tok/s"] = (
        f"{rate_text(totals.total_tokens_per_s)} / {rate_text(totals.output_tokens_per_s)}"
    )
    column["Duration"] = seconds_text(totals.duration_ms)
    column["Largest client lag"] = f"{totals.lag_max_ms:.1f} ms"
    return column


def _environment(result: Result) -> str:
    facts = [("To repeat it", f"<code>{escape(result.command)}</code>")]
    facts += [(run.name, f"<code>{escape(run.server)}</code>") for run in result.runs]
    pauses = "recorded pauses" if result.pause_scale == 1 else f"recorded pauses × {result.pause_scale:g}"
    lanes = "one session at a time" if result.lanes == 1 else f"{result.lanes} sessions at a time"
    output = (
        "output length fixed to the recording (ignore_eos)"
        if result.fixed_output
        else "output ends where the model ends it"
    )
    caches = "a cache of its own for every session" if result.separate_caches else "the server's cache as it was"
    facts.append(("Replay", escape(f"{lanes}, {pauses}, recorded answers in the prompts, {output}, {caches}")))
    facts.append(("Model", escape(result.model)))
    facts += [(name, escape(text)) for name, text in _machine(result.environment)]
    facts.append(("Measured", escape(result.created.replace("T", " ").replace("Z", " UTC"))))
    return '<dl class="facts">' + "".join(f"<div><dt>{escape(n)}</dt><dd>{t}</dd></div>" for n, t in facts) + "</dl>"


def _machine(environment: Environment) -> list[tuple[str, str]]:
    memory = f", {environment.memory_bytes / (1 << 30):.0f} GiB" if environment.memory_bytes else ""
    torch = f", PyTorch {environment.torch}" if environment.torch else ""
    return [
        ("Versions", f"Longturn {environment.longturn}, Python {environment.python}{torch}"),
        ("Machine", f"{environment.cpu}, {environment.cores} cores{memory}, {environment.system}"),
    ]
