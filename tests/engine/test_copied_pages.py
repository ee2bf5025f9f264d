"""Prompts that are cached to their last page, on an executor that copies pages: one token is left to compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from longturn.config import PAGE_TOKENS, SchedulerConfig
from longturn.engine.records import StepPlan
from tests.engine import test_random_runs
from tests.engine.content import Bench, ContentExecutor, ContentHandle, make_request, random_tokens


@dataclass
class CopyingExecutor(ContentExecutor):
    """Also copies pages, before anything of the step is written."""

    def launch(self, plan: StepPlan) -> ContentHandle:
        self.copied = {target: list(self.pages[source]) for source, target in plan.copied_pages}
        return super().launch(plan)

    def _check_fresh(self, pages: Sequence[int], touched: set[int]) -> None:
        super()._check_fresh(pages, touched)
        for page in pages:
            self.pages[page] = self.copied.get(page, self.pages[page])


class CopyingBench(Bench):
    def __post_init__(self) -> None:
        super().__post_init__()
        info = replace(self.executor.info, copies_pages=True)
        self.executor = CopyingExecutor(info, self.clock)
        self.engine = type(self.engine)(self.executor, self.scheduler, self.cache, self.clock, self.log.append)


def test_a_whole_hit_computes_its_last_token_in_a_copy() -> None:
    bench = CopyingBench()
    prompt = random_tokens(random.Random(1), 3 * PAGE_TOKENS)
    bench.run_one(make_request("cold", prompt, 4))
    first = len(bench.executor.plans)
    final = bench.run_one(make_request("warm", prompt, 4))
    plan = bench.executor.plans[first]
    (work,) = plan.work
    assert (work.start, work.count, work.samples) == (3 * PAGE_TOKENS - 1, 1, True)
    (copy,) = plan.copied_pages
    assert copy[0] == bench.executor.plans[0].new_rows[0].pages[2] and copy[1] == plan.new_rows[0].pages[2] != copy[0]
    assert final.cached_tokens == 3 * PAGE_TOKENS - 1


@pytest.mark.parametrize("extra", [1, 127])
def test_a_prompt_that_ends_inside_a_page_copies_nothing(extra: int) -> None:
    bench = CopyingBench()
    prompt = random_tokens(random.Random(2), 2 * PAGE_TOKENS + extra)
    for name in ("cold", "warm"):
        bench.run_one(make_request(name, prompt, 4))
    assert not any(plan.copied_pages for plan in bench.executor.plans)


def test_without_the_executors_word_the_last_page_is_computed_again() -> None:
    bench = Bench()
    prompt = random_tokens(random.Random(3), 2 * PAGE_TOKENS)
    bench.run_one(make_request("cold", prompt, 4))
    first = len(bench.executor.plans)
    bench.run_one(make_request("warm", prompt, 4))
    assert bench.executor.plans[first].work[0].count == PAGE_TOKENS
    assert not any(plan.copied_pages for plan in bench.executor.plans)


def test_the_copied_page_may_be_the_one_that_is_evicted_for_it() -> None:
    """A pool without a blank page: the hit's own last page is the oldest that can be evicted, and keeps its content."""
    bench = CopyingBench(pages=5, rows=1, scheduler=SchedulerConfig(max_running=1, expected_output_tokens=1))
    prompt = random_tokens(random.Random(4), 3 * PAGE_TOKENS)
    bench.run_one(make_request("cold", prompt, 1))
    bench.run_one(make_request("other", random_tokens(random.Random(5), PAGE_TOKENS), 1))
    first = len(bench.executor.plans)
    bench.run_one(make_request("warm", prompt, 1))
    ((source, target),) = bench.executor.plans[first].copied_pages
    assert source == target


@pytest.mark.parametrize("seed", [101, 105, 107, 115])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_random_runs_with_copies(monkeypatch: pytest.MonkeyPatch, seed: int, run_ahead: bool) -> None:
    """Every page's content is known, and every output is the oracle's."""
    monkeypatch.setattr(test_random_runs, "Bench", CopyingBench)
    bench = test_random_runs.random_run(seed, run_ahead=run_ahead, steps=300)
    copies = sum(len(plan.copied_pages) for plan in bench.executor.plans)
    assert copies > 0
