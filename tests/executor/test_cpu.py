"""The CPU executor over a made-up model whose next token is a function of the tokens it was really given."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import numpy.typing as npt
import pytest

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.executor.cpu import CpuExecutor
from longturn.executor.rows import StepInputs

VOCAB = 50


class ToyModel:
    """Keeps token ids in its pages instead of keys; the next token is the sum of the whole sequence mod VOCAB."""

    vocab_size = VOCAB
    max_context_tokens = 1024
    pages = 16
    page_bytes = 4 * PAGE_TOKENS
    description = "toy"

    def __init__(self) -> None:
        self.cache = np.full((self.pages, PAGE_TOKENS), 10**6, np.int64)
        self.poison: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def sums(self, inputs: StepInputs) -> list[int]:
        self.gate.wait(10)
        out = {}
        for i, row in enumerate(inputs.rows):
            begin, end = inputs.query_starts[i : i + 2]
            table = inputs.page_tables[row]
            for token, position in zip(inputs.tokens[begin:end], inputs.positions[begin:end], strict=True):
                self.cache[table[position // PAGE_TOKENS], position % PAGE_TOKENS] = token
            last = int(inputs.positions[end - 1])
            out[int(end - 1)] = int(self.cache[table].reshape(-1)[: last + 1].sum()) % VOCAB
        return [out[int(i)] for i in inputs.sample_index]

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits = np.zeros((len(inputs.sample_index), VOCAB), np.float32)
        for i, best in enumerate(self.sums(inputs)):
            logits[i, best] = np.nan if best in self.poison else 30.0
        return logits

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        return np.array([-1 if s in self.poison else s for s in self.sums(inputs)], np.int32)

    def close(self) -> None:
        self.closed = True


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


def start(row: int, prompt: list[int], pages: tuple[int, ...], **sampling: object) -> NewRow:
    params = SamplingParams(max_tokens=100, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return NewRow(row, f"r{row}", pack_tokens(prompt), len(prompt), pages, params)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "seed": 3}])
def test_steps_launched_ahead_use_the_tokens_of_steps_not_yet_read(sampling: dict[str, object]) -> None:
    model = ToyModel()
    executor = CpuExecutor(model, rows=4)
    prompt = list(range(1, 40)) * 5
    model.gate.clear()
    plans = [StepPlan(0, (RowWork(2, 0, 100, False),), new_rows=(start(2, prompt, (3, 5), **sampling),))]
    plans += [StepPlan(1, (RowWork(2, 100, 95, True),))]
    plans += [StepPlan(2 + i, (RowWork(2, 195 + i, 1, True),)) for i in range(20)]
    handles = [executor.launch(plan) for plan in plans]
    assert not handles[0].done()
    model.gate.set()
    results = [handle.result() for handle in handles]
    assert [r.step_id for r in results] == list(range(22))
    assert results[0].rows == ()
    assert [r.rows[0].token_ids[0] for r in results[1:]] == expected(prompt, 21)
    assert all(r.elapsed_ns > 0 for r in results)
    executor.close()
    assert model.closed


def test_one_bad_row_does_not_spoil_the_step() -> None:
    model = ToyModel()
    executor = CpuExecutor(model, rows=4)
    model.poison = {6}
    rows = (start(0, [1, 2, 3], (1,)), start(1, [4, 5], (2,), logprobs=2))
    work = (RowWork(0, 0, 3, True), RowWork(1, 0, 2, True))
    result = executor.launch(StepPlan(0, work, new_rows=rows)).result()
    assert result.rows[0].error is not None and result.rows[0].token_ids == ()
    assert result.rows[1].token_ids == (9,) and result.rows[1].logprobs[0].top_ids[0] == 9
    # A step that was launched before the failure was seen goes on for the others.
    ahead = executor.launch(StepPlan(1, (RowWork(0, 3, 1, True), RowWork(1, 2, 1, True)))).result()
    assert ahead.rows[1].token_ids == (18,)
    executor.close()


def test_a_broken_plan_fails_alone() -> None:
    executor = CpuExecutor(ToyModel(), rows=2)
    bad = executor.launch(StepPlan(0, (RowWork(0, 5, 1, True),)))
    with pytest.raises(ValueError, match="row 0"):
        bad.result()
    good = executor.launch(StepPlan(1, (RowWork(1, 0, 2, True),), new_rows=(start(1, [4, 5], (2,)),)))
    assert good.result().rows[0].token_ids == (9,)
    executor.close()


class PrefixModel(ToyModel):
    """As `ToyModel`, at every wanted position: the likeliest next token is the sum of all up to there."""

    def sums(self, inputs: StepInputs) -> list[int]:
        super().sums(dataclasses.replace(inputs, sample_index=np.empty(0, np.int32)))
        items = np.searchsorted(inputs.query_starts, inputs.sample_index, side="right") - 1
        tables = (inputs.page_tables[inputs.rows[item]] for item in items)
        ends = inputs.positions[inputs.sample_index] + 1
        return [int(self.cache[table].reshape(-1)[:end].sum()) % VOCAB for table, end in zip(tables, ends, strict=True)]


def test_a_row_that_scores_its_prompt_beside_rows_that_do_not() -> None:
    executor = CpuExecutor(PrefixModel(), rows=4)
    scored, other = list(range(1, 31)) * 5, [7, 8, 9]
    plans = [
        StepPlan(0, (RowWork(0, 0, 3, True),), new_rows=(start(0, other, (1,)),)),
        StepPlan(
            1,
            (RowWork(0, 3, 1, True), RowWork(1, 0, 128, False, scores=True)),
            new_rows=(start(1, scored, (2, 3), prompt_logprobs=1),),
        ),
        StepPlan(2, (RowWork(0, 4, 1, True), RowWork(1, 128, 22, True, scores=True))),
    ]
    results = [executor.launch(plan).result() for plan in plans]
    executor.close()
    assert [row.token_ids[0] for result in results for row in result.rows if row.row == 0] == expected(other, 3)
    assert results[2].rows[1].token_ids == tuple(expected(scored, 1))
    assert [[(s.row, len(s.logprobs)) for s in result.scores] for result in results] == [[], [(1, 128)], [(1, 21)]]
    found = [logprobs for result in results for s in result.scores for logprobs in s.logprobs]
    for position, logprobs in enumerate(found):
        best = sum(scored[: position + 1]) % VOCAB
        hit = scored[position + 1] == best
        # One logit of 30 among zeros: all but certain, and nothing else is.
        assert logprobs.top_ids == (best,) and logprobs.top[0] == pytest.approx(0.0, abs=1e-6)
        assert logprobs.token == pytest.approx(0.0 if hit else -30.0, abs=1e-6) and logprobs.rank == (1 if hit else 2)
