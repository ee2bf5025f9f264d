"""Whoever applies the engine's cache events to an empty set knows exactly what the prefix cache holds."""

from __future__ import annotations

import itertools
import random

import pytest

from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import next_page_hash
from longturn.engine.kv_events import CacheCleared, CacheEvent, CacheEvents, PagesRemoved, PagesStored
from longturn.engine.loop import Engine
from tests.engine import test_random_runs
from tests.engine.content import KEY, Bench, make_request


class Mirror:
    """A router's view of one engine."""

    def __init__(self, keys: tuple[bytes, ...] = (KEY, b"other")) -> None:
        self.known: set[bytes] = set()
        self.events: list[CacheEvent] = []
        self.keys = keys
        self.closed = False

    def tell(self, events: tuple[CacheEvent, ...]) -> None:
        assert events and not self.closed
        self.events += events
        for event in events:
            if isinstance(event, CacheCleared):
                self.known.clear()
            elif isinstance(event, PagesRemoved):
                for page_hash in event.hashes:
                    self.known.remove(page_hash)
            else:
                self._store(event)

    def _store(self, event: PagesStored) -> None:
        assert len(event.tokens) == len(event.hashes) * PAGE_TOKENS * 4
        size = PAGE_TOKENS * 4
        pages = [event.tokens[i * size : (i + 1) * size] for i in range(len(event.hashes))]
        chains = []
        for key in self.keys:
            parent, made = event.parent, []
            for page in pages:
                parent = next_page_hash(parent, page, key)
                made.append(parent)
            chains.append(tuple(made))
        assert event.hashes in chains, "tokens and parent make the hashes"
        for page_hash in event.hashes:
            assert page_hash not in self.known, "a page is stored twice"
            self.known.add(page_hash)

    def close(self) -> None:
        self.closed = True


class MirroredBench(Bench):
    """Compares the mirror with the cache after every step; resets the cache now and then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mirror = Mirror()
        self.engine = Engine(
            self.executor, self.scheduler, self.cache, self.clock, self.log.append, cache_listener=self.mirror
        )
        self.resets = 0
        self._rng = random.Random(self.pages)

    def step(self):  # type: ignore[no-untyped-def]
        outputs = super().step()
        if self._rng.random() < 0.02:
            known = len(self.mirror.known)
            assert self.engine.reset_cache() == known
            self.engine.check_invariants()
            assert self.engine.stats().pages_cached == 0
            self.resets += 1
        self.compare()
        return outputs

    def compare(self) -> None:
        cache = self.engine._scheduler.requests.pool.cache
        assert len(cache) == len(self.mirror.known)
        assert all(page_hash in cache for page_hash in self.mirror.known)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("crowded", [False, True])
def test_the_mirror_holds_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch, seed: int, crowded: bool) -> None:
    monkeypatch.setattr(test_random_runs, "Bench", MirroredBench)
    bench = test_random_runs.random_run(seed, run_ahead=bool(seed % 2), crowded=crowded, pages=14 if crowded else None)
    assert isinstance(bench, MirroredBench)
    kinds = {type(event) for event in bench.mirror.events}
    assert PagesStored in kinds and (not crowded or kinds == {PagesStored, PagesRemoved, CacheCleared})


def test_a_prompt_and_its_output_are_stored_with_their_parents() -> None:
    bench = MirroredBench(pages=20)
    bench._rng.seed(1)
    first = list(range(90)) * 4
    bench.run_one(make_request("a", first, 200, stop=False))
    stored = [event for event in bench.mirror.events if isinstance(event, PagesStored)]
    assert stored[0].parent is None
    hashes = [page_hash for event in stored for page_hash in event.hashes]
    assert hashes[:2] == list(bench.requests["a"].page_hashes)
    assert len(hashes) == (360 + 200 - 1) // PAGE_TOKENS, "generated tokens make pages too"
    for before, after in itertools.pairwise(stored):
        assert after.parent == before.hashes[-1]
    bench.engine.close()
    assert bench.mirror.closed


def test_a_reset_makes_the_next_prompt_cold_and_the_one_after_it_warm() -> None:
    bench = MirroredBench(pages=20)
    bench._rng = random.Random(1)
    prompt = list(range(90)) * 4
    bench.run_one(make_request("cold", prompt, 1))
    assert bench.run_one(make_request("warm", prompt, 1)).cached_tokens == 2 * PAGE_TOKENS
    assert bench.engine.reset_cache() == 2
    bench.compare()
    assert bench.run_one(make_request("reset", prompt, 1)).cached_tokens == 0
    assert bench.run_one(make_request("again", prompt, 1)).cached_tokens == 2 * PAGE_TOKENS


def test_removals_in_a_row_are_one_event() -> None:
    events = CacheEvents()
    assert events.take() == ()
    for name in (b"a", b"b"):
        events.removed(name)
    events.stored(None, [(b"c", b"1"), (b"d", b"2")])
    events.removed(b"c")
    events.cleared()
    assert events.take() == (
        PagesRemoved((b"a", b"b")),
        PagesStored((b"c", b"d"), None, b"12"),
        PagesRemoved((b"c",)),
        CacheCleared(),
    )
    assert events.take() == ()
