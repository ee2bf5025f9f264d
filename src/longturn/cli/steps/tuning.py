"""Measure kernel plans on this GPU, a whole step at a time, and keep what is better than a kernel's own choice.

A step of a model with few layers, random weights and this model's widths and formats is captured as a graph and timed,
with one plan changed at a time. Timing whole steps rather than kernels counts how a kernel's end overlaps the next
one's beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from longturn.config import PAGE_TOKENS
from longturn.errors import ConfigError
from longturn.executor.gpu.compile import Compilation, Kernel, noting_kernels
from longturn.kernels.many_tokens import TILE_TOKENS
from longturn.kernels.packed_weights import WeightFormat
from longturn.kernels.plan_table import Entry, PlanTable, Value
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

_log = logging.getLogger(__name__)

Fields = Mapping[str, Value]

_ONE_ROW: Mapping[str, tuple[Fields, ...]] = {
    "projection": ({"rows": 2}, {"rows": 8}, {"warps": 2}, {"warps": 8}),
    "out": ({"rows": 2}, {"rows": 8}, {"warps": 2}, {"warps": 8}),
    "moe_one": ({"in_rows": 1}, {"in_rows": 4}, {"in_warps": 2}, {"down_rows": 4}, {"down_warps": 4}),
}
_FEW_ROWS: Mapping[str, tuple[Fields, ...]] = {
    "projection": ({"dot_rows": 16}, {"dot_rows": 32}, {"dot_stages": 4}, {"slices": True}, {"tile_rows": 32}),
    "out": ({"dot_rows": 16}, {"dot_rows": 32}, {"dot_stages": 4}, {"slices": True}, {"tile_rows": 32}),
    "moe_few": (
        {"in_rows": 32},
        {"in_rows": 128},
        {"down_rows": 64},
        {"down_turns": 2},
        {"down_turns": 4},
        {"stages": 2},
        {"stages": 4},
        {"warps": 8},
    ),
}
_ANY_ROWS: Mapping[str, tuple[Fields, ...]] = {
    "msa": ({"splits": 8}, {"splits": 4}, {"splits": 2}, {"tile": 64}, {"score_warps": 8}, {"warps": 8}),
}
_MANY: Mapping[str, tuple[Fields, ...]] = {
    "moe_many": (
        {"tile": 16},
        {"tile": 32},
        {"tile": 64},
        {"tile": 128},
        {"in_stages": 2},
        {"in_columns": 128},
        {"shared_apart": True},
        {"shared_apart": False},
        {"copied": True},
        {"copied": False},
    ),
    # Those of the Triton kernels come last: on a plain bf16 cache they matter only once a plan has left Hopper's.
    "msa_many": (
        {"hopper_scores": False},
        {"hopper_attend": False},
        {"attend_warps": 8},
        {"score_stages": 2},
        {"score_warps": 4},
    ),
}
_REPLAYS = 20
_GAIN = 0.01
"""A plan is kept if the step is faster by this share; two timings of one plan differ by less."""


def candidates(size: int, *, many: bool) -> Mapping[str, tuple[Fields, ...]]:
    """What is tried for a step of `size` rows, or tokens, by kernel."""
    if many:
        return _MANY
    return {**(_ONE_ROW if size == 1 else _FEW_ROWS), **_ANY_ROWS}


@dataclass(frozen=True, slots=True)
class Tried:
    """One plan of one kernel in one kind of step."""

    entry: Entry
    base_ms: float
    """Of the step with the best plans found before."""
    step_ms: float | None
    """Of the step with this one; None if it does not run."""
    kept: bool


class Tuner:
    """A model with few layers, and steps of it."""

    def __init__(
        self,
        config: MiniMaxM3Config,
        *,
        experts: WeightFormat,
        others: WeightFormat,
        kv_dtype: torch.dtype,
        layers: int,
        context: int,
        device: str = "cuda",
    ) -> None:
        """
        Args:
            config: the model; its last `layers` layers are measured.
            experts: format of routed experts; others: of other weights.
            kv_dtype: of the cache.
            context: tokens of each row.
            device: where weights go.
        """
        self.context, self._device = context, device
        self.config = replace(
            config, sparse_layers=config.sparse_layers[-layers:], moe_layers=config.moe_layers[-layers:]
        )
        self._weights = random_gpu_weights(
            self.config, device=device, experts=experts, others=others, kv_dtype=kv_dtype
        )
        self._blocks = context // PAGE_TOKENS + 1

    def tune(self, table: PlanTable, sizes: list[int], *, many: bool) -> Iterator[Tried | PlanTable]:
        """Try plans for decode steps of these rows, or steps of so many new tokens; ends with the new table."""
        for size in sizes:
            pages = (1 if many else size) * self._blocks + (size // PAGE_TOKENS + 1 if many else 0) + 1
            owner = MiniMaxM3Gpu(self._weights, pages)
            entries = [
                Entry(kernel, owner.plans.shapes[kernel], size, fields)
                for kernel, each in candidates(size, many=many).items()
                for fields in each
            ]
            for entry in entries:  # what an earlier run found is measured again, like anything else
                table = table.without(entry.kernel, entry.shape, entry.rows)
            steps = [self._step(owner, tried, size, many) for tried in (table, *map(table.with_entry, entries))]
            Compilation(kernel for step in steps for kernel in _kernels(step)).wait()
            base = _time_ms(steps[0])
            if base is None:
                unit = "tokens" if many else "rows"
                raise ConfigError(f"a step of {size} {unit} does not run on this device: {_why_not(steps[0])}")
            for entry, made in zip(entries, steps[1:], strict=True):
                old = next((e for e in table.entries if _same(e, entry)), None)
                merged = entry if old is None else replace(entry, fields={**old.fields, **entry.fields})
                tried = table.with_entry(merged)
                ms = _time_ms(made if old is None else self._step(owner, tried, size, many))
                kept = ms is not None and ms < base * (1 - _GAIN)
                yield Tried(merged, base, ms, kept)
                if kept and ms is not None:
                    table, base = tried, ms
        yield table

    def _step(self, owner: MiniMaxM3Gpu, table: PlanTable, size: int, many: bool) -> Callable[[], None]:
        """A step's launches, with the plans of `table`, over the pages of `owner`."""
        model = owner.with_plans(GpuPlans(table=table))
        rows = 1 if many else size
        count = torch.arange(rows * self._blocks + (size // PAGE_TOKENS + 1 if many else 0), dtype=torch.int32)
        pages = (count + 1).clamp(max=owner.pages - 1).view(rows, -1).to(self._device)
        x = torch.empty(size, self.config.hidden, dtype=model.dtype, device=self._device)
        tokens = torch.randint(self.config.vocab_size, (size,), dtype=torch.int32, device=self._device)
        if not many:
            positions = torch.full((size,), self.context - 1, dtype=torch.int32, device=self._device)

            def decode() -> None:
                model.decode(tokens, positions, pages, x, self._blocks)

            return decode
        positions = torch.arange(self.context - 1, self.context - 1 + size, dtype=torch.int32, device=self._device)
        firsts = torch.arange(0, size, TILE_TOKENS, dtype=torch.int32)
        tiles = torch.stack((firsts, torch.full_like(firsts, TILE_TOKENS).minimum(size - firsts)), 1).to(self._device)
        row = torch.zeros(size, dtype=torch.int32, device=self._device)

        def step() -> None:
            model.many(tokens, positions, row, pages, tiles, x, pages.shape[1])

        return step


def _same(a: Entry, b: Entry) -> bool:
    return (a.kernel, a.shape, a.rows) == (b.kernel, b.shape, b.rows)


def _kernels(step: Callable[[], None]) -> list[Kernel]:
    try:
        with noting_kernels() as noted, torch.inference_mode():
            step()
    except Exception as error:  # a plan that cannot be launched is told when it is timed
        _log.info("not tried: %s", error)
        return []
    return noted


def _why_not(step: Callable[[], None]) -> str:
    """The first line of what a step fails with. Raises torch.OutOfMemoryError: that is the whole run's to tell."""
    try:
        with torch.inference_mode():
            step()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return "its graph cannot be captured"


def _time_ms(step: Callable[[], None]) -> float | None:
    """Median over three of the mean time of a replayed step; None if it cannot run."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.inference_mode():
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
    except Exception as error:
        # Too much shared memory, a tile that does not divide, registers: each kernel has its own words for it.
        _log.info("does not run: %s: %s", type(error).__name__, str(error).splitlines()[:1])
        return None
    times: list[float] = []
    for _ in range(3):
        graph.replay()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / _REPLAYS)
    return sorted(times)[1]
