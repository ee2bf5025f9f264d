"""Re-deriving the calibration of the platforms that ship: which table or relative each constant comes from.

Held-out rule: constants come from kernel tables (and, for Vera Rubin's experts, from half of the one table that is
public), never from the points that `longturn.simulate.published` judges by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from longturn.errors import ConfigError
from longturn.simulate.calibration import (
    AttentionConstants,
    CollectiveConstants,
    ExpertConstants,
    KernelFamily,
    Residual,
)
from longturn.simulate.fit.attention import fit_attention
from longturn.simulate.fit.collectives import fit_all_reduce, fit_all_to_all
from longturn.simulate.fit.emit import write_calibration
from longturn.simulate.fit.experts import (
    BLACKWELL_KERNELS,
    HOPPER_KERNELS,
    TRTLLM_KERNELS,
    Kernel,
    best_spread,
    fit_experts,
    fit_uneven,
    judge_expert_parallel,
)
from longturn.simulate.fit.own import longturn_family
from longturn.simulate.fit.rubin import fit_rubin_experts
from longturn.simulate.fit.tables import DATE, SOURCE, Columns, read_table
from longturn.simulate.platform import Platform, load_platform, load_spec, platform_path
from longturn.simulate.published_data import OWN_RUNS, groups

KERNELS_IN_ATTENTION = 8
"""Launches of one attention module, with which its fixed time is divided to get one small kernel's: quantise,
projection, norms with rotation and cache write, index scores, selection, attention, merge, output projection."""
_GEMM_NOTE = "dense products (feed-forward, shared expert, head) use the attention projections' fractions"
FAMILY, TRTLLM_FAMILY = "vllm-0.24", "vllm-0.24-trtllm"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where one platform's constants come from."""

    prefix: str
    """Of its table files; empty if it has none."""
    kernels: tuple[Kernel, ...]
    experts_from: str | None = None
    collectives_from: str | None = None
    """Platforms whose fractions and times are borrowed."""
    attention_from: str | None = None
    trtllm: bool = False
    """Also with TensorRT-LLM's generated expert kernels, as a family of its own."""
    own_steps: bool = False
    """Also Longturn's own kernels, from whole steps that were measured."""
    rubin: bool = False
    """NVFP4 experts from the published table."""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "h200": Recipe("h200_sxm", HOPPER_KERNELS, own_steps=True),
        "b200": Recipe("b200_sxm", BLACKWELL_KERNELS, trtllm=True),
        "gb200": Recipe("gb200", BLACKWELL_KERNELS, trtllm=True),
        "gb300": Recipe("gb300", BLACKWELL_KERNELS, trtllm=True),
        "b300": Recipe("b300_sxm", (), experts_from="gb300", collectives_from="b200", trtllm=True),
        "vr-nvl72": Recipe("", (), experts_from="gb300", collectives_from="gb300", attention_from="gb300", rubin=True),
    }
)


def fit_platforms(
    directory: Path, say: Callable[[str], None], *, names: tuple[str, ...] = tuple(RECIPES)
) -> dict[str, list[KernelFamily]]:
    """Constants of platforms, from the tables in `directory`; `say` is told residuals, one line each.

    Raises:
        ConfigError: a table is missing or damaged, pyarrow is not installed, or a platform is unknown.
    """
    done: dict[str, list[KernelFamily]] = {}
    for name in names:
        if name not in RECIPES:
            raise ConfigError(f"no recipe for fitting platform '{name}' (known: {', '.join(RECIPES)})")
        _fit_with_relatives(name, directory, say, done)
    return {name: done[name] for name in names}


def write_platforms(families: Mapping[str, list[KernelFamily]]) -> None:
    """Write constants into the platform files that ship, keeping families that were fitted to something else."""
    for name, fitted in families.items():
        path = platform_path(name)
        ours = {family.name for family in fitted}
        calibrated = "\n[calibration." in path.read_text()
        old = load_platform(str(path)).families.values() if calibrated else ()
        kept = [family for family in old if family.name not in ours]
        write_calibration(path, fitted + kept)


def _fit_with_relatives(
    name: str, directory: Path, say: Callable[[str], None], done: dict[str, list[KernelFamily]]
) -> None:
    if name in done:
        return
    recipe = RECIPES[name]
    for relative in (recipe.experts_from, recipe.collectives_from, recipe.attention_from):
        if relative is not None:
            _fit_with_relatives(relative, directory, say, done)
    done[name] = [_fit(name, recipe, directory, say, {key: value[0] for key, value in done.items()})]
    if recipe.own_steps:
        runs = groups("decode", "chain", "layer", path=OWN_RUNS)
        measured = [group for group in runs if group.values.get("use") == "fitted"]
        own = longturn_family(load_spec(platform_path(name)), done[name][0], measured)
        done[name].append(own)
        constants = own.attention["bf16-bf16"]
        decode, prefill = _told(constants.decode), _told(constants.prefill)
        say(f"{name} longturn, each predicted from the others: decode steps {decode}; layers with chunks {prefill}")
    if recipe.trtllm and recipe.experts_from is None:
        done[name].append(_trtllm(name, recipe, directory, say, done[name][0]))
    elif recipe.trtllm and recipe.experts_from is not None:
        lender = next(family for family in done[recipe.experts_from] if family.name == TRTLLM_FAMILY)
        experts = _borrow_experts(lender.experts, recipe.experts_from)
        done[name].append(dataclasses.replace(done[name][0], name=TRTLLM_FAMILY, experts=experts))


