"""An explanation in the terminal."""

from __future__ import annotations

import math

from longturn.cli.terminal import table
from longturn.report.explanation import EffectFigures, Explanation, FigureExplanation
from longturn.report.explanation_page import effect_text, figure_text, interaction_words, share_text, spread_words

_COLUMNS = (
    ("on alone", "on_alone"),
    ("off alone", "off_alone"),
    ("in sequence", "in_sequence"),
    ("all orders", "mean_of_orders"),
)


def explanation_text(explanation: Explanation) -> str:
    """Switches, then a table for each figure."""
    lines = [f"A: {explanation.a}", f"B: {explanation.b}", f"load: {explanation.load}"]
    invalid = [" + ".join(run.on) or "A" for run in explanation.runs if not run.valid]
    if invalid:
        lines.append(f"invalid points among the runs of: {', '.join(invalid)}")
    for figure in explanation.figures:
        lines += ["", _figure_text(figure)]
    if not explanation.figures:
        lines += ["", "A or B has none of these figures"]
    return "\n".join(lines)


def _figure_text(figure: FigureExplanation) -> str:
    head = ["switch"]
    for title, _ in _COLUMNS:
        head += [title, "share"]
    rows = []
    for switch in figure.switches:
        row = [switch.name]
        for _, field in _COLUMNS:
            effect: EffectFigures | None = getattr(switch, field)
            row += [effect_text(effect), share_text(effect)]
        rows.append(row)
    foot = ["product"]
    for _, field in _COLUMNS:
        effects = [getattr(switch, field) for switch in figure.switches]
        if any(effect is None for effect in effects):
            foot += [effect_text(None), ""]
            continue
        product = math.prod(effect.ratio for effect in effects)
        shares = [effect.share for effect in effects]
        foot += [f"{product:.3f}×", "" if None in shares else f"{100 * math.fsum(shares):.0f} %"]
    better = "higher" if figure.higher_is_better else "lower"
    return "\n".join(
        [
            f"{figure.title}, {better} is better: {figure_text(figure.a, figure.unit)} (A) to "
            f"{figure_text(figure.b, figure.unit)} (B), {effect_text(figure.total)}",
            spread_words(figure),
            "",
            table(head, rows, foot),
            interaction_words(figure),
        ]
    )
