"""One self-contained HTML page of many points: frontiers, ratios, latencies side by side.

As on the page of a replay, tables are written here and are there without scripts. `curves.js` and `sweep.js` draw the
curves from the points, which the page carries as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from longturn.report.assets import assets, filled, script_data
from longturn.report.explanation import Explanation
from longturn.report.explanation_page import explanation_section
from longturn.report.page import DASH, count_text, percent_text, rate_text, seconds_text
from longturn.report.point import Measured, Point, Quality, Spread
from longturn.report.schema import ResultError, write_whole
from longturn.report.series import Series, differences, group

SCRIPTS = (
    *("curves.js", "drawing.js", "figures.js", "tables.js", "tails.js", "timeline.js", "exports.js"),
    *("theme.js", "sweep.js"),
)

STYLES = ("page.css", "sweep.css", "explanation.css")


def render_sweep(
    points: Sequence[Point],
    title: str,
    baseline: str | None = None,
    *,
    explanations: Sequence[Explanation] = (),
    stamp: str | None = None,
) -> str:
    """The page as HTML.

    Args:
        points: at least one.
        title: heading of the page.
        baseline: the configuration to compare with; the first one if None.
        explanations: of ratios, each a section.
        stamp: state of the results, for a served page that asks for changes; None for a file, which asks nothing.

    Raises:
        ResultError: no points, or no configuration of that name.
    """
    if not points:
        raise ResultError("a report needs at least one point")
    series = group(points)
    data = {
        "title": title,
        "series": [{"name": one.name, "source": one.source, "points": one.points} for one in series],
        "baseline": baseline_index(series, points, baseline),
        "points": points,
    }
    parts = {
        "TITLE": escape(title),
        "LEDE": escape(_lede(points, series)),
        "NOTICE": _notices(points),
        "POINTS": points_table(points, series),
        "CONDITIONS": _conditions(points, series),
        "EXPLANATIONS": "".join(map(explanation_section, explanations)),
        "STYLE": assets(*(STYLES if explanations else STYLES[:2])),
        "SCRIPT": assets(*(SCRIPTS if stamp is None else (*SCRIPTS, "live.js"))),
        "CONNECT": "" if stamp is None else "; connect-src 'self'",
        "STAMP": "" if stamp is None else f' data-stamp="{escape(stamp)}"',
        "DATA": script_data(data),
    }
    return filled("sweep.html", parts)


def write_sweep(
    points: Sequence[Point],
    title: str,
    path: Path,
    baseline: str | None = None,
    *,
    explanations: Sequence[Explanation] = (),
) -> None:
    """Write the page, whole or not at all.

    Raises:
        ResultError: as `render_sweep`, or the folder cannot be written.
    """
    write_whole(path, render_sweep(points, title, baseline, explanations=explanations).encode())


def baseline_index(series: Sequence[Series], points: Sequence[Point], name: str | None) -> int:
    """Which curve is compared with: the first of that configuration, or the first of all if `name` is None.

    Raises:
        ResultError: no curve and no configuration has that name.
    """
    if name is None:
        return 0
    for index, one in enumerate(series):
        if name in (one.name, points[one.points[0]].configuration):
            return index
    raise ResultError(f"no configuration '{name}' (there is: {', '.join(one.name for one in series)})")


def _lede(points: Sequence[Point], series: Sequence[Series]) -> str:
    dates = sorted({point.created[:10] for point in points})
    models = sorted({point.model.name for point in points})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{_plural(len(points), 'point')} of {_plural(len(series), 'configuration')}, {', '.join(models)}. {when}. "
        f"Every figure of speed stands beside the latencies that it was bought with."
    )


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _notices(points: Sequence[Point]) -> str:
    """What a reader must know before any figure."""
    lines = []
    invalid = sum(not point.validity.valid for point in points)
    if invalid:
        verb = "is" if invalid == 1 else "are"
        lines.append(f"{_plural(invalid, 'point')} {verb} invalid and on no frontier; the reasons stand in the table.")
    unlike = differences(points)
    if unlike:
        what = "; ".join(f"{name}: {', '.join(values)}" for name, values in unlike.items())
        lines.append(f"Not everything here was measured alike. {what[0].upper()}{what[1:]}.")
    return "".join(f'<p class="notice">{escape(line)}</p>' for line in lines)


# --- the table of points ---------------------------------------------------------------------------------------------

_LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("End to end", "e2e_ms"), ("Job", "jobs"))


def points_table(points: Sequence[Point], series: Sequence[Series]) -> str:
    """Every point with its latencies, speed, volume and standing. Cells with `data-figure` follow the percentile."""
    head = '<tr><th rowspan="2" scope="col">Live<br>trees</th>'
    head += '<th class="group" colspan="4" scope="colgroup">Time, <span class="percentile">P90</span></th>'
    head += '<th rowspan="2" scope="col">User tok/s<br><span class="percentile">P90</span></th>'
    head += '<th class="group" colspan="2" scope="colgroup">tok/s per chip</th>'
    head += '<th class="group" colspan="2" scope="colgroup">Cache hits</th><th rowspan="2" scope="col">Errors</th>'
    head += '<th class="group" colspan="2" scope="colgroup">Quality</th>'
    head += '<th class="left" rowspan="2" scope="col">Standing</th></tr><tr>'
    names = [name for name, _ in _LATENCIES] + ["total", "output", "measured", "possible", "top-1", "perpl."]
    head += "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr>"
    body = ""
    for number, one in enumerate(series):
        swatch = f'<i style="background:var(--s{number % 8})"></i>'
        body += f'<tbody><tr class="curve-name" data-series="{number}"><th colspan="14" scope="rowgroup">{swatch}'
        body += f"{escape(one.name)}</th></tr>"
        body += "".join(_point_row(index, points[index], number) for index in one.points) + "</tbody>"
    return f"<table><thead>{head}</thead>{body}</table>"


def _point_row(index: int, point: Point, number: int) -> str:
    metrics = point.metrics
    cells = f'<tr data-point="{index}" data-series="{number}"><th scope="row">{point.concurrency:,}</th>'
    for _, field in _LATENCIES:
        cells += f'<td data-figure="{field}">{time_text(_value(_spread(metrics, field)))}</td>'
    speed = metrics.interactivity.p90 if metrics.interactivity else None
    cells += f'<td data-figure="interactivity">{rate_text(speed)}</td>'
    cells += f"<td>{rate_text(metrics.total_tokens_per_s)}</td><td>{rate_text(metrics.output_tokens_per_s)}</td>"
    cells += f"<td>{percent_text(metrics.hit_rate)}</td><td>{percent_text(metrics.theoretical_hit_rate)}</td>"
    cells += f"<td>{_errors(metrics)}</td>{_quality(point.quality)}"
    cells += f'<td class="left standing">{badges(point)}</td></tr>'
    reasons = "; ".join(point.validity.reasons)
    return cells + (
        f'<tr class="why" data-series="{number}"><td colspan="14"><span>{escape(reasons)}</span></td></tr>'
        if reasons
        else ""
    )


def _spread(metrics: Measured, field: str) -> Spread | None:
    if field == "jobs":
        return metrics.jobs.time_ms if metrics.jobs else None
    spread: Spread | None = getattr(metrics, field)
    return spread


def _value(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p90


def time_text(value_ms: float | None) -> str:
    """A time for people; a job's may be hours."""
    if value_ms is not None and value_ms >= 7.2e6:
        return f"{value_ms / 3.6e6:.1f} h"
    if value_ms is not None and value_ms >= 6e5:
        return f"{value_ms / 6e4:.1f} min"
    return seconds_text(value_ms)