def _fit(
    name: str, recipe: Recipe, directory: Path, say: Callable[[str], None], relatives: Mapping[str, KernelFamily]
) -> KernelFamily:
    platform = load_spec(platform_path(name))
    attention: Mapping[str, AttentionConstants]
    if recipe.attention_from is not None:
        attention = _borrow_attention(relatives[recipe.attention_from].attention, recipe.attention_from)
    else:
        attention = fit_attention(
            platform,
            _needed(directory, f"{recipe.prefix}_msa_generation_module_perf"),
            _needed(directory, f"{recipe.prefix}_msa_context_module_perf"),
            "whole attention modules, 8 to 64 heads",
        )
    for key, constants in attention.items():
        say(f"{name} attention {key}: decode {_told(constants.decode)}, prefill {_told(constants.prefill)}")
    experts: dict[str, ExpertConstants] = {}
    if recipe.experts_from is not None:
        experts.update(_borrow_experts(relatives[recipe.experts_from].experts, recipe.experts_from))
    else:
        experts.update(_experts(platform, recipe.prefix, recipe.kernels, directory, say))
    if recipe.rubin:
        # The published rows have balanced routing; what uneven routing costs is the lender's.
        uneven = experts["nvfp4"].uneven
        for key, constants_of in fit_rubin_experts(platform).items():
            experts[key] = dataclasses.replace(constants_of, uneven=uneven)
        for key, rubin in experts.items():
            say(f"{name} experts {key}: {rubin.basis}, {_told(rubin.tables)}")
    if recipe.collectives_from is not None:
        lender = relatives[recipe.collectives_from]
        reduce = _borrow_collective(lender.all_reduce, recipe.collectives_from)
        exchange = _borrow_collective(lender.all_to_all, recipe.collectives_from)
    else:
        nccl = _needed(directory, f"{recipe.prefix}_nccl")
        reduce = fit_all_reduce(platform, _needed(directory, f"{recipe.prefix}_car"), nccl)
        exchange = fit_all_to_all(platform, nccl)
    small = round(attention["bf16-bf16"].decode_fixed_ns / KERNELS_IN_ATTENTION)
    return KernelFamily(FAMILY, SOURCE, DATE, float(small), _GEMM_NOTE, attention, experts, reduce, exchange)


def _trtllm(name: str, recipe: Recipe, directory: Path, say: Callable[[str], None], base: KernelFamily) -> KernelFamily:
    """The same engine with TensorRT-LLM's generated expert kernels."""
    platform = load_spec(platform_path(name))
    experts = _experts(platform, recipe.prefix, TRTLLM_KERNELS[1:2], directory, say)
    return dataclasses.replace(base, name=TRTLLM_FAMILY, experts={**base.experts, **experts})


def _experts(
    platform: Platform, prefix: str, kernels: tuple[Kernel, ...], directory: Path, say: Callable[[str], None]
) -> dict[str, ExpertConstants]:
    table = _needed(directory, f"{prefix}_moe")
    found: dict[str, ExpertConstants] = {}
    for kernel in kernels:
        constants = fit_experts(platform, table, kernel)
        if constants is None:
            raise ConfigError(f"table {prefix}_moe has too few rows of {kernel.source} for {kernel.format}")
        constants = fit_uneven(platform, table, kernel, constants)
        found[kernel.format] = constants
        say(f"{platform.name} experts {kernel.format} ({kernel.source}): {_told(constants.tables)}")
        if kernel.m3_only:
            best, residual = best_spread(platform, table, kernel, constants)
            say(
                f"{platform.name} experts {kernel.format}: power-law rows {_told(constants.uneven_tables)}; "
                f"with their own spread, {best:g}, {residual.rms:.1%}"
            )
            judged = (
                f"EP{ranks} {_told(judge_expert_parallel(platform, table, kernel, constants, ranks))}"
                for ranks in (2, 4, 8)
            )
            say(f"{platform.name} experts {kernel.format}, not fitted: {'; '.join(judged)}")
    return found


def _needed(directory: Path, name: str) -> Columns:
    table = read_table(directory, name)
    if table is None:
        raise ConfigError(f"no kernel table {directory / name}.parquet")
    return table


def _borrow_attention(table: Mapping[str, AttentionConstants], lender: str) -> dict[str, AttentionConstants]:
    note = f"fractions and fixed times of {lender}: no table of its own"
    return {key: dataclasses.replace(value, basis="borrowed", note=note) for key, value in table.items()}


def _borrow_experts(table: Mapping[str, ExpertConstants], lender: str) -> dict[str, ExpertConstants]:
    note = f"fractions and fixed time of {lender}: no table of its own"
    return {key: dataclasses.replace(value, basis="borrowed", note=note) for key, value in table.items()}


def _borrow_collective(collective: CollectiveConstants, lender: str) -> CollectiveConstants:
    return dataclasses.replace(
        collective, basis="borrowed", note=f"{lender}: {collective.note}; bandwidth scaled, latency kept"
    )


def _told(residual: Residual) -> str:
    return f"{residual.rms:.1%} rms, {residual.worst:.0%} worst of {residual.points} rows"
