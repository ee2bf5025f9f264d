"""What the arguments of `simulate` stand for: targets, deployments, sessions."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from longturn.bench.presets import Rules
from longturn.bench.traces.shrink import drop_long
from longturn.bench.traces.tree import SessionTree
from longturn.cli.agentx_load import concurrency
from longturn.cli.agentx_sweep import plan_sweep
from longturn.config import PAGE_TOKENS
from longturn.errors import ConfigError
from longturn.simulate.acceptance import Acceptance, survival_of, synthetic_survival
from longturn.simulate.corpus import corpus_named, made_like
from longturn.simulate.cost.options import CostOptions, Drafter
from longturn.simulate.cost.routing import Routing
from longturn.simulate.deployment import Deployment, Target, engine_spec, parse_deployment
from longturn.simulate.drafts import load_drafter
from longturn.simulate.flights import check_timings
from longturn.simulate.formats import formats_named
from longturn.simulate.linear import StepsPlatform, is_steps_platform, linear_spec, load_steps_platform
from longturn.simulate.platform import load_platform, platform_path
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.shapes import load_shape
from longturn.simulate.sweep import candidates
from longturn.simulate.workload import Stretch, stretched

REQUEST_MS = 3.0
"""Rendering and hashing a long conversation's new part, HTTP and a message to the engine: 1.5 ms to hash 142,000 tokens
and below 1 ms for the rest, as measured on a two-core CPU."""
_DEFAULT_SEED = 42


@dataclass(frozen=True, slots=True)
class Variant:
    """One curve of a simulation."""

    name: str
    deployment: Deployment
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What is simulated."""

    args: argparse.Namespace
    target: Target | StepsPlatform
    variants: tuple[Variant, ...]
    trees: list[SessionTree]
    """Scaled and filtered."""
    dropped: int
    """Requests that --max-context left out."""
    rules: Rules
    seed: int
    lanes: list[int]
    """Session trees alive at once, one point each."""
    request_ns: int
    stretch: Stretch = field(default_factory=Stretch)
    """By how much --median-input and --median-output stretched the sessions."""
    left_out: tuple[str, ...] = ()
    """Layouts that a sweep could not use, with the reason."""

    def spec(self, variant: Variant, *, scale: float = 1.0) -> EngineSpec:
        """Raises ConfigError as `engine_spec`."""
        return spec_of(self.target, variant, scale=scale)


def spec_of(target: Target | StepsPlatform, variant: Variant, *, scale: float = 1.0) -> EngineSpec:
    """The engines of one curve. Raises ConfigError as `engine_spec`."""
    if isinstance(target, StepsPlatform):
        return linear_spec(target, variant.settings, scale=scale)
    return engine_spec(replace(target, settings=variant.settings), variant.deployment, scale=scale)


Sessions = tuple[list[SessionTree], int, Rules, Stretch]
"""What is replayed, how many requests were dropped, the rules, and by how much sessions were stretched."""


def plan_simulation(args: argparse.Namespace, sessions: Sessions | None = None) -> SimulationPlan:
    """What the checked arguments stand for; reads the traces unless `sessions` are there, and tries every layout.

    Raises:
        ConfigError: an unknown platform, model, layout ..., a layout that does not fit, or nothing is left to replay.
        TraceError: a trace cannot be read.
    """
    settings = settings_of(args.sets)
    trees, dropped, rules, stretch = sessions_of(args) if sessions is None else sessions
    seed = args.seed if args.seed is not None else rules.seed if rules.seed is not None else _DEFAULT_SEED
    target = target_of(args, seed)
    variants, left_out = _variants(args, target, settings)
    fitting = []
    for variant in variants:
        try:
            check_fits(trees, spec_of(target, variant), variant.name)
        except ConfigError as error:
            if not args.sweep:
                raise
            left_out.append(str(error))
        else:
            fitting.append(variant)
    if not fitting:
        raise ConfigError(f"no layout of at most {args.chips} chips fits: {left_out[-1]}")
    return SimulationPlan(
        args, target, tuple(fitting), trees, dropped, rules, seed, concurrency(args.concurrency),
        request_ns_of(args, target), stretch, tuple(left_out),
    )  # fmt: skip


