"""An engine around the GPU executor that can pass over prompts, and the clock that watches its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from longturn.cli.steps.points import PRESETS
from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.hashing import page_hashes
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo, StepHandle
from longturn.engine.records import EngineRequest, RowResult, SamplingParams, StepPlan, StepResult, pack_tokens
from longturn.executor.gpu.early import EarlyWork
from longturn.executor.gpu.executor import GpuExecutor, GpuHandle
from longturn.executor.gpu.steps import GpuLimits
from longturn.executor.offload import slots_of
from longturn.kernels.packed_weights import WeightFormat
from longturn.kernels.plan_table import PlanTable
from longturn.models.base import KVSpec
from longturn.models.make_checkpoint import PRESETS as SHAPES
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config, minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_limits import scratch_bytes
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import GpuWeights, random_gpu_weights
from longturn.models.registry import CACHE_TYPES

_HASH_KEY = b"m" * 32
_MORE_TOKENS = 512
"""Context beyond a point's own: output, and the page it starts."""


WEIGHTS = {
    "bf16": (WeightFormat.PLAIN, WeightFormat.PLAIN),
    "nvfp4": (WeightFormat.NVFP4, WeightFormat.MXFP8),
}
"""Of routed experts, and of projections, shared experts and dense layers."""


_MEMORY_SHARE, _CONTEXT_BYTES = 0.92, 1 << 30


class _Formats(NamedTuple):
    experts: WeightFormat
    others: WeightFormat
    kv_dtype: torch.dtype


class _Passed:
    """A step whose work was passed over: every sampling row answers with token 7."""

    def __init__(self, plan: StepPlan, handle: GpuHandle) -> None:
        self._plan, self._handle = plan, handle

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        rows = tuple(RowResult(w.row, (7,)) for w in self._plan.work if w.samples)
        return self._handle.result()._replace(rows=rows, elapsed_ns=0)


class _Watched:
    """A step whose waiting is told apart from the host's work."""

    def __init__(self, watch: Watch, handle: GpuHandle) -> None:
        self._watch, self._handle = watch, handle

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        begin = time.perf_counter_ns()
        self._handle.wait()
        self._watch.waited_ns += time.perf_counter_ns() - begin
        result = self._handle.result()
        self._watch.device_ns.append(result.elapsed_ns)
        return result


class Watch:
    """The executor behind an engine; `computing` off passes over the work of its plans."""

    def __init__(self, executor: GpuExecutor) -> None:
        self._executor = executor
        self.computing = True
        self.waited_ns = 0
        self.device_ns: list[int] = []
        """Time on the device of every step computed."""

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def launch(self, plan: StepPlan) -> StepHandle:
        if self.computing:
            return _Watched(self, self._executor.launch(plan))
        return _Passed(plan, self._executor.adopt(plan))

    def close(self) -> None:
        """The executor outlives its engines."""


