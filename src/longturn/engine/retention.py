"""Which cached page goes first when a free page is needed.

Segmented LRU with a soft claim of sessions. A released page falls into one of four lists:

    probation or protected     not used again since it was computed, or used again (a hit)
    plain or claimed           released by a one-off request, or by a session (or preempted request) expected back

Worth of a page that was released `age` ago:

    the larger of 1 if protected, while protected pages fill at most 4/5 of the pool,
    and 2 * 2^(-age / half_life) if claimed, as long as that is at least 1/8

The page with the least worth goes; among equals the one released first. Inside one list worth only falls with age,
so a list in order of release is in order of worth, and an eviction compares four heads: O(1), with the decay
computed when it is needed and never stored.

Three properties are deliberate. Protection lapses while the protected segment is over its share, rather than demoting
pages to probation: demotion would put the head of a session's chain below its own tail, and a tail without its head
can never be hit. A claim is worth at most what recency overturns after four half-lives: it is never a pin. And it does
not add to protection: what a session that has come to its end once hit would outlive, for a half-life, what another one
has just computed and asks for with its next turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.pages import Page, PageList

PROTECTED_WORTH = 1.0
PROTECTED_SHARE = 0.8
CLAIM_WORTH = 2.0
CLAIM_FLOOR = 0.125

_NONE = (0.0, 0)


class Retention:
    """Free pages with reusable content, in eviction order."""

    __slots__ = ("_capacity", "_half_life_ns", "_lists", "_probation", "_protected")

    def __init__(self, pages: int, half_life_ns: int) -> None:
        """
        Args:
            pages: size of the pool; the protected segment may hold PROTECTED_SHARE of it.
            half_life_ns: of a session's claim; 0 is segmented LRU without claims.
        """
        self._capacity = int(pages * PROTECTED_SHARE)
        self._half_life_ns = half_life_ns
        self._probation = (PageList(), PageList())
        self._protected = (PageList(), PageList())
        self._lists = (*self._probation, *self._protected)

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def add(self, page: Page, now_ns: int, claimed: bool) -> None:
        """Take a page that no request refers to any more. `now_ns` must not fall between calls."""
        page.stamp_ns = now_ns
        page.claimed = claimed and self._half_life_ns > 0
        (self._protected if page.protected else self._probation)[page.claimed].append(page)

    def extend(self, pages: Sequence[Page], now_ns: int, claimed: bool) -> None:
        """`add` of each, in order."""
        claimed = claimed and self._half_life_ns > 0
        for page in pages:
            page.stamp_ns = now_ns
            page.claimed = claimed
        self._probation[claimed].extend([page for page in pages if not page.protected])
        self._protected[claimed].extend([page for page in pages if page.protected])

    def remove(self, page: Page) -> None:
        """Take a page out because a request uses it again. O(1)."""
        if page.home is None:
            raise RuntimeError(f"{page!r} is not free")
        page.home.remove(page)

    def unclaim(self, page: Page, now_ns: int) -> None:
        """Nobody is expected back for a page, which counts as released now by a one-off request."""
        self.remove(page)
        self.add(page, now_ns, claimed=False)

    def worth(self, page: Page, now_ns: int, protection: bool) -> float:
        """What keeping `page` is worth now; `protection`: the protected segment is within its share."""
        worth = PROTECTED_WORTH if protection and page.protected else 0.0
        if page.claimed:
            claim: float = CLAIM_WORTH * 0.5 ** ((now_ns - page.stamp_ns) / self._half_life_ns)
            if claim >= CLAIM_FLOOR:
                worth = max(worth, claim)
        return worth

    def evict(self, now_ns: int) -> Page | None:
        """Take out the page with the least worth; None if there is none."""
        protection = len(self._protected[0]) + len(self._protected[1]) <= self._capacity
        victim: Page | None = None
        least = _NONE
        for pages in self._lists:
            page = pages.head
            if page is None:
                continue
            key = (self.worth(page, now_ns, protection), page.stamp_ns)
            if victim is None or key < least:
                victim, least = page, key
        if victim is not None and victim.home is not None:
            victim.home.remove(victim)
        return victim
