"""Eviction order against a twin that keeps one plain list and looks at every page."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from longturn.engine.pages import Page
from longturn.engine.retention import Retention

SECOND = 1_000_000_000


@dataclass
class Kept:
    page: Page
    released_ns: int
    protected: bool
    claimed: bool
    order: int


class Twin:
    """The documented rule, evaluated over all pages at each eviction."""

    def __init__(self, pages: int, half_life_ns: int) -> None:
        self.pages = pages
        self.half_life_ns = half_life_ns
        self.kept: list[Kept] = []
        self.order = 0

    def add(self, page: Page, now_ns: int, claimed: bool) -> None:
        self.kept.append(Kept(page, now_ns, page.protected, claimed and self.half_life_ns > 0, self.order))
        self.order += 1

    def remove(self, page: Page) -> None:
        self.kept = [k for k in self.kept if k.page is not page]

    def evict(self, now_ns: int) -> Page | None:
        if not self.kept:
            return None
        protection = sum(k.protected for k in self.kept) <= int(0.8 * self.pages)

        def key(kept: Kept) -> tuple[float, int, int, int]:
            worth = 1.0 if kept.protected and protection else 0.0
            if kept.claimed:
                claim = 2.0 * 0.5 ** ((now_ns - kept.released_ns) / self.half_life_ns)
                worth = max(worth, claim if claim >= 0.125 else 0.0)
            return (worth, kept.released_ns, 2 * kept.protected + kept.claimed, kept.order)

        victim = min(self.kept, key=key)
        self.kept.remove(victim)
        return victim.page


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("half_life_ns", [0, 3 * SECOND, 30 * SECOND])
def test_order_equals_the_twin(seed: int, half_life_ns: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([3, 10, 40])
    pages = [Page(i) for i in range(count)]
    fast, slow = Retention(count, half_life_ns), Twin(count, half_life_ns)
    free: set[int] = set()
    now = 0
    for _ in range(600):
        now += rng.choice([0, 0, SECOND // 10, SECOND, 20 * SECOND])
        choice = rng.random()
        if choice < 0.55:
            outside = [p for p in pages if p.id not in free]
            if outside:
                page = rng.choice(outside)
                page.protected = rng.random() < 0.6
                claimed = rng.random() < 0.5
                fast.add(page, now, claimed)
                slow.add(page, now, claimed)
                free.add(page.id)
        elif choice < 0.7 and free:
            page = pages[rng.choice(sorted(free))]
            fast.remove(page)
            slow.remove(page)
            free.remove(page.id)
        else:
            victim = fast.evict(now)
            assert victim is slow.evict(now)
            if victim is not None:
                free.remove(victim.id)
        assert len(fast) == len(free)


def evictions(retention: Retention, now_ns: int) -> list[int]:
    order = []
    while (page := retention.evict(now_ns)) is not None:
        order.append(page.id)
    return order


def pages(*protected: bool) -> list[Page]:
    made = [Page(i) for i in range(len(protected))]
    for page, flag in zip(made, protected, strict=True):
        page.protected = flag
    return made


def test_unused_pages_go_before_reused_ones_although_released_later() -> None:
    retention = Retention(100, 0)
    reused, fresh = pages(True, False)
    retention.add(reused, 0, False)
    retention.add(fresh, 5 * SECOND, False)
    assert evictions(retention, 6 * SECOND) == [fresh.id, reused.id]


def test_a_waiting_session_outlives_reused_pages_for_one_half_life_only() -> None:
    for age_s, first in ((29, "reused"), (31, "session")):
        retention = Retention(100, 30 * SECOND)
        session, reused = pages(False, True)
        retention.add(session, 0, True)
        retention.add(reused, 0, False)
        victim = retention.evict(age_s * SECOND)
        assert victim is {"reused": reused, "session": session}[first]


def test_a_claim_is_no_pin() -> None:
    """After four half-lives a claimed page is one released earlier, and nothing else."""
    retention = Retention(100, 30 * SECOND)
    session, plain = pages(False, False)
    retention.add(session, 0, True)
    retention.add(plain, 100 * SECOND, False)
    assert retention.evict(119 * SECOND) is plain
    retention.add(plain, 119 * SECOND, False)
    assert retention.evict(121 * SECOND) is session


def test_what_a_session_has_just_computed_outlives_what_another_one_hit_before() -> None:
    """Protection does not add to a claim: else sessions that have ended would push out those that go on."""
    retention = Retention(100, 30 * SECOND)
    ended, begun = pages(True, False)
    retention.add(ended, 0, True)
    retention.add(begun, 5 * SECOND, True)
    assert evictions(retention, 6 * SECOND) == [ended.id, begun.id]


def test_protection_lapses_when_everything_is_protected() -> None:
    """Stale reused pages must not keep new content out for ever."""
    retention = Retention(10, 0)
    made = pages(*[True] * 9, False)
    for page in made:
        retention.add(page, page.id, False)
    assert retention.evict(100) is made[0]
    assert retention.evict(100) is made[9]  # 8 of 10 protected: within its share again


def test_a_chain_goes_tail_first_across_segments() -> None:
    """The head of a session was hit and its tail was not; both were released together."""
    for now_s in (0, 10, 45, 300):
        retention = Retention(4, 30 * SECOND)
        chain = pages(True, True, True, False, False)
        for page in reversed(chain):
            retention.add(page, 0, True)
        assert evictions(retention, now_s * SECOND) == [4, 3, 2, 1, 0]


def test_removing_a_page_that_is_not_free_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not free"):
        Retention(4, 0).remove(Page(1))
