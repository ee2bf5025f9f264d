"""Who waits for which copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from longturn.executor.copy_lanes import CopiesUnderWay, Group, Mark


@dataclass
class Point:
    reached: bool = False
    asked: int = 0

    def done(self) -> bool:
        self.asked += 1
        return self.reached

    def wait(self) -> None:
        self.reached = True


@dataclass
class NotedLane:
    """Remembers its marks, and those that it was told to wait for."""

    marks: list[Point] = field(default_factory=list)
    waits: list[Mark] = field(default_factory=list)

    def copy(self, target: object, source: object) -> None:
        """Nothing is there to copy."""

    def mark(self) -> Point:
        self.marks.append(Point())
        return self.marks[-1]

    def wait(self, mark: Mark) -> None:
        self.waits.append(mark)


def test_a_group_that_another_lane_waits_for_ends_there() -> None:
    saves, loads = NotedLane(), NotedLane()
    copies = CopiesUnderWay((saves, loads), group_pages=16)
    open_group = copies.note(Group(saves), 3, 7)
    assert saves.marks == []
    copies.wait_for_slots(loads, (7,))
    assert loads.waits == saves.marks and len(saves.marks) == 1
    later = copies.note(open_group, 4, 8)
    assert later is not open_group and open_group.pages == [3]
    copies.close(later)
    copies.wait_for_pages(loads, (3, 4, 5))
    assert loads.waits == [saves.marks[0], saves.marks[0], saves.marks[1]]
    copies.wait_for_pages(saves, (3, 4))
    assert saves.waits == []  # a lane is in order by itself


def test_what_is_over_is_looked_at_no_more() -> None:
    saves, loads = NotedLane(), NotedLane()
    copies = CopiesUnderWay((saves, loads), group_pages=1)
    group = Group(saves)
    for page, slot in ((3, 7), (4, 8)):
        group = copies.note(group, page, slot)
    assert copies.any_of_pages() and list(copies.over()) == []
    first, second = saves.marks
    first.reached = True
    (over,) = copies.over()
    assert (over.lane, over.pages, over.slots) == (saves, [3], [7])
    asked = first.asked
    copies.wait_for_pages(loads, (3,))
    copies.wait_for_slots(loads, (7,))
    assert loads.waits == [] and first.asked == asked
    copies.wait_for_slots(loads, (8,))
    assert loads.waits == [second]
    copies.wait_for_all()
    assert second.reached and [found.pages for found in copies.over()] == [[4]]
    assert not copies.any_of_pages() and not copies.wait_for_first(saves)
