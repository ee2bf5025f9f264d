"""A bound on what one prompt gets of a step."""

from __future__ import annotations

import random

from longturn.config import SchedulerConfig
from tests.engine.content import Bench, make_request, random_tokens


def test_a_prompt_gets_no_more_of_a_step_than_its_bound() -> None:
    bench = Bench(pages=80, scheduler=SchedulerConfig(step_tokens=1024, chunk_tokens=256, target_itl_ms=0))
    rng = random.Random(3)
    for name, length in (("a", 1000), ("b", 600), ("c", 100)):
        bench.add(make_request(name, random_tokens(rng, length), 1, stop=False))
    bench.drain()
    first, *rest = [[item.count for item in plan.work] for plan in bench.executor.plans]
    assert sorted(first) == [100, 256, 256], "the rest of the budget is for other prompts, not for these"
    assert all(count <= 256 for counts in rest for count in counts)
    assert sum(map(sum, [first, *rest])) == 1700