def target_of(args: argparse.Namespace, seed: int) -> Target | StepsPlatform:
    """The platform, and the model on it where the platform's file does not say. Raises ConfigError.

    Args:
        seed: of accepted drafts.
    """
    path = platform_path(args.platform)
    if is_steps_platform(path):
        return load_steps_platform(path)
    drafter = drafter_of(args.drafter)
    options = CostOptions(
        family=args.kernels, locality=not args.no_locality, drafter=drafter,
        routing=Routing() if args.routing is None else Routing(spread=args.routing),
        factors=getattr(args, "factors", MappingProxyType({})),
    )  # fmt: skip
    platform = load_platform(args.platform)
    if args.formats is None:
        args.formats = "nvfp4" if "nvfp4_flops" in platform.spec else "mxfp8"
    return Target(
        platform=platform,
        shape=load_shape(args.model),
        formats=formats_named(args.formats),
        options=options,
        host_bytes=round(args.host_memory * 1e9),
        memory_share=args.memory_share,
        acceptance=acceptance_of(drafter, args.acceptance, seed),
    )


def acceptance_of(drafter: Drafter | None, rule: str, seed: int) -> Acceptance:
    """How many drafts are accepted. Raises ConfigError if that was not measured for so many."""
    if drafter is None:
        return Acceptance()
    if rule == "synthetic":
        return Acceptance(synthetic_survival(drafter.accepted(), drafter.drafts), seed)
    return Acceptance(survival_of(drafter.acceptance, drafter.drafts), seed)


def drafter_of(text: str | None) -> Drafter | None:
    """`eagle3-gqa-m3:3`. Raises ConfigError."""
    if text is None:
        return None
    name, colon, drafts = text.partition(":")
    if not colon or not drafts.isdecimal():
        raise ConfigError(f"--drafter must be NAME:K with K drafts a step, not '{text}'")
    return load_drafter(name, int(drafts))


def settings_of(sets: list[str]) -> dict[str, Any]:
    """`scheduler.step_tokens=16384` as names and values. Raises ConfigError for anything without a `=`."""
    found: dict[str, Any] = {}
    for assignment in sets:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set '{assignment}' is not A.B=C")
        found[name.strip()] = _value(text.strip())
    return found


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    kinds: tuple[type[int], type[float]] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def sessions_of(args: argparse.Namespace) -> Sessions:
    """Raises ConfigError and TraceError."""
    as_recorded = args.median_input is None and args.median_output is None and args.like is None
    load = {**vars(args), "inproc": False, "api": "completions", "token_ids": None}
    if not as_recorded:
        load["max_context"] = None  # of the stretched ones
    plan = plan_sweep(argparse.Namespace(**load))
    check_timings(plan.trees)
    if as_recorded:
        return plan.trees, plan.dropped, plan.rules, Stretch()
    dropped = 0
    if args.like is not None:
        seed = args.seed if args.seed is not None else plan.rules.seed if plan.rules.seed is not None else _DEFAULT_SEED
        trees, stretch, dropped = made_like(plan.trees, corpus_named(args.like), seed)
    else:
        trees, stretch = stretched(plan.trees, args.median_input, args.median_output)
    if args.max_context is not None:
        trees, more = drop_long(trees, args.max_context)
        dropped += more
        if not trees:
            raise ConfigError(f"--max-context {args.max_context} leaves no request of these traces")
    return trees, dropped, plan.rules, stretch


def request_ns_of(args: argparse.Namespace, target: Target | StepsPlatform) -> int:
    """From a client's send to the engine."""
    if args.request_ms is not None:
        asked_ms: float = args.request_ms
        return round(asked_ms * 1e6)
    if isinstance(target, StepsPlatform):
        return round(target.constants.request_ns)
    return round(REQUEST_MS * 1e6)


