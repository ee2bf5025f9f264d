"""Simulate the points of a plan, in this process or in several."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stderr
from multiprocessing import get_context
from pathlib import Path

from longturn.bench.frontier import non_dominated
from longturn.cli.simulate_point import band_of, make_simulated_point
from longturn.cli.simulate_setup import SimulationPlan, Variant, plan_simulation
from longturn.report.point import Point
from longturn.simulate.runner import Outcome, Run, SimulationError, simulate

Progress = Callable[[int, int, str], None]
"""(points done, of how many, name of the next)."""
_BROKEN = ("run_cancelled", "no_success", "context_overflow_rate_exceeded", "error_rate_exceeded", "insufficient_")
_Task = tuple[int, int, bool]
"""Variant, session trees, with a band."""


def run_points(
    plan: SimulationPlan,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    left_out: list[str] | None = None,
    also_banded: Callable[[Sequence[Point]], Iterable[int]] | None = None,
) -> list[Point]:
    """All points of a plan, in the order of its variants. A sweep gives bands to those of the frontier only, as whoever
    asks for `frontier_bands`.

    Args:
        plan: see there.
        jobs: processes.
        progress: is told before each point, and at the end.
        left_out: gets a line for each point whose load is too much to even begin; None to end with the first of them.
        also_banded: which points get a band beside those of the frontier, where only those do.

    Raises:
        LongturnError: a simulation cannot go on, or none can.
    """
    args = plan.args
    band = not args.no_band
    best_only = args.sweep or getattr(args, "frontier_bands", False)
    tasks: list[_Task] = [
        (number, lanes, band and not best_only) for number in range(len(plan.variants)) for lanes in plan.lanes
    ]
    done = list(zip(tasks, _run(plan, tasks, jobs, progress), strict=True))
    points, kept = [], []
    for task, found in done:
        if isinstance(found, SimulationError):
            if left_out is None:
                raise found
            left_out.append(f"{plan.variants[task[0]].name}, {task[1]} trees: {found}")
        else:
            points.append(found)
            kept.append(task)
    if not points:
        raise SimulationError(left_out[-1] if left_out else "nothing was simulated")
    if best_only and band:
        best = sorted({*frontier_indices(points), *(() if also_banded is None else also_banded(points))})
        again = _run(plan, [(*kept[index][:2], True) for index in best], jobs, progress)
        for index, found in zip(best, again, strict=True):
            if isinstance(found, SimulationError):
                raise found
            points[index] = found
    return points


def frontier_indices(points: Sequence[Point]) -> list[int]:
    """Points that no other beats in both P90 interactivity and throughput per chip, by rising interactivity.

    A point that departs from a preset's rules, by a shorter duration for example, counts: all are simulated alike.
    """
    usable: list[tuple[int, tuple[float, float]]] = []
    for index, point in enumerate(points):
        pair = figures_pair(point)
        if pair is not None:
            usable.append((index, pair))
    return [usable[place][0] for place in non_dominated([pair for _, pair in usable])]


def figures_pair(point: Point) -> tuple[float, float] | None:
    """(P90 interactivity, tokens per second and chip) of a point that can stand on a frontier."""
    speeds, rate = point.metrics.interactivity, point.metrics.total_tokens_per_s
    broken = [reason for reason in point.validity.reasons if reason.startswith(_BROKEN)]
    return None if speeds is None or not rate or broken else (speeds.p90, rate)


def simulate_variant(
    plan: SimulationPlan,
    variant: Variant,
    lanes: int,
    *,
    scale: float = 1.0,
    events: Callable[[str], None] | None = None,
) -> Outcome:
    """One run. Raises LongturnError if it cannot go on."""
    run = Run(plan.trees, plan.rules, lanes, plan.seed, plan.args.router, plan.request_ns)
    return simulate(plan.spec(variant, scale=scale), run, events)


def _run(
    plan: SimulationPlan, tasks: list[_Task], jobs: int, progress: Progress | None
) -> list[Point | SimulationError]:
    def tell(done: int) -> None:
        if progress is not None:
            name = "" if done == len(tasks) else plan.variants[tasks[done][0]].name
            progress(done, len(tasks), name)

    points: list[Point | SimulationError] = []
    tell(0)
    with ExitStack() as stack:
        if jobs > 1 and len(tasks) > 1:
            pool = stack.enter_context(ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")))
            futures = [pool.submit(_point_elsewhere, plan.args, task) for task in tasks]
            for future in futures:
                points.append(future.result())
                tell(len(points))
            return points
        events = None
        if plan.args.events is not None:
            file = stack.enter_context(Path(plan.args.events).open("w", encoding="utf-8"))
            events = _line_writer(file.write)
        for task in tasks:
            points.append(_point(plan, task, events))
            tell(len(points))
    return points


def _line_writer(write: Callable[[str], object]) -> Callable[[str], None]:
    def line(text: str) -> None:
        write(text + "\n")

    return line


def _point_elsewhere(args: argparse.Namespace, task: _Task) -> Point | SimulationError:
    """In a process of its own: what a plan holds does not travel, its arguments do."""
    with redirect_stderr(io.StringIO()):  # what planning says was said by the first process
        plan = plan_simulation(args)
    return _point(plan, task, None)


def _point(plan: SimulationPlan, task: _Task, events: Callable[[str], None] | None) -> Point | SimulationError:
    number, lanes, with_band = task
    variant = plan.variants[number]
    try:
        nominal = simulate_variant(plan, variant, lanes, events=events)
    except SimulationError as error:
        return error
    ends: tuple[Outcome, Outcome] | None = None
    if with_band:
        band = band_of(nominal)
        try:
            ends = (
                simulate_variant(plan, variant, lanes, scale=1.0 + band),
                simulate_variant(plan, variant, lanes, scale=1.0 - band),
            )
        except SimulationError:
            ends = None  # slower steps cannot even begin with this load: the point has no lower end, and shows no band
    return make_simulated_point(plan, variant, lanes, nominal, ends)