class Stand:
    """One preset's executor on random weights over a random cache."""

    def __init__(
        self, preset: str, *, rows: int, cached_tokens: int | None, context: int, step_tokens: int,
        graphs: bool = True, target_itl_ms: float = 0.0, serving: bool = False, host_bytes: int = 0,
        table: PlanTable | None = None, experts: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            preset: one of `points.PRESETS`.
            rows: of the executor.
            cached_tokens: what the page pool must hold; all that fits if None.
            context: longest of a request.
            step_tokens: most tokens of a step.
            graphs: off launches kernels one by one.
            target_itl_ms: as in the scheduler's configuration; 0 makes chunks as large as fit.
            serving: the executor will be made ready for every shape, by `start`.
            host_bytes: host memory for pages that leave the pool.
            table: of kernel plans; none if None.
            experts: how many of a layer tokens choose among; all if None.
        """
        self.preset, self.form, self.experts = preset, PRESETS[preset], experts
        self.config: MiniMaxM3Config = minimax_m3_config(preset_config(SHAPES[self.form.shape])["text_config"])
        device = torch.device("cuda")
        kv_dtype = CACHE_TYPES[self.form.cache]
        assert kv_dtype is not None, "presets name a type"
        formats = _Formats(*WEIGHTS[self.form.weights], kv_dtype)
        page_bytes = minimax_m3_kv(self.config, kv_dtype).page_bytes
        tokens = max(step_tokens, rows)
        made: GpuWeights | None = None
        if cached_tokens is None:
            made = random_gpu_weights(self.config, device=device, **formats._asdict())
            packed = formats.experts is not WeightFormat.PLAIN
            left = int(torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE)
            left -= torch.cuda.memory_allocated(device) + _CONTEXT_BYTES
            pages = (left - scratch_bytes(self.config, tokens, context, packed_experts=packed)) // page_bytes
        else:
            pages = -(-cached_tokens // PAGE_TOKENS) + 4 * rows + 2
        limits = GpuLimits(
            rows, step_tokens, context + _MORE_TOKENS, graphs, host_pages=slots_of(host_bytes, page_bytes)
        )
        self._rows, self._step_tokens, self._target_itl_ms = rows, step_tokens, target_itl_ms
        plans = GpuPlans(table=table or PlanTable())
        self._early = EarlyWork(self.config, pages, limits, plans=plans, **formats._asdict()) if serving else None
        made = made or random_gpu_weights(self.config, device=device, **formats._asdict())
        if experts is not None:
            leave_experts(made, experts)
        self.model = MiniMaxM3Gpu(made, pages, plans)
        fill_cache(made.kv, self.model.storage)
        torch.cuda.synchronize()
        self.executor = GpuExecutor(self.model, limits, description=torch.cuda.get_device_name())
        self._made = 0

    def start(self) -> int:
        """Make the executor ready to serve; the number of graphs that it has by then."""
        return self.executor.start(None if self._early is None else self._early.compilation())

    def cached_tokens_per_gb(self) -> float:
        """Tokens whose cache a GB holds."""
        return 1e9 / self.model.page_bytes * PAGE_TOKENS

    def cache_ratio(self) -> float:
        """How many times more tokens than a bf16 cache the same memory holds."""
        return minimax_m3_kv(self.config, torch.bfloat16).page_bytes / self.model.page_bytes

    def engine(self, *, passing: bool = True) -> tuple[Engine, Watch]:
        """A fresh engine, with an empty prefix cache, on the same executor.

        `passing` plans prompts whole, however long: they are passed over, or end in a few new tokens.
        """
        watch = Watch(self.executor)
        config = SchedulerConfig(
            max_running=self._rows,
            step_tokens=1 << 20 if passing else self._step_tokens,
            target_itl_ms=self._target_itl_ms,
            expected_output_tokens=128,
        )
        return Engine(watch, config, CacheConfig(), SystemClock()), watch

    def tokens(self, count: int) -> list[int]:
        """Random token ids, different each time."""
        self._made += 1
        generator = torch.Generator().manual_seed(self._made)
        return torch.randint(self.config.vocab_size, (count,), generator=generator).tolist()

    def close(self) -> None:
        self.executor.close()


_NEVER = -1e4
"""A bias that no router's score, which is below one, makes up for."""


def leave_experts(made: GpuWeights, count: int) -> None:
    """Let the routers choose among the first `count` experts of each layer."""
    for layer in made.layers:
        if layer.top:
            _, _, bias, *_ = layer.feed_forward
            bias[count:] = _NEVER


_FILL_PAGES = 1024


def fill_cache(kv: KVSpec, cache: torch.Tensor) -> None:
    """Random keys and values near one, in whatever format."""
    for layer, lanes in enumerate(kv.layers):
        for number, lane in enumerate(lanes):
            view = kv.view(cache, layer, number)
            for begin in range(0, len(view), _FILL_PAGES):
                part = view[begin : begin + _FILL_PAGES]
                if lane.dtype == torch.uint8:
                    part.copy_(torch.randint(256, part.shape, dtype=torch.uint8, device=part.device))
                elif lane.name.endswith("_scale"):
                    part.copy_(torch.rand(part.shape, device=part.device) * 0.4 + 0.1)
                else:
                    part.copy_(torch.randn(part.shape, device=part.device))


def request(name: str, tokens: list[int], max_tokens: int, *, cached: bool = False) -> EngineRequest:
    """A greedy request; `cached` gives it page hashes, so that it finds and leaves pages in the prefix cache."""
    prompt = pack_tokens(tokens)
    hashes = page_hashes(prompt, _HASH_KEY) if cached else ()
    params = SamplingParams(max_tokens, temperature=0.0)
    return EngineRequest(name, prompt, hashes, params, hash_key=_HASH_KEY if cached else b"")


def pass_over(engine: Engine, watch: Watch, requests: Iterable[EngineRequest]) -> None:
    """Bring requests to their first token without computing their prompts."""
    watch.computing = False
    waiting = set()
    for item in requests:
        engine.add(item)
        waiting.add(item.request_id)
    while waiting:
        step = engine.step()
        waiting -= {output.request_id for output in step.outputs if output.token_ids} if step is not None else set()
    watch.computing = True


def first_tokens(engine: Engine, requests: list[EngineRequest]) -> float:
    """Milliseconds from adding the requests to the first token of the last of them."""
    waiting = {item.request_id for item in requests}
    begin = time.perf_counter()
    for item in requests:
        engine.add(item)
    while waiting:
        step = engine.step()
        waiting -= {output.request_id for output in step.outputs if output.token_ids} if step is not None else set()
    return (time.perf_counter() - begin) * 1e3


def drain(engine: Engine, names: Iterable[str]) -> None:
    """End what still runs."""
    for name in names:
        engine.abort(name)
    while engine.has_work():
        engine.step()