def check_fits(trees: list[SessionTree], spec: EngineSpec, name: str) -> None:
    """Raises ConfigError if a request is longer than a simulated engine holds."""
    limit = min(spec.info.max_context_tokens, (spec.info.pages - 1) * PAGE_TOKENS)
    tree, longest = max(
        ((tree, request) for tree in trees for request in tree.requests()),
        key=lambda pair: pair[1].input_tokens + pair[1].output_tokens,
    )
    needed = longest.input_tokens + max(1, longest.output_tokens)
    if needed > limit:
        raise ConfigError(
            f"{tree.source}: {longest.place} needs {needed:,} tokens, {name} holds {limit:,}: give --max-context "
            f"{limit} to drop such requests, or shrink the sessions with --scale-context"
        )


def _variants(
    args: argparse.Namespace, target: Target | StepsPlatform, settings: Mapping[str, Any]
) -> tuple[list[Variant], list[str]]:
    """The curves, and what a sweep leaves out."""
    if isinstance(target, StepsPlatform):
        if args.sweep:
            raise ConfigError(f"platform {target.name}: a platform of measured steps has one layout, nothing to sweep")
        name = args.name or f"{target.model.name} on {target.chip}"
        return [Variant(name + step, parse_deployment("tp1"), more) for step, more in _paced(args, settings)], []
    base = args.name or f"{target.shape.name} on {target.platform.name}"
    if args.sweep:
        deployments = candidates(min(args.chips, int(target.platform.value("scale_up_chips"))))
    else:
        deployments = [parse_deployment(text) for text in dict.fromkeys(args.layout.split(","))]
    kept: list[Variant] = []
    left_out: list[str] = []
    for deployment in deployments:
        for step, more in _paced(args, settings):
            variant = Variant(f"{base} {deployment.name}{step}", deployment, more)
            try:
                spec_of(target, variant)
            except ConfigError as error:
                if not args.sweep:
                    raise
                if not left_out or left_out[-1] != str(error):
                    left_out.append(str(error))
                continue
            kept.append(variant)
    return kept, left_out


def _paced(args: argparse.Namespace, settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The settings with each --target-itl, and what it adds to a curve's name."""
    if not args.target_itl:
        return [("", dict(settings))]
    return [
        (f", steps of {target_ms:g} ms", {**settings, "scheduler.target_itl_ms": target_ms})
        for target_ms in _numbers("--target-itl", args.target_itl)
    ]


def _numbers(flag: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers with commas between, not '{text}'") from None
    if any(not 0 <= value < float("inf") for value in found):
        raise ConfigError(f"{flag} must be numbers of at least 0, not '{text}'")
    return found


def command_of(args: argparse.Namespace, layout: str, lanes: int, settings: Mapping[str, Any]) -> str:
    """The command that repeats one point, without this machine's folders."""
    parts = ["longturn", "simulate", "--platform", _base(args.platform), "--model", _base(args.model)]
    parts += ["--layout", layout, "--concurrency", str(lanes)]
    parts += ["--traces", *map(_base, args.traces), "--preset", args.preset]
    for flag, value in (
        ("--formats", args.formats), ("--kernels", args.kernels), ("--drafter", args.drafter),
        ("--duration", args.duration), ("--seed", args.seed), ("--max-context", args.max_context),
        ("--request-ms", args.request_ms),
        ("--like", args.like), ("--routing", args.routing),
        ("--median-input", args.median_input), ("--median-output", args.median_output),
    ):  # fmt: skip
        parts += [flag, f"{value:.15g}" if isinstance(value, float) else str(value)] if value is not None else []
    for flag, value, usual in (
        ("--host-memory", args.host_memory, 0.0), ("--memory-share", args.memory_share, 0.9),
        ("--scale-context", args.scale_context, 1.0), ("--router", args.router, "session"),
        ("--acceptance", args.acceptance, "positions"),
    ):  # fmt: skip
        parts += [flag, f"{value:g}" if isinstance(value, float) else value] if value != usual else []
    for name, value in settings.items():
        parts += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    switches = (
        ("--no-locality", args.no_locality), ("--no-split", args.no_split), ("--derive-system", args.derive_system),
    )  # fmt: skip
    return shlex.join([*parts, *(flag for flag, on in switches if on)])


def _base(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name
