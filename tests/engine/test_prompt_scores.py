"""Log-probabilities of a prompt: all of it is computed, a page at a time, and each of its tokens is told of once."""

from __future__ import annotations

import random

import pytest

from longturn.config import PAGE_TOKENS, SchedulerConfig
from longturn.errors import RequestError
from tests.engine.content import Bench, make_request, random_tokens


@pytest.mark.parametrize("tokens", [1, 2, PAGE_TOKENS, PAGE_TOKENS + 1, 5 * PAGE_TOKENS, 700])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_cached_prompt_is_computed_again(tokens: int, run_ahead: bool) -> None:
    bench = Bench(scheduler=SchedulerConfig(step_tokens=512, run_ahead=run_ahead))
    prompt = random_tokens(random.Random(1), tokens)
    bench.run_one(make_request("first", prompt, 2, stop=False))
    final = bench.run_one(make_request("scored", prompt, 2, stop=False, prompt_logprobs=0))
    assert final.cached_tokens == 0 or tokens == 1
    assert len(bench.scores["scored"]) == tokens - 1  # (what they are is the bench's to compare)
    again = bench.run_one(make_request("again", prompt, 2, stop=False))
    assert again.cached_tokens == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS, "its pages are as good as any"


def test_prompts_take_turns_and_others_go_on() -> None:
    bench = Bench(pages=80, scheduler=SchedulerConfig(step_tokens=2048, target_itl_ms=0))
    rng = random.Random(2)
    for name in ("a", "b"):
        bench.add(make_request(name, random_tokens(rng, 600), 1, stop=False, prompt_logprobs=2))
    bench.add(make_request("other", random_tokens(rng, 600), 30, stop=False))
    bench.drain()
    scored = [[work for work in plan.work if work.scores] for plan in bench.executor.plans]
    assert sum(map(len, scored)) == 10 and max(map(len, scored)) == 1


def test_a_request_that_is_preempted_tells_of_no_token_twice() -> None:
    """(`Bench` compares what was told with what there is to tell.)"""
    preempted = 0
    for seed in range(6):
        rng = random.Random(seed)
        scheduler = SchedulerConfig(expected_output_tokens=1, target_itl_ms=0.0, step_tokens=rng.choice([64, 300]))
        bench = Bench(pages=14, scheduler=scheduler)
        for number in range(8):
            prompt = random_tokens(rng, rng.randrange(100, 500))
            bench.add(make_request(f"r{number}", prompt, 300, stop=False, prompt_logprobs=0))
        bench.drain()
        preempted += bench.engine.stats().preemptions
    assert preempted > 5


def test_an_executor_that_cannot_score_refuses_the_request_alone() -> None:
    bench = Bench(scores_prompts=False)
    with pytest.raises(RequestError, match="log-probabilities of a prompt") as caught:
        bench.engine.add(make_request("r", [1, 2, 3], prompt_logprobs=0))
    assert caught.value.param == "prompt_logprobs" and caught.value.http_status == 400
    bench.run_one(make_request("other", [1, 2, 3]))


def test_how_much_was_cached_is_said_before_the_first_token() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=128))
    rng = random.Random(3)
    shared = random_tokens(rng, 4 * PAGE_TOKENS)
    bench.run_one(make_request("first", shared, 1, stop=False))
    bench.add(make_request("second", shared + random_tokens(rng, 900), 2, stop=False))
    outputs = [output for _ in range(30) for output in bench.step()]
    assert [len(output.token_ids) for output in outputs] == [0, 1, 1]
    assert {output.cached_tokens for output in outputs} == {4 * PAGE_TOKENS}
    # A prompt of one step has its first token as soon.
    bench.add(make_request("third", random_tokens(rng, 100), 1, stop=False))
    assert [len(output.token_ids) for _ in range(3) for output in bench.step()] == [1]
