"""The host tier's bookkeeping: by hand, and against a twin that keeps plain lists and looks at everything."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longturn.engine.arrivals import Hits, place_hits
from longturn.engine.host_tier import HostTier
from longturn.engine.pages import Page
from longturn.engine.pool import PagePool

HALF_LIFE = 1000


def name(index: int) -> bytes:
    return index.to_bytes(16, "little")


def cached(pool: PagePool, names: Iterable[int], now_ns: int = 0, *, claimed: bool = False) -> list[Page]:
    """Pages of a request that computed this content and has ended."""
    pages = []
    for index in names:
        page = pool.allocate(now_ns)
        assert page is not None
        assert pool.put(page, name(index))
        pages.append(page)
    pool.release(pages, now_ns, claimed)
    return pages


def host_of(pool: PagePool) -> HostTier:
    assert pool.host is not None
    return pool.host


def test_what_is_evicted_is_saved_and_found() -> None:
    pool = PagePool(4, 0, host_slots=2)
    first, second, third = cached(pool, [1, 2, 3])
    pages = [pool.allocate(10) for _ in range(2)]
    assert pages == [third, second]  # tail first
    saves, loads = host_of(pool).take_orders()
    assert saves == ((third.id, 0), (second.id, 1)) and loads == ()
    prefix = pool.longest([name(1), name(2), name(3), name(4)], 4)
    assert prefix.pages == [first, None, None]
    assert [slot.hash for slot in prefix.slots] == [name(2), name(3)]
    assert pool.cached_prefix([name(1), name(2), name(3), name(4)], 2) == 2
    pool.check({second.id: 1, third.id: 1})


def test_a_full_tier_gives_up_doubles_first_and_then_what_is_worth_least() -> None:
    pool = PagePool(5, 0, host_slots=3)
    cached(pool, [1, 2, 3, 4])
    held = [pool.allocate(10) for _ in range(3)]  # 4, 3 and 2 rest on the host
    host = host_of(pool)
    host.take_orders()
    assert [name(i) in host for i in (1, 2, 3, 4)] == [False, True, True, True]
    prefix = pool.longest([name(3)], 1)
    host.hold(prefix.slots)
    page = held[0]
    assert page is not None
    place_hits(pool, Hits(prefix, []), [page])  # 3 is on the device again
    assert host.take_orders() == ((), ((1, page.id),))
    fourth = pool.allocate(20)  # evicts 1
    assert fourth is not None and [name(i) in host for i in (1, 2, 3, 4)] == [True, True, False, True]
    assert host.take_orders() == (((fourth.id, 1),), ())
    assert host.counts == (3, 3, 4, 0)


def test_a_slot_that_a_plan_loads_from_is_not_saved_into_by_it() -> None:
    pool = PagePool(4, 0, host_slots=1)
    cached(pool, [1, 2, 3])
    held = [pool.allocate(10)]
    host = host_of(pool)
    host.take_orders()
    prefix = pool.longest([name(3)], 1)
    host.hold(prefix.slots)
    held.append(pool.allocate(10))  # 2 is evicted, and the only slot is a source
    assert name(2) not in host
    place_hits(pool, Hits(prefix, []), [held[0]] if held[0] else [])
    assert host.take_orders()[0] == ()
    pool.allocate(20)  # the next plan may have it: it is a double now
    assert host.take_orders()[0] == ((1, 0),)


def test_pages_made_blank_ahead_are_handed_out_in_the_order_of_their_saves() -> None:
    pool = PagePool(6, 0, host_slots=9)
    cached(pool, [1, 2, 3, 4, 5])
    pool.keep_blank(3, 10)
    saved = [page for page, _ in host_of(pool).take_orders()[0]]
    assert len(saved) == 3 and pool.cached == 2 and pool.evictions == 3
    pool.keep_blank(3, 10)
    assert host_of(pool).take_orders() == ((), ())
    assert [page.id for page in (pool.allocate(20) for _ in range(3)) if page is not None] == saved
    pool.keep_blank(9, 30)
    assert pool.cached == 0


def test_content_that_is_not_trusted_leaves_both_tiers() -> None:
    pool = PagePool(3, 0, host_slots=2)
    cached(pool, [1, 2])
    held = [pool.allocate(10)]
    host = host_of(pool)
    host.take_orders()
    prefix = pool.longest([name(1), name(2)], 2)
    pool.share([prefix.pages[0]] if prefix.pages[0] else [])
    host.hold(prefix.slots)
    filled, _ = place_hits(pool, Hits(prefix, []), [held[0]] if held[0] else [])
    host.take_orders()
    pool.release(filled, 20, claimed=False, distrust=True)
    assert len(pool.cache) == 0 and host.cached == 0
    host.loading.clear()
    pool.check({})


def test_a_hash_is_forgotten_when_both_tiers_have() -> None:
    forgotten: list[bytes] = []
    pool = PagePool(3, 0, forgotten.append, host_slots=1)
    cached(pool, [1, 2])
    pool.allocate(10)
    assert forgotten == []
    pool.allocate(10)
    assert forgotten == [name(2)]  # its slot went to 1
    host_of(pool).forget(name(1))
    assert forgotten == [name(2), name(1)]


def test_check_finds_a_lost_slot() -> None:
    pool = PagePool(3, 0, host_slots=2)
    cached(pool, [1, 2])
    pool.allocate(10)
    host = host_of(pool)
    pool.check({2: 1})
    assert host.find(name(2)) is not None
    host.find(name(2)).hash = None  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="host slot"):
        host.check(pool.cache)


@dataclass
class Resting:
    hash: bytes
    stamp_ns: int
    protected: bool
    claimed: bool
    order: int


@dataclass
class Twin:
    """The documented rules over plain lists."""

    slots: int
    resting: list[Resting] = field(default_factory=list)
    doubles: list[bytes] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    order: int = 0

    def names(self) -> list[bytes]:
        return [kept.hash for kept in self.resting] + self.doubles + self.sources

    def leave(self, page_hash: bytes) -> bool:
        before = len(self.names())
        self.resting = [kept for kept in self.resting if kept.hash != page_hash]
        self.doubles = [other for other in self.doubles if other != page_hash]
        return len(self.names()) < before

    def keep(self, page: Page, now_ns: int) -> None:
        assert page.hash is not None
        if page.hash in self.sources:
            return
        self.leave(page.hash)
        if len(self.names()) == self.slots:
            if self.doubles:
                self.doubles.pop(0)
            elif self.resting:
                self.resting.remove(min(self.resting, key=lambda kept: self.worth(kept, now_ns)))
            else:
                return
        self.order += 1
        self.resting.append(Resting(page.hash, page.stamp_ns, page.protected, page.claimed, self.order))

    def worth(self, kept: Resting, now_ns: int) -> tuple[float, int, int, int]:
        protection = sum(other.protected for other in self.resting) <= int(0.8 * self.slots)
        worth = 1.0 if kept.protected and protection else 0.0
        if kept.claimed:
            claim = 2.0 * 0.5 ** ((now_ns - kept.stamp_ns) / HALF_LIFE)
            worth = max(worth, claim if claim >= 0.125 else 0.0)
        return (worth, kept.stamp_ns, 2 * kept.protected + kept.claimed, kept.order)


class SpiedTier(HostTier):
    """Tells a twin of all that happens."""

    __slots__ = ("twin",)

    def __init__(self, slots: int) -> None:
        super().__init__(slots, HALF_LIFE)
        self.twin = Twin(slots)

    def keep(self, page: Page, now_ns: int) -> None:
        self.twin.keep(page, now_ns)
        super().keep(page, now_ns)

    def hold(self, slots: Iterable[Page]) -> None:
        slots = list(slots)
        for slot in slots:
            assert slot.hash is not None
            if self.twin.leave(slot.hash):
                self.twin.sources.append(slot.hash)
        super().hold(slots)

    def take_orders(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        self.twin.doubles += self.twin.sources
        self.twin.sources = []
        return super().take_orders()

    def doubled(self, page_hash: bytes) -> None:
        if self.twin.leave(page_hash):
            self.twin.doubles.append(page_hash)
        super().doubled(page_hash)

    def forget(self, page_hash: bytes) -> None:
        self.twin.leave(page_hash)
        super().forget(page_hash)

    def clear(self) -> None:
        self.twin.resting, self.twin.doubles = [], []
        super().clear()


@dataclass
class Held:
    pages: list[Page]
    hashes: list[bytes]


class TierMachine(RuleBasedStateMachine):
    """Requests over a few chains that share their beginning; every page's content is its hash."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(11, HALF_LIFE)
        self.host = SpiedTier(6)
        self.pool.host = self.host
        self.device_content: dict[int, bytes] = {}
        self.host_content: dict[int, bytes] = {}
        self.held: dict[int, Held] = {}
        self.next_request = self.now = 0

    @rule(
        chain=st.integers(0, 5),
        length=st.integers(1, 7),
        claimed=st.booleans(),
        wait=st.sampled_from([1, 300, 900, 5000]),
    )
    def turn(self, chain: int, length: int, claimed: bool, wait: int) -> None:
        """A request's whole life."""
        number = self.next_request
        self.arrive(chain, length)
        if number not in self.held:
            return
        held = self.held.pop(number)
        for page in held.pages:
            self.host.loading.pop(page.id, None)
        self.fill(held)
        self.now += wait
        self.pool.release(held.pages, self.now, claimed)

    @rule(chain=st.integers(0, 4), length=st.integers(1, 7))
    def arrive(self, chain: int, length: int) -> None:
        hashes = [name(i if i < 2 else 100 * chain + i) for i in range(length)]
        prefix = self.pool.longest(hashes, length - 1)
        shared = [page for page in prefix.pages if page is not None]
        fresh = length - len(shared)
        if self.pool.free - sum(page.refs == 0 for page in shared) < fresh:
            return
        self.now += 7
        self.pool.share(shared)
        self.host.hold(prefix.slots)
        pages = [page for page in (self.pool.allocate(self.now) for _ in range(fresh)) if page is not None]
        assert len(pages) == fresh
        filled, rest = place_hits(self.pool, Hits(prefix, shared), pages)
        saves, loads = self.host.take_orders()
        assert len({slot for _, slot in saves}) == len(saves)
        for page_id, slot in saves:
            self.host_content[slot] = self.device_content[page_id]
        for slot, page_id in loads:
            self.device_content[page_id] = self.host_content[slot]
        for page, page_hash in zip(filled, hashes, strict=False):
            assert self.device_content[page.id] == page_hash
        for page in rest:
            self.device_content[page.id] = b"being computed"
        self.held[self.next_request] = Held(filled + rest, hashes)
        self.next_request += 1

    def waits(self, held: Held) -> bool:
        return any(page.id in self.host.loading for page in held.pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        if not self.waits(held):
            self.fill(held)

    def fill(self, held: Held) -> None:
        for page, page_hash in zip(held.pages, held.hashes, strict=True):
            self.device_content[page.id] = page_hash
            self.pool.put(page, page_hash)

    @precondition(lambda self: self.host.loading)
    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def arrived(self, data: st.DataObject, lost: bool) -> None:
        page_id = data.draw(st.sampled_from(sorted(self.host.loading)))
        if not lost:
            del self.host.loading[page_id]
            return
        self.pool.lose(self.pool.pages[page_id])
        self.device_content[page_id] = b"rubbish"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), claimed=st.booleans(), distrust=st.sampled_from([False, False, False, True]))
    def release(self, data: st.DataObject, claimed: bool, distrust: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        if self.waits(self.held[number]):
            return
        self.now += data.draw(st.sampled_from([1, 300, 5000]))
        self.pool.release(self.held.pop(number).pages, self.now, claimed, distrust)

    @precondition(lambda self: self.host.cached)
    @rule(data=st.data(), really=st.sampled_from([False] * 5 + [True]))
    def save_failed(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        slot = data.draw(st.sampled_from([slot.id for slot in self.host.slots if slot.hash is not None]))
        self.host.lost(slot)

    @rule(count=st.integers(0, 3))
    def blank_ahead(self, count: int) -> None:
        self.pool.keep_blank(count, self.now)
        for page_id, slot in self.host.take_orders()[0]:
            self.host_content[slot] = self.device_content[page_id]

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def reset(self, really: bool) -> None:
        if really:
            self.pool.clear_cache()

    @invariant()
    def everything_adds_up(self) -> None:
        references: dict[int, int] = {}
        for held in self.held.values():
            for page in held.pages:
                references[page.id] = references.get(page.id, 0) + 1
        self.pool.check(references)
        known = [slot.hash for slot in self.host.slots if slot.hash is not None]
        assert sorted(known) == sorted(self.host.twin.names())
        for slot in self.host.slots:
            assert slot.hash is None or self.host_content[slot.id] == slot.hash
        for page in self.pool.pages:
            assert page.hash is None or self.device_content[page.id] == page.hash


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestTier = TierMachine.TestCase


@pytest.mark.parametrize("seed", range(8))
def test_turns_alone(seed: int) -> None:
    """The machine's turns without the rest, which is rare in life: far more evictions from both tiers."""
    rng = random.Random(seed)
    machine = TierMachine()
    for _ in range(400):
        machine.turn(rng.randrange(6), rng.randrange(1, 8), rng.random() < 0.5, rng.choice([1, 300, 900, 5000]))
        machine.everything_adds_up()
    assert machine.pool.evictions > 500 and machine.host.offloaded_pages > 200
    assert len(machine.host.loading) == 0
