"""One self-contained HTML page of an explanation: for each figure the whole ratio and each switch's part of it.

It needs no script: the bars are elements with a width.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from longturn.report.assets import assets
from longturn.report.explanation import EffectFigures, Explanation, FigureExplanation, SwitchFigures
from longturn.report.page import DASH, rate_text, seconds_text
from longturn.report.schema import write_whole

_COLUMNS = (
    ("On alone", "on_alone"),
    ("Off alone", "off_alone"),
    ("In sequence", "in_sequence"),
    ("All orders", "mean_of_orders"),
)


def render_explanation(explanation: Explanation) -> str:
    """The page as HTML."""
    style = assets("page.css", "explanation.css")
    title = "Where the ratio comes from"
    body = "".join(_section(figure) for figure in explanation.figures)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title} · Longturn</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<header>\n"
        f'<div class="bar"><span class="brand">Longturn</span></div>\n<h1>{title}</h1>\n'
        f'<p class="lede">{escape(_lede(explanation))}</p>\n{_notices(explanation)}</header>\n<main>\n'
        f"{_configurations(explanation)}{body}{_terms()}{_runs(explanation)}</main>\n</body>\n</html>\n"
    )


def explanation_section(explanation: Explanation) -> str:
    """A part of another page: one explanation, closed until it is asked for. Its style is `explanation.css`."""
    body = "".join(_section(figure) for figure in explanation.figures)
    names = ", ".join(switch.name for switch in explanation.switches)
    return (
        f'<section class="panel explanation"><h2>Where a ratio comes from</h2><p>{escape(_lede(explanation))}</p>'
        f"{_notices(explanation)}<details><summary>{escape(names)}</summary>{_configurations(explanation)}{body}"
        f"{_terms()}{_runs(explanation)}</details></section>\n"
    )


def write_explanation(explanation: Explanation, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ResultError: the folder cannot be written.
    """
    write_whole(path, render_explanation(explanation).encode())


# --- figures as text -------------------------------------------------------------------------------------------------


