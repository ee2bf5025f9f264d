"""Masks of grammars on the device, and results of samples, with grammars and steps that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from longturn.engine.records import RowResult, SamplingParams, StepResult
from longturn.executor.gpu.masks import Masks, with_errors
from longturn.executor.gpu.sampling import RowSampling, SampleResults, row_results
from longturn.executor.grammar import GrammarError
from longturn.kernels.sampling_table import MAX_LOGPROBS

VOCAB = 40
CPU = torch.device("cpu")


@dataclass
class Grammar:
    """Allows one token: how many it was led over."""

    seen: list[int] = field(default_factory=list)
    broken: bool = False

    def advance(self, token: int) -> None:
        self.seen.append(token)

    def mask(self) -> np.ndarray:
        if self.broken:
            raise GrammarError("no way on")
        return np.array([1 << len(self.seen), 0], np.int32)


@dataclass
class Step:
    """A step that was launched."""

    tokens: list[int]
    waits: int = 0

    def wait(self) -> None:
        self.waits += 1

    def result(self) -> StepResult:
        return StepResult(1, tuple(RowResult(n, (token,)) for n, token in enumerate(self.tokens)), 0)


def sampling(grammar: Grammar | None = None, **params: Any) -> RowSampling:
    found = RowSampling.of(0, SamplingParams(4, temperature=0.0, **params), np.array([1], np.int32), 1, VOCAB, None)
    return RowSampling(found.words, found.logprobs, None, found.plain, found.light, cast(Any, grammar), None)


def launch(masks: Masks, samples: list[tuple[int, RowSampling]], step: Step) -> list[list[int]]:
    masks.upload(masks.wanted(samples))
    masks.launched(samples, step)
    return masks.words.tolist()


def test_masks_follow_their_rows_through_samples_and_are_taken_off() -> None:
    masks, grammar = Masks(3, VOCAB, CPU), Grammar()
    free, bound = sampling(), sampling(grammar)
    first, second = Step([8, 9]), Step([7])
    assert launch(masks, [(0, free), (1, bound)], first) == [[-1, -1], [1, 0], [-1, -1]]
    assert launch(masks, [(1, bound)], second) == [[2, 0], [-1, -1], [-1, -1]], "row 1 is sample 0 now"
    assert grammar.seen == [9] and first.waits == 1
    assert launch(masks, [(0, free), (2, free), (1, bound)], Step([1, 2, 3])) == [[-1, -1], [-1, -1], [4, 0]]
    assert grammar.seen == [9, 7] and masks.bound, "a step without masks has one to take off"
    masks.upload({})
    assert masks.words.tolist() == [[-1, -1]] * 3 and not masks.bound


def test_a_row_that_was_given_away_has_no_token_to_follow() -> None:
    masks = Masks(1, VOCAB, CPU)
    launch(masks, [(0, sampling(Grammar()))], Step([8]))
    masks.forget(0)
    other = Grammar()
    assert launch(masks, [(0, sampling(other))], Step([5])) == [[1, 0]]
    assert other.seen == []


def test_a_grammar_that_ends_badly_fails_its_row_alone_under_no_mask() -> None:
    masks, grammar = Masks(2, VOCAB, CPU), Grammar()
    samples = [(0, sampling(grammar)), (1, sampling(Grammar()))]
    launch(masks, samples, Step([8, 9]))
    grammar.broken = True
    wanted = masks.wanted(samples)
    masks.upload(wanted)
    assert wanted[0] == "no way on" and masks.words.tolist() == [[-1, -1], [2, 0]]
    results = (RowResult(0, (8,)), RowResult(1, (9,)))
    assert with_errors(results, {0: "no way on"}) == (RowResult(0, (), error="no way on"), RowResult(1, (9,)))
    assert with_errors(results, {}) is results


def results_of(samples: int) -> SampleResults:
    return SampleResults(samples, 2, torch.zeros(1, dtype=torch.int32), CPU)


def test_results_are_read_from_their_places() -> None:
    device = results_of(3)
    view = device.first(2)
    view.tokens.copy_(torch.tensor([11, 12]))
    view.logprobs.copy_(torch.tensor([-0.5, -1.5]))
    view.top_ids[1, :3] = torch.tensor([12, 4, 6], dtype=torch.int32)
    view.top_logprobs[1, :3] = torch.tensor([-1.5, -2.0, -2.5])
    assert view.turn_words == device.words.shape[1] and not device.words[1].any()
    plain, told = row_results(device.words[0].numpy(), [(5, sampling()), (3, sampling(logprobs=2))], plain=False)
    assert plain == RowResult(5, (11,))
    assert (told.row, told.token_ids) == (3, (12,)) and told.logprobs is not None
    (found,) = told.logprobs
    assert (found.token, found.top_ids, found.top) == (-1.5, (12, 4), (-2.0 + 0.5, -2.0))


@pytest.mark.parametrize("plain", [True, False])
def test_a_row_without_a_token_says_why(plain: bool) -> None:
    device = results_of(2)
    device.first(2).tokens.copy_(torch.tensor([-1, 7]))
    bad, good = row_results(device.words[0].numpy(), [(0, sampling()), (1, sampling())], plain=plain)
    assert bad.error is not None and "NaN" in bad.error and bad.token_ids == ()
    assert good == RowResult(1, (7,))


def test_more_logprobs_than_there_are_is_all_of_them() -> None:
    device = results_of(2)  # the second sample's follow at once
    (found,) = row_results(device.words[0].numpy(), [(0, sampling(logprobs=MAX_LOGPROBS + 5))], plain=False)
    assert found.logprobs is not None and len(found.logprobs[0].top_ids) == MAX_LOGPROBS


def test_a_resumed_row_leads_its_grammar_over_its_output_alone() -> None:
    asked: list[list[int]] = []

    class Grammars:
        def row(self, grammar: object, output: list[int]) -> Grammar:
            asked.append(output)
            return Grammar()

    params = SamplingParams(4, temperature=0.0, grammar=cast(Any, object()))
    RowSampling.of(0, params, np.array([1, 2, 3, 4], np.int32), 3, VOCAB, cast(Any, Grammars()))
    assert asked == [[4]]
