"""The GPU executor: a step is one copy in, one or two graph replays and one copy out, none of which the host waits for.

What a step samples is on the device when the next one reads it, so plans are launched ahead of results.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from longturn.config import PAGE_TOKENS
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import SamplingParams, StepPlan, StepResult
from longturn.executor.gpu.buckets import Buckets, StepKind, StepShape, at_least
from longturn.executor.gpu.compile import compile_all, noting_kernels
from longturn.executor.gpu.graphs import StepGraphs
from longturn.executor.gpu.layout import StateLayout
from longturn.executor.gpu.masks import Masks, with_errors
from longturn.executor.gpu.model import DeviceModel
from longturn.executor.gpu.offload import GpuOffload
from longturn.executor.gpu.packer import PackedStep, Packer, many_tiles
from longturn.executor.gpu.sampling import SampleResults, row_results
from longturn.executor.gpu.state import DeviceState, Slot, SlotRing
from longturn.executor.grammar import Grammars
from longturn.executor.offload import CopyReport
from longturn.grammar_library import Vocabulary
from longturn.kernels.sampling import sample_rows
from longturn.kernels.sampling_table import SamplePlan, SampleScratch
from longturn.kernels.step_state import decode_inputs, pick_rows, scatter, token_ids
from longturn.models.formats import ServedFormats

_log = logging.getLogger(__name__)

_SLOTS = 4
"""Steps whose buffers may be in use: two in flight, one being packed, one to spare."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What an executor is built for."""

    rows: int
    step_tokens: int
    """Most tokens of one step."""
    max_context_tokens: int
    graphs: bool = True
    sample_plan: SamplePlan = field(default_factory=SamplePlan)
    host_pages: int = 0
    """Pages that host memory is to hold beside the pool."""


