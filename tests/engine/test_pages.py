"""Page lists, the pool and the prefix cache, against plain lists and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longturn.engine.hashing import next_page_hash, page_hashes, salt_key
from longturn.engine.pages import Page, PageList
from longturn.engine.pool import PagePool
from longturn.engine.records import pack_tokens


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_list_equals_a_python_list(operations: list[tuple[bool, int]]) -> None:
    pages = [Page(i) for i in range(10)]
    linked, plain = PageList(), []
    for add, index in operations:
        page = pages[index]
        if add and page not in plain:
            linked.append(page)
            plain.append(page)
        elif not add and page in plain:
            linked.remove(page)
            plain.remove(page)
        assert list(linked) == plain
        assert len(linked) == len(plain)
        assert linked.head is (plain[0] if plain else None)
        assert linked.tail is (plain[-1] if plain else None)


def test_list_refuses_strangers() -> None:
    page, first, second = Page(1), PageList(), PageList()
    first.append(page)
    with pytest.raises(RuntimeError, match="already"):
        second.append(page)
    with pytest.raises(RuntimeError, match="not in this"):
        second.remove(page)


def name(index: int) -> bytes:
    return index.to_bytes(16, "little")


def take(pool: PagePool, count: int) -> list[Page]:
    pages = [pool.allocate(0) for _ in range(count)]
    return [page for page in pages if page is not None]


def test_null_page_is_never_handed_out() -> None:
    pool = PagePool(4, 0)
    pages = [pool.allocate(0) for _ in range(4)]
    assert sorted(p.id for p in pages if p is not None) == [1, 2, 3]
    assert pages[3] is None


def test_a_request_is_freed_tail_first() -> None:
    pool = PagePool(5, 0)
    held = take(pool, 4)
    for index, page in enumerate(held):
        assert pool.cache.put(page, name(index))
    pool.release(held, 10, claimed=False)
    assert pool.cached == 4
    assert [page.id for page in take(pool, 4)] == [p.id for p in reversed(held)]
    assert pool.evictions == 4
    assert len(pool.cache) == 0


def test_blank_pages_go_before_cached_ones() -> None:
    pool = PagePool(4, 0)
    first, second = take(pool, 2)
    pool.cache.put(first, name(1))
    pool.release([first, second], 0, claimed=False)
    for _ in range(2):
        pool.allocate(1)
    assert pool.cache.longest([name(1)], 1) == [first]
    assert pool.evictions == 0


def test_equal_content_has_one_name() -> None:
    pool = PagePool(4, 0)
    first, second = take(pool, 2)
    assert pool.cache.put(first, name(1))
    assert not pool.cache.put(second, name(1))
    pool.release([second], 0, claimed=False)
    assert pool.cached == 0
    assert pool.cache.longest([name(1)], 1) == [first]


def test_a_hit_stops_at_the_first_gap_and_at_the_limit() -> None:
    pool = PagePool(8, 0)
    pages = take(pool, 4)
    for index in (0, 1, 3):
        pool.cache.put(pages[index], name(index))
    hashes = [name(i) for i in range(4)]
    assert pool.cache.longest(hashes, 4) == pages[:2]
    assert pool.cache.longest(hashes, 1) == pages[:1]
    assert pool.cache.longest([name(9), *hashes], 5) == []


def test_distrusted_content_is_forgotten_unless_shared() -> None:
    pool = PagePool(4, 0)
    first, second = take(pool, 2)
    pool.cache.put(first, name(0))
    pool.cache.put(second, name(1))
    pool.share([first])
    pool.release([first, second], 0, claimed=True, distrust=True)
    assert name(0) in pool.cache
    assert name(1) not in pool.cache
    pool.check({first.id: 1})


def test_releasing_too_often_is_an_error() -> None:
    pool = PagePool(3, 0)
    (page,) = take(pool, 1)
    pool.release([page], 0, claimed=False)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([page], 0, claimed=False)


def test_check_finds_a_leak_and_a_false_reference() -> None:
    pool = PagePool(4, 0)
    (page,) = take(pool, 1)
    pool.check({page.id: 1})
    with pytest.raises(RuntimeError, match="hold 0 references"):
        pool.check({})
    with pytest.raises(RuntimeError, match="hold 2 references"):
        pool.check({page.id: 2})


def test_hash_of_one_more_page_extends_the_chain() -> None:
    key = salt_key("a", None)
    tokens = pack_tokens(list(range(3 * 128 + 5)))
    chain = page_hashes(tokens, key)
    assert len(chain) == 3
    parent = None
    for index in range(3):
        parent = next_page_hash(parent, tokens[512 * index : 512 * (index + 1)], key)
        assert parent == chain[index]
    assert page_hashes(tokens, salt_key("b", None)) != chain


class PoolMachine(RuleBasedStateMachine):
    """Requests that take, share, name and release pages; the model is a dict of what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 1000)
        self.held: dict[int, list[Page]] = {}
        self.names: dict[bytes, Page] = {}
        self.next_request = self.next_name = self.now = 0

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        self.now += 10
        if count > self.pool.free:
            return
        pages = []
        for _ in range(count):
            page = self.pool.allocate(self.now)
            assert page is not None
            assert not any(page in other for other in self.held.values())
            assert page not in pages
            self.names = {h: p for h, p in self.names.items() if p is not page}
            pages.append(page)
        self.held[self.next_request] = pages
        self.next_request += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name_one(self, data: st.DataObject) -> None:
        pages = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        page = data.draw(st.sampled_from(pages))
        fresh = name(self.next_name)
        self.next_name += 1
        if self.pool.cache.put(page, fresh):
            self.names[fresh] = page
        else:
            assert page in self.names.values()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        page_hash = data.draw(st.sampled_from(sorted(self.names)))
        found = self.pool.cache.longest([page_hash], 1)
        assert found == [self.names[page_hash]]
        self.pool.share(found)
        self.held[self.next_request] = found
        self.next_request += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), claimed=st.booleans())
    def release(self, data: st.DataObject, claimed: bool) -> None:
        self.now += 10
        request = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(self.held.pop(request), self.now, claimed)

    @invariant()
    def everything_adds_up(self) -> None:
        references: dict[int, int] = {}
        for pages in self.held.values():
            for page in pages:
                references[page.id] = references.get(page.id, 0) + 1
        self.pool.check(references)
        assert self.pool.used == len(references)
        for page_hash, page in self.names.items():
            assert self.pool.cache.longest([page_hash], 1) == [page]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase
