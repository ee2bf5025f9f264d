"""The GPU executor: a step is one copy in and one or two graph replays, none of which the host waits for.

What a step samples is on the device when the next one reads it, so plans are launched ahead of results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import SamplingParams, StepPlan, StepResult
from longturn.executor.gpu.buckets import Piece, StepKind, StepShape, at_least, pieces_of
from longturn.executor.gpu.compile import Compilation
from longturn.executor.gpu.graphs import StepGraphs
from longturn.executor.gpu.masks import with_errors
from longturn.executor.gpu.model import DeviceModel
from longturn.executor.gpu.offload import GpuOffload
from longturn.executor.gpu.packer import PackedStep, Packer
from longturn.executor.gpu.queue import DriverQueue, HostQueue, Slot, SlotRing, StepQueue
from longturn.executor.gpu.sampling import row_results
from longturn.executor.gpu.steps import DeviceSteps, GpuLimits
from longturn.executor.grammar import Grammars
from longturn.executor.offload import CopyReport
from longturn.grammar_library import Vocabulary
from longturn.models.formats import ServedFormats

_log = logging.getLogger(__name__)

_NO_COPIES = CopyReport()


class GpuExecutor:
    """Runs steps of one model on one GPU; implements `engine.protocols.Executor`, `Preparing` and `Idling`.

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
        self._stream = _stream(device)
        self._steps = DeviceSteps(model, limits, masked=self._grammars is not None, stream=self._stream)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))  # weights and cache were made there
        layout = self._steps.layout
        self._packer = Packer(layout, self._steps.buckets, model.vocab_size, self._grammars)
        staging = self._steps.state.staging
        self._ring = SlotRing(len(staging), self._steps.results.words, self._stream)
        self._queue: StepQueue = HostQueue(staging)
        if self._stream is not None:
            self._queue = DriverQueue(self._stream, staging)
        self._graphs = StepGraphs(device, enabled=limits.graphs)
        self._compilation = Compilation(())
        self._later: dict[Piece, None] = {}
        """Pieces whose graphs are made later, in this order."""
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

    # --- steps ------------------------------------------------------------------------------------------------------

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
        if self._offload is not None:
            self._offload.begin(plan)
        return self._enqueue(plan, slot, self._packer.differences(plan, slot.pairs_array))

    def _enqueue(self, plan: StepPlan, slot: Slot, packed: PackedStep) -> GpuHandle:
        begin_ns = time.perf_counter_ns()
        all_masks = self._steps.masks
        for row in plan.freed_rows:
            all_masks.forget(row)
        for new in plan.new_rows:
            all_masks.forget(new.row)
        masks = all_masks.wanted(packed.samples) if packed.grammars else {}
        try:
            if masks or all_masks.bound:
                with self._steps.on_stream():
                    all_masks.upload(masks)
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
            all_masks.launched(packed.samples, handle)
        return handle

    def _enqueue_work(self, plan: StepPlan, slot: Slot, packed: PackedStep) -> None:
        steps, queue = self._steps, self._queue
        piece = None if packed.shape is None else self._piece(packed.shape, packed.light)
        if piece is not None and self._later and piece in self._later:
            self._make_graph(piece)
        queue.begin(slot)
        if plan.copied_pages or packed.penalties:
            with steps.on_stream():
                for source, target in plan.copied_pages:
                    if source != target:
                        self._model.copy_page(source, target)
                for row, words in packed.penalties:
                    steps.state.sampling.penalties[row].copy_(torch.from_numpy(words))
        if self._offload is not None:
            self._offload.copied(plan)
        queue.send(slot, packed.words)
        self._run(piece, packed)
        queue.end(slot)
        if self._offload is not None:
            self._offload.end()

    def _piece(self, shape: StepShape, light: bool) -> Piece:
        """What such a step runs: one that is not light where that is there and the light one is not."""
        light = light and shape.kind is StepKind.DECODE
        piece = Piece(shape, light)
        if light and self._later and piece in self._later:
            whole = Piece(shape, light=False)
            return piece if whole in self._later else whole
        return piece

    def _run(self, piece: Piece | None, packed: PackedStep) -> None:
        """Replay the graphs of a step; the kernels of a piece without one are launched one by one."""
        steps = self._steps
        if piece is None:
            with steps.on_stream():
                steps.scatter()
            return
        if not self._replayed(piece):
            with steps.on_stream():
                steps.body(piece)()
        if piece.shape.kind is StepKind.MANY and packed.samples:
            tail = at_least(steps.sample_sizes, len(packed.samples)), packed.light
            if not self._replayed(("sample", *tail)):
                with steps.on_stream():
                    steps.tail(*tail)()

    def _replayed(self, key: tuple[object, ...]) -> bool:
        """Replay the graph of a piece, if it has one."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        self._queue.replay(graph)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._compilation.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._stream is not None:
            self._stream.synchronize()
        if self._offload is not None:
            self._offload.close()
        self._graphs.close()

    # --- getting ready ----------------------------------------------------------------------------------------------

    def shape_for(self, kind: StepKind, tokens: int, blocks: int) -> StepShape:
        """The shape that a step of this size is padded to, with at most `blocks` pages a row."""
        buckets = self._steps.buckets
        decode = buckets.decode(tokens, blocks) if kind is StepKind.DECODE else None
        return buckets.many(min(tokens, buckets.tokens[-1]), blocks) if decode is None else decode

    def start(self, compiling: Compilation | None = None) -> int:
        """Get ready to serve, as `capture` does; most graphs are left for later: they are made by `idle`, or when a
        step first needs one, a tenth of a second each.

        Args:
            compiling: kernels that are being compiled already; all are if None.
        """
        return self._capture(*self._steps.first_and_later(), compiling)

    def capture(self, shapes: Sequence[StepShape] | None = None) -> int:
        """Make the graphs of `shapes` (all if None) and of every size of sampling; the number of graphs.

        Nothing may be in flight. The largest shapes should come first, so that the others find their scratch in its
        memory.
        """
        wanted = self._steps.shapes() if shapes is None else shapes
        return self._capture([piece for shape in wanted for piece in pieces_of(shape)], (), None)

    def _capture(self, now: Sequence[Piece], later: Sequence[Piece], compiling: Compilation | None) -> int:
        steps, few = self._steps, self._model.warm_layers
        begin = time.perf_counter()
        if compiling is None and self._stream is not None:
            launches = [steps.tail(*tail) for tail in steps.tails()]
            launches += [steps.body(piece, few) for piece in (*now, *later)]
            with steps.on_stream():
                compiling = Compilation(steps.kernels(launches))
        if compiling is not None:
            self._compilation = compiling
        self._later.update(dict.fromkeys(later))
        for piece in now:
            self._make_graph(piece)
        shapes_s = time.perf_counter() - begin
        for tail in steps.tails():
            self._make(("sample", *tail), steps.tail(*tail), steps.tail(*tail))
        if not self._later:
            self._compilation.wait()
        if self._stream is not None:
            torch.cuda.empty_cache()  # scratch of runs without a graph; the graphs have their own
        spent = (len(now), shapes_s, time.perf_counter() - begin - shapes_s)
        _log.info("%d pieces ready in %.1f s, sampling %.1f s after", *spent)
        return len(self._graphs)

    def idle(self) -> bool:
        """As `engine.protocols.Idling.idle`: makes a graph."""
        if self._later:
            self._make_graph(next(iter(self._later)))
            if not self._later:
                self._compilation.wait()
        return bool(self._later)

    def _make_graph(self, piece: Piece) -> None:
        self._make(piece, self._steps.body(piece, self._model.warm_layers), self._steps.body(piece))
        self._later.pop(piece, None)

    def _make(self, key: tuple[object, ...], few: Callable[[], None], launch: Callable[[], None]) -> None:
        """Capture `launch`. Before that `few`, which has all its kernels, runs over padding, since a capture must not
        load kernels; the inputs of the step before are lost."""
        steps = self._steps
        with steps.on_stream(), torch.inference_mode():
            if self._stream is not None:
                begin = time.perf_counter()
                unforeseen = self._compilation.wait_for(steps.kernels([few]))
                spent = time.perf_counter() - begin
                if unforeseen or spent > 0.5:
                    _log.info("%s waited %.1f s for kernels, %d of them not foreseen", key, spent, unforeseen)
            steps.state.clear_inputs()
            few()
            self._graphs.capture(key, launch)


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
        copies = _NO_COPIES if self._offload is None else self._offload.ended(self._plan)
        return StepResult(self._plan.step_id, with_errors(results, self._errors), elapsed_ns, *copies)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