class GpuExecutor:
    """Runs steps of one model on one GPU; implements `engine.protocols.Executor`.

    On a CPU (for tests, with Triton's interpreter) the same kernels run step by step.
    """

    def __init__(
        self,
        model: DeviceModel,
        limits: GpuLimits,
        *,
        description: str,
        vocabulary: Callable[[], Vocabulary] | None = None,
        formats: ServedFormats | None = None,
    ) -> None:
        """
        Args:
            model: with its page pool.
            limits: what to make room for.
            description: of the device, for people.
            vocabulary: the model's, for requests with a grammar; without it they fail. Called when the first one comes.
            formats: what the model computes with, for those who ask the engine.
        """
        device = model.device
        self._grammars = None if vocabulary is None else Grammars(vocabulary, model.vocab_size)
        self._model = model
        # A step may hold every row's decode beside the prompts, and a row of padding costs nothing.
        max_tokens = max(limits.step_tokens, limits.rows)
        layout = StateLayout.of(limits.rows, limits.max_context_tokens, max_tokens)
        self._buckets = Buckets.of(limits.rows, max_tokens, limits.max_context_tokens, model.largest_batch)
        self._sample_sizes = Buckets.of(limits.rows, max_tokens, limits.max_context_tokens, limits.rows).batches
        self._stream = _stream(device)
        self._pdl = device.type == "cuda"
        with self._on_stream():
            self._state = DeviceState(layout, model.hidden, model.vocab_size, model.dtype, device)
            self._results = SampleResults(limits.rows, device)
            self._masks = Masks(limits.rows, model.vocab_size, device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))  # weights and cache were made there
        self._sample_plan = limits.sample_plan
        self._packer = Packer(layout, self._buckets, model.vocab_size, self._grammars)
        self._ring = SlotRing(_SLOTS, layout, len(self._results.words), device)
        self._graphs = StepGraphs(device, enabled=limits.graphs)
        self._closed = False
        storage = model.storage if limits.host_pages else None
        self._offload = None if storage is None else GpuOffload(storage, limits.host_pages, self._stream)
        self._info = ExecutorInfo(
            rows=limits.rows,
            pages=model.pages,
            page_bytes=model.page_bytes,
            max_context_tokens=limits.max_context_tokens,
            vocab_size=model.vocab_size,
            device=description,
            copies_pages=True,
            host_pages=limits.host_pages,
            **({} if formats is None else asdict(formats)),
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def ready(self, sampling: SamplingParams) -> bool:
        """As `engine.protocols.Preparing.ready`."""
        grammar = sampling.grammar
        return grammar is None or self._grammars is None or self._grammars.ready(grammar)

    def launch(self, plan: StepPlan) -> GpuHandle:
        slot = self._ring.take()
        if self._offload is not None:
            self._offload.begin(plan)  # first: copies are made whatever becomes of the step
        return self._enqueue(plan, slot, self._packer.pack(plan, slot.pairs_array))

    def adopt(self, plan: StepPlan) -> GpuHandle:
        """Apply a plan without its work, as if its tokens had been computed elsewhere; its result has no rows.

        Measurements use this to stand at a long context without computing it.
        """
        slot = self._ring.take()
        return self._enqueue(plan, slot, self._packer.differences(plan, slot.pairs_array))

    def _enqueue(self, plan: StepPlan, slot: Slot, packed: PackedStep) -> GpuHandle:
        begin_ns = time.perf_counter_ns()
        for row in (*plan.freed_rows, *(new.row for new in plan.new_rows)):
            self._masks.forget(row)
        masks = self._masks.wanted(packed.samples) if packed.grammars else {}
        try:
            with self._on_stream():
                self._masks.upload(masks)
            self._enqueue_work(plan, slot, packed)
        except Exception:
            # The slot's memory may be read by a copy that was enqueued, with no event behind it to wait for.
            if self._stream is not None:
                self._stream.synchronize()
            raise
        slot.in_flight = True
        errors = {sample: text for sample, text in masks.items() if isinstance(text, str)}
        spent_ns = time.perf_counter_ns() - begin_ns
        handle = GpuHandle(plan, slot, packed, errors, spent_ns, self._offload)
        if packed.grammars:
            self._masks.launched(packed.samples, handle)
        return handle

    def _enqueue_work(self, plan: StepPlan, slot: Slot, packed: PackedStep) -> None:
        with self._on_stream():
            if slot.begin is not None:
                slot.begin.record()
            for source, target in plan.copied_pages:
                if source != target:
                    self._model.copy_page(source, target)
            if self._offload is not None:
                self._offload.copied(plan)
            for row, words in packed.penalties:
                self._state.sampling.penalties[row].copy_(torch.from_numpy(words))
            self._state.staging[: packed.words].copy_(slot.pairs[: packed.words], non_blocking=True)
            self._run(packed)
            if packed.samples:
                back = self._results.copied_words(len(packed.samples), packed.plain)
                slot.results[:back].copy_(self._results.words[:back], non_blocking=True)
            if slot.end is not None:
                slot.end.record()
        if self._offload is not None:
            self._offload.end()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._grammars is not None:
            self._grammars.close()
        if self._stream is not None:
            self._stream.synchronize()
        if self._offload is not None:
            self._offload.close()
        self._graphs.close()

    def shape_for(self, kind: StepKind, tokens: int, blocks: int) -> StepShape:
        """The shape that a step of this size is padded to, with at most `blocks` pages a row."""
        decode = self._buckets.decode(tokens, blocks) if kind is StepKind.DECODE else None
        return self._buckets.many(min(tokens, self._state.layout.max_tokens), blocks) if decode is None else decode

    def shapes(self) -> list[StepShape]:
        """Every shape that a step can have, the largest first."""
        buckets = self._buckets
        shapes = [StepShape(StepKind.MANY, t, b) for t in buckets.tokens for b in buckets.blocks]
        shapes += [StepShape(StepKind.DECODE, n, b) for n in buckets.batches for b in buckets.blocks]
        return sorted(shapes, key=lambda s: s.tokens * s.blocks, reverse=True)

    def capture(self, shapes: list[StepShape] | None = None) -> int:
        """Run and capture `shapes` (all if None) and every size of sampling; the number of graphs.

        Nothing may be in flight. The largest should come first, so that the others find their scratch in its memory.
        """
        wanted = self.shapes() if shapes is None else shapes
        sizes = tuple(reversed(self._sample_sizes))
        few = self._model.warm_layers
        with self._on_stream(), torch.inference_mode():
            if self._stream is not None:
                begin = time.perf_counter()
                with noting_kernels() as kernels:
                    for size in sizes:  # first, since sampling compiles longest
                        self._pick_and_sample(size)
                    for shape in wanted:
                        self._body(shape, few)()
                noted = time.perf_counter()
                compile_all(kernels)
                spent = (len(kernels), noted - begin, time.perf_counter() - noted)
                _log.info("%d kernels noted in %.1f s and compiled in %.1f s", *spent)
            for shape in wanted:
                self._prepare((shape,), self._body(shape, few), self._body(shape))
            for size in sizes:
                self._prepare(("sample", size), self._tail(size), self._tail(size))
            if self._stream is not None:
                self._stream.synchronize()
                torch.cuda.empty_cache()  # scratch of the eager runs; the graphs have their own
        return len(self._graphs)

    # --- pieces of a step -------------------------------------------------------------------------------------------

    def _run(self, packed: PackedStep) -> None:
        shape = packed.shape
        if shape is None:
            scatter(self._state.staging, self._state.words)
            return
        self._graphs.run((shape,), self._body(shape))
        if shape.kind is StepKind.MANY and packed.samples:
            size = at_least(self._sample_sizes, len(packed.samples))
            self._graphs.run(("sample", size), self._tail(size))

    def _prepare(self, key: tuple[object, ...], warm: Callable[[], None], launch: Callable[[], None]) -> None:
        """Run `warm`, which loads every kernel that `launch` needs, and capture `launch`."""
        self._state.staging[:2].zero_()
        warm()
        self._graphs.capture(key, launch)

    def _body(self, shape: StepShape, layers: int | None = None) -> Callable[[], None]:
        if shape.kind is StepKind.DECODE:
            return lambda: self._decode(shape, layers)
        return lambda: self._many(shape, layers)

    def _tail(self, size: int) -> Callable[[], None]:
        return lambda: self._pick_and_sample(size)

    def _decode(self, shape: StepShape, layers: int | None) -> None:
        """A whole decode step, sampling included."""
        state, n = self._state, shape.tokens
        scatter(state.staging, state.words)
        positions, tokens, table = state.position[:n], state.tokens[:n], state.batch_table[:n]
        decode_inputs(
            state.token[:n], state.token_row[:n], positions, state.last_token, state.page_table, tokens, table,
            max_blocks=shape.blocks, page_tokens=PAGE_TOKENS, pdl=self._pdl,
        )  # fmt: skip
        x = state.hidden[:n]
        self._model.decode(tokens, positions, table, x, shape.blocks, layers)
        self._sample(x)

    def _many(self, shape: StepShape, layers: int | None) -> None:
        state, n = self._state, shape.tokens
        scatter(state.staging, state.words)
        positions, rows, tokens = state.position[:n], state.token_row[:n], state.tokens[:n]
        token_ids(state.token[:n], rows, positions, state.last_token, tokens, pdl=self._pdl)
        tiles = state.tiles[: many_tiles(n, state.layout)]
        self._model.many(tokens, positions, rows, state.page_table, tiles, state.hidden[:n], shape.blocks, layers)

    def _pick_and_sample(self, size: int) -> None:
        picked = self._state.picked[:size]
        pick_rows(self._state.hidden, self._state.sample_index[:size], picked)
        self._sample(picked)

    def _sample(self, x: torch.Tensor) -> None:
        """Sample after hidden states x [S, hidden] into `_results`, and into the state for the next step."""
        state, size = self._state, x.shape[0]
        logits = self._model.logits(x)
        masks = None if self._grammars is None else self._masks.words[:size]
        scratch = SampleScratch.allocate(size, logits.shape[1], self._sample_plan, x.device)
        sample_rows(
            logits, state.sample_row[:size], state.sample_position[:size], state.sampling, scratch,
            self._results.first(size), plan=self._sample_plan, last_tokens=state.last_token,
            bitmask=masks, pdl=self._pdl,
        )  # fmt: skip

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class GpuHandle:
    """A step in flight on the device."""

    def __init__(
        self,
        plan: StepPlan,
        slot: Slot,
        packed: PackedStep,
        errors: dict[int, str],
        host_ns: int,
        offload: GpuOffload | None,
    ) -> None:
        self._plan, self._slot, self._packed, self._host_ns, self._offload = plan, slot, packed, host_ns, offload
        self._errors = errors
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self._slot.end is None or bool(self._slot.end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device, without reading the result."""
        if self._slot.end is not None:
            self._slot.end.synchronize()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        slot, elapsed_ns = self._slot, self._host_ns
        if slot.end is not None and slot.begin is not None:
            self.wait()
            elapsed_ns = int(slot.begin.elapsed_time(slot.end) * 1e6)
        results = row_results(slot.results_array, self._packed.samples, self._packed.plain)
        slot.in_flight = False
        copies = CopyReport() if self._offload is None else self._offload.ended(self._plan)
        return StepResult(self._plan.step_id, with_errors(results, self._errors), elapsed_ns, *copies)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
