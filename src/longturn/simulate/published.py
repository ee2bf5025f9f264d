"""The cost model beside points that others published: predicted, published, error.

Only fixed-length points and kernel tables are predicted here; session replays need the engine in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longturn.simulate.cost.constants import LEAST_RMS
from longturn.simulate.cost.formulas import experts_ns
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.rubin import rubin_rows
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import Platform, load_platform
from longturn.simulate.published_data import OWN_RUNS, Group, groups
from longturn.simulate.shapes import load_shape

STEP_KINDS = ("decode", "turn", "mixed", "tpot", "prefill")
COOL_NS = 1e8
"""Of computing without a pause, before a chip is at its power limit: on an H200 the first chunk of a prompt, 106 ms,
was not yet slow, and all after it were."""
_NS_PER_MS, _NS_PER_US, _NS_PER_S = 1e6, 1e3, 1e9


@dataclass(frozen=True, slots=True)
class Comparison:
    """One point."""

    group: str
    platform: str
    kind: str
    point: str
    """What tells it from the others of its group."""
    predicted: float
    published: float
    unit: str
    band: float
    """Relative half-width of the prediction, from the calibration's residuals."""
    judged: bool
    """Whether the model claims this point."""
    fitted: bool = False
    """Whether constants were fitted to it: then it shows how well they fit, and says nothing of the model."""

    @property
    def error(self) -> float:
        """Relative, signed: above 0 where the prediction is larger."""
        return self.predicted / self.published - 1.0

    @property
    def inside(self) -> bool:
        """Whether the band holds what was published."""
        return abs(self.error) <= self.band


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Published points that nothing here predicts."""

    group: str
    source: str
    reason: str


def compare() -> tuple[Comparison, ...]:
    """Every published point that the cost model alone can predict, in the file's order."""
    return _compared(groups())


def compare_own() -> tuple[Comparison, ...]:
    """The same of steps that were measured with Longturn itself."""
    return _compared(groups(path=OWN_RUNS))


def _compared(found: Sequence[Group]) -> tuple[Comparison, ...]:
    compared: list[Comparison] = []
    for group in found:
        if group.kind == "experts":
            compared += _experts(group)
        elif group.kind in STEP_KINDS:
            compared += _steps(group)
    return tuple(compared)


def not_modelled() -> tuple[NotModelled, ...]:
    """Every other published point, with the reason."""
    simulated = "a session replay: needs the engine in virtual time, not the cost model alone"
    return tuple(
        NotModelled(group.name, group.source, simulated if group.kind == "agentx" else group.note)
        for group in (*groups("listed", "agentx"), *groups("listed", path=OWN_RUNS))
    )


def mean_absolute_error(points: Sequence[Comparison]) -> float:
    """Mean of the errors' sizes, relative; NaN of no points."""
    return sum(abs(point.error) for point in points) / len(points) if points else math.nan


def report_lines(points: Sequence[Comparison]) -> list[str]:
    """A table for people: one line a point, then the mean absolute error of each group and of judged points by
    platform."""
    lines = [f"{'point':<58} {'predicted':>11} {'published':>11} {'error':>8} {'band':>7}"]
    for name in dict.fromkeys(point.group for point in points):
        mine = [point for point in points if point.group == name]
        shown = " (fitted to these)" if mine[0].fitted else "" if mine[0].judged else " (not judged)"
        lines.append(f"{name}{shown}, {mine[0].unit}: mean absolute error {mean_absolute_error(mine):.1%}")
        digits = 0 if mine[0].published >= 10_000 else 2
        lines += [
            f"  {point.point:<56} {point.predicted:>11,.{digits}f} {point.published:>11,.{digits}f} "
            f"{point.error:>+8.1%} {point.band:>7.0%}"
            for point in mine
        ]
    for platform in dict.fromkeys(point.platform for point in points if point.judged):
        for kind in (*STEP_KINDS, "experts", "layer"):
            mine = [p for p in points if p.judged and p.platform == platform and p.kind == kind]
            if mine:
                inside = sum(point.inside for point in mine)
                lines.append(
                    f"{platform} {kind}: mean absolute error {mean_absolute_error(mine):.1%} of {len(mine)} points, "
                    f"{inside} within their band"
                )
        claimed = [point for point in points if point.judged and point.platform == platform]
        inside = sum(point.inside for point in claimed)
        lines.append(f"{platform}: {inside} of {len(claimed)} judged figures within their band")
    return lines


def _cost(group: Group) -> StepCost:
    return StepCost(
        load_platform(group.text("platform")),
        load_shape(group.text("model")),
        parse_layout(group.text("layout")),
        formats_named(group.text("formats")),
        CostOptions(family=group.text("family"), routing=group.routing),
    )


