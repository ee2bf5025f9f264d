"""What a faster kernel does to users under queueing, beside Amdahl's estimate; or what locality domains do."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from longturn.cli.agentx_load import concurrency
from longturn.cli.options import check_number
from longturn.cli.simulate import add_load, add_target, check_target
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.cli.simulate_setup import SimulationPlan
    from longturn.simulate.runner import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--layout", default="tp4", metavar="L,L", help="one or several [tp4]")
    add_load(parser, concurrency_default="8")
    # What a plan of `simulate` has and a comparison has no use for.
    parser.set_defaults(sweep=False, name=None, events=None, no_band=True, chips=1, target_itl=None)
    group = parser.add_argument_group("what is changed")
    group.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME=F",
        dest="kernels_faster",
        help="a kernel F times faster, such as attend=1.2 or experts=1.5; may be repeated",
    )
    group.add_argument(
        "--chip-value",
        action="append",
        default=[],
        metavar="NAME=F",
        dest="values",
        help="a specification F times as large, such as hbm_bandwidth=1.2; may be repeated",
    )
    group.add_argument(
        "--locality",
        action="store_true",
        help="locality domains on, compared with off (Vera Rubin); layouts tp2,tp4,ep2,ep4 unless --layout is given",
    )


def run(args: argparse.Namespace) -> int:
    counts = concurrency(args.concurrency)
    check_target(args)
    if args.locality == bool(args.kernels_faster or args.values):
        raise ConfigError("say what is changed: --kernel and --chip-value, or --locality")

    import json

    from longturn.simulate.what_if import parse_speedups

    speedups = parse_speedups(args.kernels_faster)
    if args.locality and args.layout == "tp4":
        args.layout = "tp2,tp4,ep2,ep4"
    before, after = _plans(args, speedups)
    found = [
        _compared(before, after, number, lanes, speedups) for number in range(len(before.variants)) for lanes in counts
    ]
    if args.json:
        print(json.dumps(found))
    else:
        print("\n\n".join(map(_text, found)))
    return 0


def _plans(args: argparse.Namespace, speedups: dict[str, float]) -> tuple[SimulationPlan, SimulationPlan]:
    """Before and after the change."""
    import dataclasses

    from longturn.cli.simulate_setup import plan_simulation
    from longturn.simulate.linear import StepsPlatform
    from longturn.simulate.what_if import time_factors

    before = plan_simulation(argparse.Namespace(**{**vars(args), "no_locality": args.locality or args.no_locality}))
    target = before.target
    if isinstance(target, StepsPlatform):
        raise ConfigError(f"platform {target.name} knows whole steps only: a what-if needs kernels")
    if args.locality and "locality_placed_bandwidth" not in target.platform.spec:
        raise ConfigError(f"platform {target.platform.name} has no locality domains")
    options = dataclasses.replace(
        target.options, factors=time_factors(speedups), locality=args.locality or target.options.locality
    )
    platform = target.platform.scaled(**_values(args.values))
    return before, dataclasses.replace(before, target=dataclasses.replace(target, options=options, platform=platform))


def _values(texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--chip-value must be NAME=F, not '{text}'")
        check_number(f"--chip-value {name}", found[name], 0)
        if found[name] == 0:
            raise ConfigError(f"--chip-value {name} must be above 0")
    return found


def _compared(
    before: SimulationPlan, after: SimulationPlan, number: int, lanes: int, speedups: dict[str, float]
) -> dict[str, Any]:
    """Figures of one layout at one concurrency, before and after."""
    from longturn.cli.simulate_run import simulate_variant
    from longturn.simulate.what_if import amdahl

    variant = before.variants[number]
    runs = [simulate_variant(plan, variant, lanes) for plan in (before, after)]
    shares = runs[0].tally.shares()
    return {
        "configuration": variant.name,
        "concurrency": lanes,
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "changed_share": round(sum(shares.get(name, 0.0) for name in speedups), 4),
        "amdahl": round(amdahl(shares, speedups), 4) if speedups else None,
        "before": _figures(before, number, runs[0]),
        "after": _figures(after, number, runs[1]),
    }


def _figures(plan: SimulationPlan, number: int, run: Outcome) -> dict[str, float | None]:
    from longturn.bench.point_metrics import measure

    metrics = measure([turn.record for turn in run.measurement.turns], chips=plan.variants[number].deployment.chips)
    ttft, itl, e2e, speeds = metrics.ttft_s, metrics.itl_s, metrics.e2e_s, metrics.interactivity
    steps = run.tally.steps
    return {
        "step_ms": run.tally.busy_ns / steps / 1e6 if steps else None,
        "ttft_p50_ms": ttft.p50 * 1e3 if ttft else None,
        "ttft_p90_ms": ttft.p90 * 1e3 if ttft else None,
        "itl_p50_ms": itl.p50 * 1e3 if itl else None,
        "itl_p90_ms": itl.p90 * 1e3 if itl else None,
        "interactivity_p90": speeds.p90 if speeds else None,
        "e2e_p90_ms": e2e.p90 * 1e3 if e2e else None,
        "total_tokens_per_s_per_chip": metrics.total_tokens_per_s_per_chip,
        "output_tokens_per_s_per_chip": metrics.output_tokens_per_s_per_chip,
    }


_ROWS = (
    ("mean step, ms", "step_ms", False),
    ("TTFT p50, ms", "ttft_p50_ms", False),
    ("TTFT p90, ms", "ttft_p90_ms", False),
    ("ITL p50, ms", "itl_p50_ms", False),
    ("ITL p90, ms", "itl_p90_ms", False),
    ("interactivity p90, tok/s/user", "interactivity_p90", True),
    ("end to end p90, ms", "e2e_p90_ms", False),
    ("total, tok/s/chip", "total_tokens_per_s_per_chip", True),
    ("output, tok/s/chip", "output_tokens_per_s_per_chip", True),
)


def _text(found: dict[str, Any]) -> str:
    from longturn.cli.terminal import table

    rows = []
    for name, key, higher in _ROWS:
        before, after = found["before"][key], found["after"][key]
        better = None if not before or not after else (after / before if higher else before / after)
        rows.append([name, _number(before), _number(after), "–" if better is None else f"{better:.3f}x"])
    lines = [f"{found['configuration']}, {found['concurrency']} session trees"]
    if found["amdahl"] is not None:
        lines.append(
            f"what is changed takes {found['changed_share']:.1%} of the time of steps: Amdahl's estimate "
            f"{found['amdahl']:.3f}x for everything"
        )
    return "\n".join([*lines, table(["", "before", "after", "better by"], rows)])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
