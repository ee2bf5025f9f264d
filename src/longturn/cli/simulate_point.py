"""From simulated runs to a point, with the band of its uncertainty, and from points to a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from longturn.bench.point_metrics import measure as point_metrics
from longturn.cli.agentx_point import Setting, make_point
from longturn.cli.agentx_setting import trace_digest
from longturn.cli.points import measured_figures
from longturn.cli.simulate_setup import SimulationPlan, Variant, command_of
from longturn.cli.terminal import table
from longturn.cli.version import longturn_version
from longturn.report.page import percent_text, rate_text, seconds_text
from longturn.report.point import (
    Band,
    Bound,
    Engine,
    Layout,
    Model,
    Platform,
    Point,
    Speculation,
    Traces,
)
from longturn.simulate.linear import StepsPlatform
from longturn.simulate.runner import Outcome
from longturn.simulate.tally import MOST_BAND

_TOP = 4


def make_simulated_point(
    plan: SimulationPlan, variant: Variant, lanes: int, nominal: Outcome, ends: tuple[Outcome, Outcome] | None
) -> Point:
    """The point of one variant at one concurrency.

    Args:
        plan: see there.
        variant: one of the plan's.
        lanes: session trees alive at once.
        nominal: the run as the cost model has it.
        ends: runs with all steps slower and faster by the band; None for no band.
    """
    chips = variant.deployment.chips
    point = make_point(_setting(plan, variant, lanes), plan.trees, nominal.measurement, lanes)
    shares = sorted(nominal.tally.shares().items(), key=lambda item: -item[1])
    duration_s = plan.rules.duration_s
    ended_ns = max((turn.record.answer.end_ns for turn in nominal.measurement.turns), default=0)
    elapsed_ns = max(duration_s * 1e9, ended_ns - nominal.measurement.start_ns) * plan.spec(variant).engines
    flags = {
        **{name: str(value) for name, value in variant.settings.items()},
        **_flags(plan, variant),
        "duration_s": f"{duration_s:g}",
        "warmup_requests": str(nominal.measurement.warmup_requests),
        "busy": f"{nominal.tally.busy_ns / elapsed_ns:.3f}",
        "step_band": f"{band_of(nominal):.3f}",
        "preemptions": str(nominal.preemptions),
        "evictions": str(nominal.evictions),
        **_host_tier(plan, nominal),
        "time": ", ".join(f"{name} {share:.0%}" for name, share in shares[:_TOP]),
    }
    return msgspec.structs.replace(
        point,
        source="simulated",
        client=f"longturn-simulate {longturn_version()}",
        layout=_layout(variant),
        speculation=_speculation(plan),
        flags=flags,
        band=None if ends is None else _band(nominal, ends, chips),
    )


def _host_tier(plan: SimulationPlan, outcome: Outcome) -> dict[str, str]:
    """What went between the tiers, if there are two."""
    if isinstance(plan.target, StepsPlatform) or not plan.target.host_bytes:
        return {}
    return {
        "offloaded_pages": str(outcome.offloaded_pages),
        "loaded_pages": str(outcome.loaded_pages),
        "host_hit_tokens": str(outcome.host_hit_tokens),
    }


def band_of(outcome: Outcome) -> float:
    """Relative half-width of the uncertainty of a run's steps."""
    return min(MOST_BAND, outcome.tally.band)


def _band(nominal: Outcome, ends: tuple[Outcome, Outcome], chips: int) -> Band:
    slow, fast = (_bound(outcome, chips) for outcome in ends)
    return Band(
        relative=round(band_of(nominal), 4),
        slow=slow,
        fast=fast,
        basis="residuals of the calibration, all kernels taken to err the same way, weighted by their time",
    )


def _bound(outcome: Outcome, chips: int) -> Bound:
    figures = measured_figures(point_metrics([turn.record for turn in outcome.measurement.turns], chips=chips))
    return Bound(
        interactivity=figures.interactivity,
        total_tokens_per_s=figures.total_tokens_per_s,
        output_tokens_per_s=figures.output_tokens_per_s,
        ttft_ms=figures.ttft_ms,
    )


def _setting(plan: SimulationPlan, variant: Variant, lanes: int) -> Setting:
    args, target = plan.args, plan.target
    if isinstance(target, StepsPlatform):
        served = target.model
        model = Model(name=served.name, quantisation=served.quantisation, kv_cache=served.kv_cache)
        platform = Platform(chip=target.chip, chips=1)
    else:
        spec = target.platform.spec
        price = spec.get("rental_price")
        power = spec.get("power")
        model = Model(name=target.shape.name, quantisation=args.formats, kv_cache=target.formats.cache)
        platform = Platform(
            chip=target.platform.name,
            chips=variant.deployment.chips,
            name=target.platform.title,
            price_per_chip_hour=None if price is None else price.value,
            price_basis=None if price is None else f"{price.source}, {price.date}",
            power_w_per_chip=None if power is None else power.value,
            power_basis=None if power is None else f"{power.source}, {power.date}",
        )
    return Setting(
        configuration=variant.name,
        command=command_of(args, variant.deployment.name, lanes, variant.settings),
        engine=Engine(name="longturn", version=longturn_version()),
        model=model,
        platform=platform,
        traces=Traces(
            name=", ".join(Path(name).name for name in args.traces),
            seed=plan.seed,
            preset=plan.rules.preset,
            digest=trace_digest(plan.trees),
            scale_context=round(args.scale_context * plan.stretch.input, 4),
            max_context=args.max_context,
            dropped_requests=plan.dropped,
        ),
        rules=plan.rules,
        api="completions",
        target="inproc",
        carry_over="recorded",
        weights=None,
        run="simulated",
        derived_system=args.derive_system,
    )