def _steps(group: Group) -> list[Comparison]:
    cost = _cost(group)
    limit = cost.shape.attend_limit
    found: list[Comparison] = []
    published = group.numbers("value")
    if group.kind == "tpot":
        lengths = group.number("input_tokens"), group.number("output_tokens")
        for requests, value in zip(group.numbers("concurrency"), published, strict=True):
            ns, band = fixed_length_tpot_ns(cost, int(requests), *lengths, group.number("chunk_tokens"))
            found.append(_comparison(group, f"{requests:.0f} requests", ns / _NS_PER_MS, value, "ms", band))
        return found
    if group.kind in ("turn", "mixed"):
        batches = group.numbers("batch") if group.kind == "mixed" else (0.0,) * len(published)
        sizes = zip(batches, group.numbers("context"), group.numbers("new"), published, strict=True)
        for rows, context, new, value in sizes:
            chunk = [(int(context), int(new))]
            parts = cost.breakdown(step_shape([int(context)] * int(rows), chunk, attend_limit=limit, chunk_samples=1))
            label = f"{rows:.0f} x {context:.0f} + {new:.0f}" if rows else f"{context:.0f} + {new:.0f}"
            band = parts.band_ns / parts.device_ns
            found.append(_comparison(group, label, parts.step_ns / _NS_PER_MS, value, "ms", band))
        return found
    beside_ms = group.numbers("request_ms") if "request_ms" in group.values else (0.0,) * len(published)
    points = zip(group.numbers("batch"), group.numbers("context"), beside_ms, published, strict=True)
    for rows, context, waited_ms, value in points:
        label = f"{rows:.0f} x {context:.0f}"
        if group.kind == "decode":
            parts = cost.breakdown(step_shape([int(context)] * int(rows), attend_limit=limit))
            band = parts.band_ns / parts.device_ns
            found.append(_comparison(group, label, parts.step_ns / _NS_PER_MS, value, "ms", band))
        else:
            ns, band = prefill_ns(cost, int(context), group.number("chunk_tokens"), int(rows))
            total_ns = ns + waited_ms * _NS_PER_MS
            found.append(_comparison(group, label, rows * context / total_ns * _NS_PER_S, value, "tokens/s", band))
    return found


def prefill_ns(cost: StepCost, tokens: int, chunk_tokens: int, prompts: int) -> tuple[float, float]:
    """Computing some cold prompts sent together, and the relative band."""
    return steps_ns(cost, prefill_steps(tokens, chunk_tokens, prompts))


def prefill_steps(tokens: int, chunk_tokens: int, prompts: int) -> tuple[StepShape, ...]:
    """Steps that compute `prompts` cold prompts of `tokens` tokens. Short ones share steps, as far as there are
    several; their time a token is close to that of a step they fill."""
    together = max(1, min(prompts, chunk_tokens // tokens))
    steps = []
    for first in range(0, prompts, together):
        shared = min(together, prompts - first)
        for start in range(0, tokens, chunk_tokens):
            chunk = (start, min(chunk_tokens, tokens - start))
            steps.append(StepShape(chunks=(chunk,) * shared, samples=shared))
    return tuple(steps)


def steps_ns(cost: StepCost, steps: Sequence[StepShape]) -> tuple[float, float]:
    """Steps without a pause between them, and the relative band. Where the platform says what a chip computes when it
    has reached its power limit, it does so after `COOL_NS`."""
    hot = sustained(cost)
    total = band = 0.0
    for step in steps:
        parts = (cost if total < COOL_NS else hot).breakdown(step)
        total += parts.step_ns
        band += parts.band_ns
    return total, band / total


def sustained(cost: StepCost) -> StepCost:
    """The same model of a chip at its power limit; the same if the platform does not say."""
    platform = cost.platform
    if "sustained_compute" not in platform.spec:
        return cost
    share = platform.value("sustained_compute")
    rates = {name: share for name in ("bf16_flops", "fp8_flops", "nvfp4_flops") if name in platform.spec}
    return StepCost(platform.scaled(**rates), cost.shape, cost.layout, cost.formats, cost.options)


def fixed_length_tpot_ns(
    cost: StepCost, requests: int, input_tokens: int, output_tokens: int, chunk_tokens: int
) -> tuple[float, float]:
    """Time per output token of a closed loop, and the relative band.

    With `requests` always in flight, a request's `output_tokens` steps are shared by the decodes of the others, and
    each of the others begins once in that time: its prompt's chunks lengthen steps that also decode. That lengthening,
    spread over the output, is what a request waits beside its own decode steps.
    """
    limit = cost.shape.attend_limit
    context = input_tokens + output_tokens // 2
    contexts = [context] * requests
    decode = cost.breakdown(step_shape(contexts, attend_limit=limit))
    longer = 0.0
    for start in range(0, input_tokens, chunk_tokens):
        chunk = (start, min(chunk_tokens, input_tokens - start))
        mixed = step_shape(contexts[:-1], [chunk], attend_limit=limit, chunk_samples=1)
        longer += cost.step_ns(mixed) - decode.step_ns
    total = decode.step_ns + (requests - 1) * longer / output_tokens
    return total, decode.band_ns / decode.device_ns


def _experts(group: Group) -> list[Comparison]:
    platform = load_platform(group.text("platform"))
    found: list[Comparison] = []
    for column, key in (("plain", "nvfp4"), ("localized", "nvfp4-localized")):
        predicted, band = rubin_experts_ns(platform, group, column, key)
        for tokens, ns, value in zip(group.numbers("tokens"), predicted, group.numbers(column), strict=True):
            found.append(_comparison(group, f"{column}, {tokens:.0f} tokens", ns / _NS_PER_US, value, "us", band))
    return found


def rubin_experts_ns(platform: Platform, group: Group, column: str, key: str) -> tuple[list[float], float]:
    """Times of one group of the published expert table, and their relative uncertainty."""
    constants = platform.family().experts[key]
    rows = rubin_rows(platform, [group], column)
    moved = rows.activation_elements * constants.activation_bytes / (platform.value("hbm_bandwidth") / 1e9)
    times = experts_ns(
        rows.stream_ns,
        rows.compute_ns,
        moved,
        fixed_ns=constants.fixed_ns,
        stream=constants.stream,
        stream_exponent=constants.stream_exponent,
        compute=constants.compute,
        sharpness=constants.sharpness,
    )
    return [float(value) for value in times], max(constants.tables.rms, LEAST_RMS[constants.basis])


def _comparison(group: Group, point: str, predicted: float, published: float, unit: str, band: float) -> Comparison:
    return Comparison(
        group.name, group.text("platform"), group.kind, point, predicted, published, unit, band, group.judged,
        group.values.get("use") == "fitted",
    )  # fmt: skip
