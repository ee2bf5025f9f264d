"""Copies between pages and slots that are on their way, and who has to wait for which of them.

Copies run in lanes. A lane does what it is given in order; between lanes, whoever touches a page or slot first waits
for the copies that touch it. Marks cost host time, so some copies of a lane share the one behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


class Mark(Protocol):
    """A point in a lane."""

    def done(self) -> bool:
        """Whether the lane has got there."""
        ...

    def wait(self) -> None:
        """Wait for it on the host."""
        ...


class Lane(Protocol):
    """Does what it is given, in order, and returns at once."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy the bytes of a page to a slot, or back."""
        ...

    def mark(self) -> Mark:
        """The point after all that was given so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is given from now on waits for this point of another lane."""
        ...


@dataclass(slots=True, eq=False)
class Group:
    """Successive copies in one lane with one mark after them."""

    lane: Lane
    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    mark: Mark | None = None
    """None while it grows."""


class CopiesUnderWay:
    """Of all lanes: the copies that are not known to be over."""

    def __init__(self, lanes: Iterable[Lane], group_pages: int) -> None:
        """
        Args:
            lanes: all that there are.
            group_pages: copies before a mark.
        """
        self._group_pages = group_pages
        self._groups: dict[int, deque[Group]] = {id(lane): deque() for lane in lanes}
        """Of each lane, in order."""
        self._on_page: dict[int, list[Group]] = {}
        self._on_slot: dict[int, list[Group]] = {}

    # --- adding -----------------------------------------------------------------------------------------------------

    def note(self, group: Group, page: int, slot: int | None) -> Group:
        """Add a copy to its group; the group for the next one."""
        if group.mark is not None:
            group = Group(group.lane)  # closed because another lane had to wait for it
        group.pages.append(page)
        self._on_page.setdefault(page, []).append(group)
        if slot is not None:
            group.slots.append(slot)
            self._on_slot.setdefault(slot, []).append(group)
        if len(group.pages) >= self._group_pages:
            self.close(group)
            group = Group(group.lane)
        return group

    def close(self, group: Group) -> None:
        """Mark a group's end, if it has copies and no mark yet."""
        if group.pages and group.mark is None:
            group.mark = group.lane.mark()
            self._groups[id(group.lane)].append(group)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def any_of_pages(self) -> bool:
        """Whether any page is copied from or to."""
        return bool(self._on_page)

    def wait_for_pages(self, lane: Lane, pages: Iterable[int]) -> None:
        """Make `lane` wait for copies in other lanes that touch these pages."""
        self._wait_for(lane, self._on_page, pages)

    def wait_for_slots(self, lane: Lane, slots: Iterable[int]) -> None:
        """Make `lane` wait for copies in other lanes that touch these slots."""
        self._wait_for(lane, self._on_slot, slots)

    def _wait_for(self, lane: Lane, busy: dict[int, list[Group]], keys: Iterable[int]) -> None:
        groups = {id(group): group for key in keys for group in busy.get(key, ()) if group.lane is not lane}
        for group in groups.values():
            if group.mark is None:
                self.close(group)
            assert group.mark is not None
            if not group.mark.done():
                lane.wait(group.mark)

    def wait_for_first(self, lane: Lane) -> bool:
        """Wait on the host for the lane's first group; False if it has none."""
        groups = self._groups[id(lane)]
        if not groups:
            return False
        mark = groups[0].mark
        assert mark is not None, "a group grows only inside a call"
        mark.wait()
        return True

    def wait_for_all(self) -> None:
        """Wait on the host for every copy in every lane."""
        for groups in self._groups.values():
            if groups and (mark := groups[-1].mark) is not None:
                mark.wait()

    # --- results ----------------------------------------------------------------------------------------------------

    def over(self) -> Iterator[Group]:
        """Groups that have come to their end since the last call; they are forgotten as they are given out."""
        for groups in self._groups.values():
            while groups and (mark := groups[0].mark) is not None and mark.done():
                group = groups.popleft()
                _drop(self._on_page, group.pages, group)
                _drop(self._on_slot, group.slots, group)
                yield group


def _drop(busy: dict[int, list[Group]], keys: Iterable[int], group: Group) -> None:
    for key in keys:
        groups = busy[key]
        groups.remove(group)
        if not groups:
            del busy[key]
