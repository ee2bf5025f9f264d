"""The CPU executor: steps run on a worker thread, in the order of their launch.

The worker computes in native code or torch, both of which release the interpreter lock, so the engine's loop can
receive requests and schedule the next step meanwhile. All row state belongs to the worker: plan N+1 may be launched
before anyone has seen the tokens of step N.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    PromptScores,
    RowResult,
    RowWork,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from longturn.executor.grammar import GrammarError, Grammars
from longturn.executor.offload import CopyReport, Offload
from longturn.executor.rows import Rows, StepInputs
from longturn.executor.sampler import NonFiniteLogits, sample, score
from longturn.grammar_library import Vocabulary
from longturn.models.formats import ServedFormats


class CpuModel(Protocol):
    """A model and its page pool on a CPU."""

    vocab_size: int
    max_context_tokens: int
    pages: int
    page_bytes: int
    description: str

    @property
    def storage(self) -> npt.NDArray[np.uint8]:
        """[pages, page_bytes]: the page pool's own memory."""
        ...

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Compute all tokens of the step; [n, vocab] float32 logits for `sample_index`, valid until the next call."""
        ...

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        """The same step, but only the index of each largest logit: [n] int32. NaN logits give -1."""
        ...

    def close(self) -> None: ...


class _Handle:
    """A step in flight on the worker."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._finished.is_set()

    def result(self) -> StepResult:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def finish(self, result: StepResult | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._finished.set()


class CpuExecutor:
    """Runs steps of one model on the CPU; implements `engine.protocols.Executor`."""

    def __init__(
        self,
        model: CpuModel,
        rows: int,
        *,
        formats: ServedFormats | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        offload: Offload | None = None,
    ) -> None:
        """
        Args:
            model: with its page pool.
            rows: requests computed at once.
            formats: what the model computes with, for those who ask the engine.
            vocabulary: the model's, for requests with a grammar; without it they fail. Called when the first one comes.
            offload: host memory beside the model's page pool, if there is any.
        """
        self._model = model
        self._offload = offload
        self._grammars = None if vocabulary is None else Grammars(vocabulary, model.vocab_size)
        self._rows = Rows(rows, model.max_context_tokens, model.vocab_size, self._grammars)
        self._info = ExecutorInfo(
            rows=rows,
            pages=model.pages,
            page_bytes=model.page_bytes,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.vocab_size,
            device=model.description,
            scores_prompts=True,
            host_pages=0 if offload is None else offload.host_pages,
            **({} if formats is None else asdict(formats)),
        )
        self._queue: queue.SimpleQueue[tuple[StepPlan, _Handle] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="longturn-cpu-executor", daemon=True)
        self._worker.start()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def ready(self, sampling: SamplingParams) -> bool:
        """As `engine.protocols.Preparing.ready`."""
        grammar = sampling.grammar
        return grammar is None or self._grammars is None or self._grammars.ready(grammar)

    def launch(self, plan: StepPlan) -> _Handle:
        handle = _Handle()
        self._queue.put((plan, handle))
        return handle

    def close(self) -> None:
        if self._worker.is_alive():
            self._queue.put(None)
            self._worker.join()
            if self._offload is not None:
                self._offload.close()
            self._model.close()
            if self._grammars is not None:
                self._grammars.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, handle = item
            try:
                handle.finish(self._step(plan), None)
            except Exception as error:
                handle.finish(None, error)

    def _step(self, plan: StepPlan) -> StepResult:
        begin_ns = time.perf_counter_ns()
        if self._offload is not None:
            self._offload.begin(plan)
        self._rows.apply(plan)
        results, scores = self._results(plan) if plan.work else ([], [])
        copies = CopyReport()
        if self._offload is not None:
            self._offload.end()
            copies = self._offload.ended(plan)
        elapsed_ns = time.perf_counter_ns() - begin_ns if plan.work else 0
        return StepResult(plan.step_id, tuple(results), elapsed_ns, *copies, scores=tuple(scores))

    def _results(self, plan: StepPlan) -> tuple[list[RowResult], list[PromptScores]]:
        """Compute a plan's work."""
        inputs = self._rows.inputs(plan.work)
        sampling = [w for w in plan.work if w.samples]
        scores = any(w.scores for w in plan.work)
        if not scores and all(self._rows.sampling(w.row).plain_greedy for w in sampling):
            tokens = self._model.greedy(inputs)
            return [self._greedy_result(w, int(token)) for w, token in zip(sampling, tokens, strict=True)], []
        logits = self._model.logits(inputs)
        if not scores:
            return [self._sample(w, row_logits) for w, row_logits in zip(sampling, logits, strict=True)], []
        return self._scored(plan, logits)

    def _scored(self, plan: StepPlan, logits: npt.NDArray[np.float32]) -> tuple[list[RowResult], list[PromptScores]]:
        """As `_results`, of a plan with work that scores a prompt."""
        results: list[RowResult] = []
        scores: list[PromptScores] = []
        at = 0
        for w in plan.work:
            if w.scores:
                following = self._rows.following(w)
                count = self._rows.sampling(w.row).params.prompt_logprobs or 0
                found = zip(logits[at : at + len(following)], following, strict=True)
                scores.append(PromptScores(w.row, tuple(score(row, int(token), count) for row, token in found)))
                at += len(following)
            if w.samples:
                results.append(self._sample(w, logits[at]))
                at += 1
        return results, scores

    def _greedy_result(self, work: RowWork, token: int) -> RowResult:
        if token < 0:
            return self._failed(work, "the model produced NaN logits")
        self._rows.append(work.row, token)
        return RowResult(work.row, (token,))

    def _failed(self, work: RowWork, error: str) -> RowResult:
        # A step launched ahead may already want this row's next position: give it a token, its result is dropped.
        self._rows.append(work.row, 0)
        return RowResult(work.row, (), error=error)

    def _sample(self, work: RowWork, logits: npt.NDArray[np.float32]) -> RowResult:
        try:
            token, found = sample(logits, self._rows.sampling(work.row), work.start + work.count)
        except (NonFiniteLogits, GrammarError) as error:
            return self._failed(work, str(error))
        self._rows.append(work.row, token)
        logprobs: tuple[TokenLogprobs, ...] = () if found is None else (found,)
        return RowResult(work.row, (token,), logprobs)