def figure_text(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "ms":
        return seconds_text(value)
    return f"{rate_text(value)} {unit}" if unit else f"{100 * value:.1f} %"


def effect_text(effect: EffectFigures | None) -> str:
    """A ratio with its interval: `3.01× [2.89-3.13]`."""
    if effect is None:
        return DASH
    text = f"{_three(effect.ratio)}×"
    if effect.margin is None:
        return text
    low, high = (effect.ratio * math.exp(sign * effect.margin) for sign in (-1, 1))
    return f"{text} [{_three(low)}-{_three(high)}]"


def _three(ratio: float) -> str:
    """Three figures, and two places at most: noise can make a bound anything."""
    return (
        f"{ratio:.3g}" if ratio < 0.1 or ratio >= 1000 else f"{ratio:.{3 if ratio < 1 else 2 if ratio < 100 else 0}f}"
    )


def share_text(effect: EffectFigures | None) -> str:
    """A share of the whole, or why there is none."""
    if effect is None:
        return ""
    if effect.verdict == "noise":
        return "noise"
    return DASH if effect.share is None else f"{100 * effect.share:.0f} %"


def spread_words(figure: FigureExplanation) -> str:
    """How far apart runs of one configuration are, and what of the whole ratio that leaves."""
    if figure.run_spread is None:
        return "Each configuration ran once: the spread between runs is unknown, and nothing here is told from noise."
    text = (
        f"One run varies by {100 * figure.run_spread:.1f} % (standard deviation, {figure.degrees_of_freedom} degrees "
        "of freedom); [ ] is the 95 % interval."
    )
    return text + (" The whole ratio is noise: it has no shares." if figure.total.verdict == "noise" else "")


def interaction_words(figure: FigureExplanation) -> str:
    """What the switches do to one another."""
    found = figure.interaction
    if len(figure.switches) < 2:
        return "One switch: there is nothing to interact with."
    if found is None:
        return "Interaction: unknown, runs of single switches are missing."
    text = f"Interaction (whole over product of the effects on alone): {effect_text(found)}"
    if found.verdict == "noise":
        return f"{text}, noise: the switches do not touch one another as far as can be told."
    share = "" if found.share is None else f", {100 * found.share:+.0f} % of the whole"
    # Whether they help is the same question for a time and for a rate: does the whole go further than its parts?
    further = found.ratio > 1 if figure.total.ratio > 1 else found.ratio < 1
    words = "together they do more than the product" if further else "together they do less than the product"
    return f"{text}{share}: {words}" + ("." if found.verdict == "real" else ", if that is more than noise.")


# --- parts of the page -----------------------------------------------------------------------------------------------


def _lede(explanation: Explanation) -> str:
    names = ", ".join(switch.name for switch in explanation.switches)
    runs = sum(len(run.points) for run in explanation.runs)
    return (
        f"{explanation.model}: {names} between A and B, measured in {runs} runs of {len(explanation.runs)} "
        f"configurations, {explanation.created[:10]}. Load: {explanation.load}."
    )


def _notices(explanation: Explanation) -> str:
    lines = []
    if invalid := [" + ".join(run.on) or "A" for run in explanation.runs if not run.valid]:
        lines.append(f"Points of these configurations are invalid: {', '.join(invalid)}.")
    if any(figure.run_spread is None for figure in explanation.figures):
        lines.append("Each configuration ran once: nothing here is told from noise.")
    if not explanation.figures:
        lines.append("A or B has none of the figures asked for.")
    return "".join(f'<p class="notice">{escape(line)}</p>\n' for line in lines)


def _configurations(explanation: Explanation) -> str:
    rows = ""
    for switch in explanation.switches:
        for setting, off in switch.off.items():
            cells = (switch.name, setting, off, switch.on[setting])
            rows += "<tr>" + "".join(f'<td class="left">{escape(cell)}</td>' for cell in cells) + "</tr>"
    head = "".join(f'<th class="left" scope="col">{name}</th>' for name in ("Switch", "Setting", "A", "B"))
    return (
        '<section class="panel"><h2>A and B</h2><div class="scroll" tabindex="0" role="region" aria-label="Switches">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p>A: {escape(explanation.a)}. B: {escape(explanation.b)}.</p></section>\n"
    )


def _section(figure: FigureExplanation) -> str:
    better = "Higher is better" if figure.higher_is_better else "Lower is better"
    good = (figure.total.ratio > 1) == figure.higher_is_better
    verdict = {"noise": "no difference beyond noise", "unknown": "", "real": "better" if good else "worse"}
    words = verdict[figure.total.verdict]
    head = '<tr><th class="left" scope="col">Switch</th>'
    head += "".join(f'<th scope="col">{name}</th><th scope="col">share</th>' for name, _ in _COLUMNS) + "</tr>"
    largest = max(
        (abs(math.log(one.in_sequence.ratio)) for one in figure.switches if one.in_sequence is not None), default=0.0
    )
    bars = "".join(_bar(one, largest, figure) for one in figure.switches)
    rows = "".join(_row(one) for one in figure.switches)
    label = escape(figure.title)
    return (
        f'<section class="panel"><h2>{label[0].upper()}{label[1:]}</h2>'
        f'<p><b class="whole">{escape(effect_text(figure.total))}</b> {escape(figure_text(figure.a, figure.unit))} to '
        f"{escape(figure_text(figure.b, figure.unit))}{', ' if words else ''}{words}. {better}.</p>"
        f'<div class="bars" role="list" aria-label="In sequence">{bars}</div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}, scrolls sideways">'
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
        f"<p>{escape(interaction_words(figure))}</p>"
        f'<p class="hint">{escape(spread_words(figure))}</p></section>\n'
    )


def _bar(switch: SwitchFigures, largest: float, figure: FigureExplanation) -> str:
    """What the switch adds in sequence: right of the middle where it makes the figure better."""
    effect = switch.in_sequence
    if effect is None:
        return ""
    log = math.log(effect.ratio)
    width = 50 * abs(log) / largest if largest else 0.0
    better = (log > 0) == figure.higher_is_better
    kind = "noise" if effect.verdict == "noise" else "good" if better else "bad"
    side = "left:50%" if better else f"left:{50 - width:.2f}%"
    text = f"{effect_text(effect)}" + (", noise" if effect.verdict == "noise" else "")
    return (
        f'<div class="bar-row" role="listitem"><span>{escape(switch.name)}</span>'
        f'<div class="track"><i class="{kind}" style="{side};width:{width:.2f}%"></i></div>'
        f"<span>{escape(text)}</span></div>"
    )


def _row(switch: SwitchFigures) -> str:
    cells = f'<tr><th class="left" scope="row">{escape(switch.name)}</th>'
    for _, field in _COLUMNS:
        effect: EffectFigures | None = getattr(switch, field)
        kind = ' class="quiet"' if effect is not None and effect.verdict == "noise" else ""
        cells += f"<td{kind}>{escape(effect_text(effect))}</td><td{kind}>{escape(share_text(effect))}</td>"
    return cells + "</tr>"


def _terms() -> str:
    terms = (
        ("On alone", "A with this switch, over A."),
        ("Off alone", "B, over B without this switch."),
        (
            "In sequence",
            "What it adds when the switches are thrown in the order of the table; these multiply to the whole.",
        ),
        ("All orders", "Mean of what it adds over all orders (Shapley); only where every combination was measured."),
        (
            "Share",
            "Of the logarithm of the whole ratio, since ratios multiply. More than 100 % where others undo some.",
        ),
        ("Noise", "The 95 % interval, from the spread between runs, holds 1×."),
    )
    items = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in terms)
    return f'<section class="panel"><h2>Terms</h2><dl class="terms">{items}</dl></section>\n'


def _runs(explanation: Explanation) -> str:
    units = {figure.figure: figure.unit for figure in explanation.figures}
    head = '<tr><th class="left" scope="col">On</th>'
    head += "".join(f'<th scope="col">{escape(figure.title)}</th>' for figure in explanation.figures) + "</tr>"
    rows = ""
    for run in explanation.runs:
        name = " + ".join(run.on) or "none (A)"
        cells = "".join(
            f"<td>{escape(', '.join(figure_text(value, units[name_]) for value in values)) or DASH}</td>"
            for name_, values in run.figures.items()
        )
        rows += f'<tr><th class="left" scope="row">{escape(name)}</th>{cells}</tr>'
    where = ""
    if explanation.environment is not None:
        env = explanation.environment
        where = f"<p>{escape(f'{env.cpu}, {env.cores} cores, {env.system}, Longturn {env.longturn}')}</p>"
    return (
        '<section class="panel"><h2>Every run</h2><div class="scroll" tabindex="0" role="region" aria-label="Runs">'
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>{where}"
        f"<p><code>{escape(explanation.command)}</code></p></section>\n"
    )