def _errors(metrics: Measured) -> str:
    if not metrics.errors:
        return "0"
    kinds = ", ".join(f"{kind}: {count}" for kind, count in metrics.error_kinds.items())
    return f'<span title="{escape(kinds)}">{metrics.errors:,} of {metrics.requests:,}</span>'


def _quality(quality: Quality | None) -> str:
    """Agreement of the most likely token, and the change of perplexity: two cells."""
    top1 = None if quality is None else quality.top1_agreement
    delta = None if quality is None else quality.perplexity_delta
    return f"<td>{percent_text(top1)}</td><td>{DASH if delta is None else f'{100 * delta:+.2f} %'}</td>"


def badges(point: Point) -> str:
    """Validity, source and mode in short words."""
    words = [] if point.validity.valid else [("bad", "invalid")]
    if point.source != "measured":
        band = f", steps ±{point.band.relative:.0%}" if point.band is not None else ""
        words.append(("note", f"{point.source}{band}"))
    elif point.validity.valid:
        words.append(("good", "valid"))
    if point.speculation.mode == "synthetic":
        words.append(("note", "synthetic"))
    return "".join(f'<span class="badge {kind}">{escape(word)}</span>' for kind, word in words)


# --- conditions ------------------------------------------------------------------------------------------------------


def _conditions(points: Sequence[Point], series: Sequence[Series]) -> str:
    """For every curve what does not change along it, and for every point how to measure it again."""
    blocks = []
    for one in series:
        first = points[one.points[0]]
        facts = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(t)}</dd></div>" for n, t in _facts(first))
        runs = "".join(_run(points[index]) for index in one.points)
        blocks.append(
            f"<details><summary>{escape(one.name)}</summary><dl class='facts'>{facts}</dl>"
            f'<ol class="runs">{runs}</ol></details>'
        )
    return "".join(blocks)


