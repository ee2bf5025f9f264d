"""The step-time model and chunk sizes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.engine.pacing import LEAST_WORK, LOST_WORK, MIN_CHUNK_TOKENS, Allowance, StepTimeModel, attention_pairs


def feed(model: StepTimeModel, rng: random.Random, steps: int, token_ns: float, pair_ns: float, noise: float) -> None:
    for _ in range(steps):
        model.observe(int(10e6 * rng.uniform(1 - noise, 1 + noise)), 4, 0, 0.0)
        start, count = rng.randrange(8000), rng.randrange(32, 512)
        pairs = attention_pairs(start, count)
        elapsed = (10e6 + token_ns * count + pair_ns * pairs) * rng.uniform(1 - noise, 1 + noise)
        model.observe(int(elapsed), 4, count, pairs)


def test_costs_are_recovered() -> None:
    model = StepTimeModel()
    feed(model, random.Random(1), 60, 200_000, 30, 0.02)
    assert model.decode_ns == pytest.approx(10e6, rel=0.05)
    for start, count in ((0, 256), (4000, 256), (8000, 64)):
        truth = 200_000 * count + 30 * attention_pairs(start, count)
        assert model.chunk_ns(start, count) == pytest.approx(truth, rel=0.1)


def test_decoding_does_not_wash_prefill_out() -> None:
    model = StepTimeModel()
    feed(model, random.Random(1), 30, 200_000, 30, 0.0)
    before = model.per_token_ns, model.per_pair_ns
    for _ in range(10_000):
        model.observe(10_000_000, 8, 0, 0.0)
    assert (model.per_token_ns, model.per_pair_ns) == before


def test_one_slow_step_is_no_catastrophe_and_a_lasting_change_arrives() -> None:
    model = StepTimeModel()
    feed(model, random.Random(2), 40, 100_000, 0, 0.0)
    calm = model.chunk_tokens(0, 50e6)
    model.observe(60_000_000_000, 0, 256, attention_pairs(0, 256))
    assert model.chunk_tokens(0, 50e6) > calm / 4
    feed(model, random.Random(3), 60, 1_000_000, 0, 0.0)
    assert model.chunk_tokens(0, 50e6) == pytest.approx(50, abs=5)


def test_cheaper_chunks_of_one_size_bring_every_cost_down() -> None:
    model = StepTimeModel()
    feed(model, random.Random(1), 60, 200_000, 30, 0.0)
    pairs = attention_pairs(0, 256)
    for _ in range(300):
        model.observe(10_000_000, 4, 0, 0.0)
        model.observe(10_000_000 + 50_000 * 256, 4, 256, pairs)
    assert model.chunk_ns(0, 256) == pytest.approx(50_000 * 256)
    # Both by the same share: one size says nothing of what tokens cost and what pairs.
    assert model.per_pair_ns / model.per_token_ns == pytest.approx(30 / 200_000, rel=1.0)
    assert model.per_token_ns < 50_000 and model.per_pair_ns < 15


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 8), st.integers(0, 600), st.integers(0, 20_000)), max_size=40
    ),
    st.integers(0, 150_000),
    st.floats(0, 1e9),
)
def test_costs_stay_finite_and_chunks_cost_no_more_than_allowed(
    steps: list[tuple[int, int, int, int]], start: int, budget: float
) -> None:
    model = StepTimeModel()
    for elapsed, decodes, count, begin in steps:
        model.observe(elapsed, decodes, count, attention_pairs(begin, count))
    assert 0 <= model.per_token_ns < math.inf
    assert 0 <= model.per_pair_ns < math.inf
    count = model.chunk_tokens(start, budget)
    if count < 1 << 30:
        assert model.chunk_ns(start, count) <= budget * (1 + 1e-6) + 1e-6
        assert model.chunk_ns(start, count + 2) >= budget * (1 - 1e-6)


@given(st.integers(1, 600), st.integers(0, 10_000), st.integers(1, 10_000), st.floats(-1e8, 1e9))
def test_a_chunk_makes_progress_within_the_tokens(tokens: int, start: int, need: int, budget: float) -> None:
    model = StepTimeModel()
    model.observe(60_000_000, 0, 256, attention_pairs(0, 256))
    allowance = Allowance(model, tokens, budget)
    count = allowance.take(start, need, 128)
    assert 1 <= count <= min(tokens, need)
    assert count == need or count < 128 or (start + count) % 128 == 0
    if count > MIN_CHUNK_TOKENS:
        assert model.chunk_ns(start, count) <= budget * 1.000001


class World:
    """A device whose chunks cost a fixed part, a part by token and a part by pair, each step off by some noise."""

    def __init__(
        self, rng: random.Random, decode: float, fixed: float, token: float, pair: float, noise: float
    ) -> None:
        self.rng, self.noise = rng, noise
        self.decode, self.fixed, self.token, self.pair = decode, fixed, token, pair

    def step_ns(self, tokens: int, pairs: float) -> int:
        time = self.decode + (self.fixed + self.token * tokens + self.pair * pairs if tokens else 0.0)
        return round(time * self.rng.uniform(1 - self.noise, 1 + self.noise))

    def serve(
        self, model: StepTimeModel, target: float, prompts: int, length: int, start: int
    ) -> list[tuple[int, float]]:
        """Compute prompts beside decodes, one after the other; tokens and time, as they would be without noise, of each
        step whose chunk was not a prompt's end."""
        steps = []
        for _ in range(prompts):
            at, end = start, start + self.rng.randrange(length // 8, length)
            model.observe(self.step_ns(0, 0.0), 4, 0, 0.0)
            while at < end:
                allowance = Allowance(model, 1 << 20, target - model.decode_ns)
                count = allowance.take(at, end - at, 1)
                pairs = attention_pairs(at, count)
                at += count
                if at < end:
                    time = self.decode + self.fixed + self.token * count + self.pair * pairs
                    steps.append((count, time))
                model.observe(self.step_ns(count, pairs), 4, count, pairs)
        return steps


worlds = st.builds(
    World,
    st.integers(0, 10**6).map(random.Random),
    decode=st.floats(1e6, 3e7),
    fixed=st.one_of(st.just(0.0), st.floats(1e5, 5e7)),
    token=st.floats(5e3, 5e5),
    pair=st.sampled_from([0.0, 0.02, 0.5]),
    noise=st.sampled_from([0.0, 0.03]),
)


@given(worlds)
@settings(max_examples=60, deadline=None)
def test_a_fixed_part_is_told_from_tokens(world: World) -> None:
    model = StepTimeModel()
    for _ in range(80):
        model.observe(world.step_ns(0, 0.0), 4, 0, 0.0)
        start, count = world.rng.randrange(8000), world.rng.randrange(32, 4096)
        pairs = attention_pairs(start, count)
        model.observe(world.step_ns(count, pairs), 4, count, pairs)
    mean = world.fixed + world.token * 2048 + world.pair * attention_pairs(4000, 2048)
    slack = 0.02 * mean + 4 * world.noise * (mean + world.decode)
    for count in (256, 1024, 3000):
        truth = world.fixed + world.token * count + world.pair * attention_pairs(4000, count)
        assert model.fixed_ns + model.chunk_ns(4000, count) == pytest.approx(truth, abs=slack)


@given(worlds, st.floats(1.3, 6.0), st.integers(0, 20_000))
@settings(max_examples=60, deadline=None)
def test_a_target_that_can_be_kept_is_kept_and_used(world: World, ease: float, start: int) -> None:
    least = (1 + LEAST_WORK) * world.fixed + (world.token + world.pair * start) * 2 * MIN_CHUNK_TOKENS
    target = world.decode + ease * least
    length = 8 * round((target - world.decode) / (world.token + world.pair * start))
    steps = world.serve(StepTimeModel(), target, 20, max(length, 400), start)
    late = [time / target for _, time in steps[len(steps) // 2 :]]
    assert late and sorted(late)[len(late) * 9 // 10] <= 1.05 + 4 * world.noise
    assert sum(late) / len(late) >= 0.85 - 4 * world.noise


@given(worlds, st.floats(-0.5, 0.7))
@settings(max_examples=60, deadline=None)
def test_chunks_are_not_cut_thin_for_a_target_that_cannot_be_kept(world: World, share: float) -> None:
    """Each chunk does work worth its fixed part: all of a prompt takes at most a third longer than in one piece."""
    target = world.decode + share * (1 + LEAST_WORK) * world.fixed
    length = 16 * LOST_WORK * world.fixed / (world.token + world.pair * 4000)
    steps = world.serve(StepTimeModel(), target, 20, round(min(max(length, 2000), 200_000)), 4000)
    assert min(count for count, _ in steps) >= MIN_CHUNK_TOKENS, "prompts go on"
    late = [time - world.decode - world.fixed for _, time in steps[len(steps) // 2 :]]
    if world.fixed > 0.2 * world.decode and late:
        assert sum(late) / len(late) >= 0.5 * LOST_WORK * world.fixed


def test_a_second_prompt_in_a_step_does_not_pay_the_fixed_part_again() -> None:
    model = StepTimeModel()
    world = World(random.Random(1), 5e6, 20e6, 20e3, 0.0, 0.0)
    world.serve(model, 100e6, 10, 8000, 0)
    allowance = Allowance(model, 1 << 20, 100e6 - 5e6)
    first = allowance.take(0, 1000, 1)
    assert first == 1000 and allowance.open
    assert allowance.take(0, 1 << 20, 1) == pytest.approx((95e6 - 20e6) / 20e3 - 1000, rel=0.05)
    assert not allowance.open