def _flags(plan: SimulationPlan, variant: Variant) -> dict[str, str]:
    args, target = plan.args, plan.target
    found = {"layout": variant.deployment.name, "router": args.router, "request_ms": f"{plan.request_ns / 1e6:g}"}
    if plan.stretch.output != 1.0:
        found["scale_output"] = f"{plan.stretch.output:.4g}"
    if isinstance(target, StepsPlatform):
        return {**found, "calibration": f"{target.source}, {target.date}"}
    family = target.platform.family(target.options.family)
    found |= {"kernels": f"{family.name}, {family.date}", "memory_share": f"{target.memory_share:g}"}
    if target.host_bytes:
        found["host_memory_gb"] = f"{target.host_bytes / 1e9:g}"
    if target.options.drafter is not None:
        found["acceptance"] = args.acceptance
    if args.routing is not None:
        found["routing"] = f"{args.routing:g}"
    if not target.options.locality:
        found["locality"] = "off"
    if target.options.factors:
        found["kernel_time"] = ", ".join(f"{name} x {factor:.4g}" for name, factor in target.options.factors.items())
    return found


def _layout(variant: Variant) -> Layout:
    layout = variant.deployment.layout
    return Layout(
        tensor=layout.attention_tp, expert=layout.expert_ep, data=variant.deployment.replicas * layout.attention_dp
    )


def _speculation(plan: SimulationPlan) -> Speculation:
    drafter = None if isinstance(plan.target, StepsPlatform) else plan.target.options.drafter
    if drafter is None:
        return Speculation()
    return Speculation(
        mode="synthetic",
        method=plan.args.drafter.partition(":")[0],
        draft_tokens=drafter.drafts,
        acceptance_length=drafter.accepted(),
    )


def points_text(points: Sequence[Point]) -> str:
    """Latency, speed and volume of each point, each with the ends of its band."""
    head = ["configuration", "trees", "requests", "failed", "hit rate", "possible", "TTFT p50", "p90", "ITL p90"]
    head += ["tok/s/user p90", "band", "tok/s/chip", "band", "busy", "valid"]
    rows = []
    for point in points:
        found = point.metrics
        ttft, itl, speeds, band = found.ttft_ms, found.itl_ms, found.interactivity, point.band
        slow, fast = (None, None) if band is None else (band.slow, band.fast)
        user = [None if end is None or end.interactivity is None else end.interactivity.p90 for end in (slow, fast)]
        chip = [None if end is None else end.total_tokens_per_s for end in (slow, fast)]
        rows.append(
            [
                point.configuration,
                str(point.concurrency),
                f"{found.requests:,}",
                str(found.errors),
                percent_text(found.hit_rate),
                percent_text(found.theoretical_hit_rate),
                seconds_text(ttft.p50 if ttft else None),
                seconds_text(ttft.p90 if ttft else None),
                seconds_text(itl.p90 if itl else None),
                rate_text(speeds.p90 if speeds else None),
                _span(user),
                rate_text(found.total_tokens_per_s),
                _span(chip),
                percent_text(float(point.flags["busy"])),
                "yes" if point.validity.valid else "no",
            ]
        )
    return table(head, rows)


def assumptions_text(plan: SimulationPlan) -> str:
    """What was simulated, where a choice moves results: formats, kernels, drafts."""
    target = plan.target
    if isinstance(target, StepsPlatform):
        return f"whole steps as measured: {target.source}, {target.date}"
    family = target.platform.family(target.options.family)
    others = ", ".join(sorted(name for name in target.platform.families if name != family.name))
    drafter = plan.args.drafter or "none"
    kernels = f"{family.name} of {family.date}{f' (--kernels: {others})' if others else ''}"
    return f"formats {plan.args.formats}, kernels {kernels}, drafter {drafter}"


def reasons_text(points: Sequence[Point]) -> str:
    """Why points are not valid, each reason once; empty if all are."""
    found: dict[str, int] = {}
    for point in points:
        for reason in point.validity.reasons:
            found[reason] = found.get(reason, 0) + 1
    return "\n".join(
        f"not valid{'' if count == len(points) else f' ({count} of {len(points)} points)'}: {reason}"
        for reason, count in found.items()
    )


def _span(ends: Sequence[float | None]) -> str:
    low, high = ends
    return "–" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"