def _facts(point: Point) -> list[tuple[str, str]]:
    model, platform, traces = point.model, point.platform, point.traces
    facts = [("Engine", f"{point.engine.name} {point.engine.version}")]
    cache = f", KV cache {model.kv_cache}" if model.kv_cache else ""
    revision = f", revision {model.revision}" if model.revision else ""
    facts.append(("Model", f"{model.name}, {model.quantisation}{cache}{revision}"))
    facts.append(
        (
            "Platform",
            f"{_plural(platform.chips, 'chip')} {platform.chip}" + (f", {platform.name}" if platform.name else ""),
        )
    )
    if platform.price_per_chip_hour is not None:
        basis = f", {platform.price_basis}" if platform.price_basis else ""
        facts.append(("Price", f"{platform.price_per_chip_hour:g} {platform.currency} per chip-hour{basis}"))
    if platform.power_w_per_chip is not None:
        basis = f", {platform.power_basis}" if platform.power_basis else ""
        facts.append(("Power", f"{platform.power_w_per_chip:g} W per chip{basis}"))
    scale = f", context × {traces.scale_context:g}" if traces.scale_context != 1 else ""
    longest = f", at most {traces.max_context:,} tokens" if traces.max_context is not None else ""
    dropped = f", {traces.dropped_requests:,} requests dropped" if traces.dropped_requests else ""
    preset = f", preset {traces.preset}" if traces.preset else ""
    facts.append(("Traces", f"{traces.name}{preset}, seed {traces.seed}{scale}{longest}{dropped}"))
    facts.append(("Load client", point.client or "unknown"))
    if point.quality is not None:
        divergences = (("mean", point.quality.mean_kl), ("largest", point.quality.max_kl))
        told = [f"{name} KL {value:.3g}" for name, value in divergences if value is not None]
        facts.append(("Quality against", ", ".join([point.quality.reference, *told])))
    if point.environment is not None:
        env = point.environment
        facts.append(("Client's machine", f"{env.cpu}, {env.cores} cores, {env.system}, Python {env.python}"))
    return facts


def _run(point: Point) -> str:
    layout, speculation = point.layout, point.speculation
    names = (("TP", layout.tensor), ("EP", layout.expert), ("PP", layout.pipeline), ("DP", layout.data))
    parts = [f"{_plural(point.concurrency, 'live tree')}", " ".join(f"{name}{n}" for name, n in names if n > 1)]
    if layout.prefill_chips:
        parts.append(f"{layout.prefill_chips} chips for prefill alone")
    if speculation.mode != "off":
        length = f", {speculation.acceptance_length:g} tokens a step" if speculation.acceptance_length else ""
        drafts = f" {speculation.draft_tokens}" if speculation.draft_tokens else ""
        parts.append(f"{speculation.method or 'drafts'}{drafts} ({speculation.mode}{length})")
    parts += [f"{name}={value}" for name, value in point.flags.items()]
    requests = f"{count_text(point.metrics.requests)} requests in {time_text(point.metrics.duration_ms)}"
    text = ", ".join(part for part in [*parts, requests, point.created.replace("T", " ").replace("Z", " UTC")] if part)
    return f"<li>{escape(text)}<br><code>{escape(point.command)}</code></li>"
