"""The second tier: cached pages that left the device, kept in host memory until a prompt asks for them again.

A page that the pool evicts is copied to a slot of host memory and rests there, in the same eviction order and with the
same claim of its session as on the device. A prompt that hits it gets a page of the device, into which the slot is
copied back. The slot then is a *double*: its content is on the device too, so that evicting it there again needs no
copy, and doubles are the first slots to be given to other content.

The tier decides; the executor copies. Copies are orders in a step's plan, saves before loads, and the executor makes
every later copy or computation on the same page or slot wait for them. So a slot can be hit as soon as its save is
ordered. The one thing to see to here is that within a plan no save goes to a slot that the plan loads from: such slots
are *sources* until the plan is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from longturn.engine.pages import Page, PageList
from longturn.engine.prefix_cache import PrefixCache
from longturn.engine.retention import Retention


class HostTier:
    """All slots of host memory of one executor. A slot's bookkeeping is a `Page` whose id is the slot's."""

    __slots__ = (
        "_blank",
        "_cache",
        "_doubles",
        "_loads",
        "_retention",
        "_saves",
        "_sources",
        "loaded_pages",
        "loading",
        "offloaded_pages",
        "slots",
    )

    def __init__(self, slots: int, half_life_ns: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        """
        Args:
            slots: pages that host memory holds, ids 0 .. slots-1.
            half_life_ns: of a session's claim, see `Retention`.
            on_forget: told the hash of every page that this tier forgets.
        """
        self.slots = tuple(Page(i) for i in range(slots))
        self._blank = list(reversed(self.slots))
        self._retention = Retention(slots, half_life_ns)
        self._doubles = PageList()
        self._sources: list[Page] = []
        self._cache = PrefixCache(on_forget)
        self._saves: dict[int, int] = {}
        """Slot -> page: saves that no plan has ordered yet."""
        self._loads: list[tuple[int, int]] = []
        """(slot, page): loads that no plan has ordered yet."""
        self.loading: dict[int, bytes] = {}
        """Pages of the device whose load the executor has not answered for, and what they will hold."""
        self.offloaded_pages = 0
        self.loaded_pages = 0

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._cache

    @property
    def cached(self) -> int:
        """Slots that hold a page."""
        return len(self._cache)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Slots, those that hold a page, pages offloaded and loaded since the start."""
        return len(self.slots), self.cached, self.offloaded_pages, self.loaded_pages

    @property
    def orders(self) -> bool:
        """Whether there are copies for the next plan."""
        return bool(self._saves or self._loads)

    def find(self, page_hash: bytes) -> Page | None:
        """The slot that holds this page."""
        return self._cache.get(page_hash)

    # --- to the host ------------------------------------------------------------------------------------------------

    def keep(self, page: Page, now_ns: int) -> None:
        """The pool is about to evict `page`, which has a name: keep its content, if a slot can be had."""
        if page.hash is None:
            raise RuntimeError(f"{page!r} has no name to be found by")
        slot = self._cache.get(page.hash)
        if slot is not None:
            if slot.home is None:
                return  # a source: it stays one until the plan is taken
            slot.home.remove(slot)
        else:
            slot = self._take(now_ns)
            if slot is None:
                return
            self._cache.put(slot, page.hash)
            self._saves.pop(slot.id, None)  # a save of this plan whose content was given up at once
            self._saves[slot.id] = page.id
            self.offloaded_pages += 1
        slot.protected = page.protected
        # Its age counts from its last use on the device. Each of the pool's lists evicts in the order of that stamp,
        # so that this tier's lists are in order as well.
        self._retention.add(slot, page.stamp_ns, page.claimed)

    def _take(self, now_ns: int) -> Page | None:
        """A slot to write: a blank one, a double, or the one worth least; None if all are sources."""
        if self._blank:
            return self._blank.pop()
        slot = self._doubles.head
        if slot is not None:
            self._doubles.remove(slot)
        else:
            slot = self._retention.evict(now_ns)
        if slot is not None:
            self._cache.forget(slot)
        return slot

    # --- back to the device -----------------------------------------------------------------------------------------

    def hold(self, slots: Iterable[Page]) -> None:
        """The plan in the making loads from these: their content stays until it is taken."""
        for slot in slots:
            if slot.home is not None:
                slot.home.remove(slot)
                self._sources.append(slot)

    def load(self, slot: Page, page: Page) -> bytes:
        """Order a copy of a held slot into `page`, which is not to be read before it is said to have arrived.

        Returns the hash of its content.
        """
        if slot.hash is None:
            raise RuntimeError(f"host slot {slot!r} holds nothing")
        self._loads.append((slot.id, page.id))
        self.loading[page.id] = slot.hash
        return slot.hash

    def doubled(self, page_hash: bytes) -> None:
        """The device has computed a page that may rest here too."""
        slot = self._cache.get(page_hash)
        if slot is not None and slot.home is not None:
            slot.home.remove(slot)
            self._doubles.append(slot)

    def take_orders(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Copies for the plan that is made now: saves as (page, slot), loads as (slot, page)."""
        for slot in self._sources:
            self._doubles.append(slot)
        self._sources.clear()
        saves = tuple((page, slot) for slot, page in self._saves.items())
        loads = tuple(self._loads)
        self._saves.clear()
        self._loads.clear()
        return saves, loads

    # --- what does not come true ------------------------------------------------------------------------------------

    def forget(self, page_hash: bytes) -> None:
        """This content is not to be found any more."""
        slot = self._cache.get(page_hash)
        if slot is not None:
            self._leave_list(slot)
            self._cache.forget(slot)
            self._blank.append(slot)

    def lost(self, slot_id: int) -> None:
        """A save into this slot has failed."""
        page_hash = self.slots[slot_id].hash
        if page_hash is not None:
            self.forget(page_hash)

    def clear(self) -> None:
        """Forget everything, without telling of each."""
        for slot in self._cache.clear():
            self._leave_list(slot)
            self._blank.append(slot)

    def _leave_list(self, slot: Page) -> None:
        if slot.home is not None:
            slot.home.remove(slot)
        else:
            self._sources.remove(slot)

    def check(self, on_device: PrefixCache) -> None:
        """Raises RuntimeError if a slot is lost or in two states, or if its name is not what the state wants."""
        blank = [slot.id for slot in self._blank]
        sources = [slot.id for slot in self._sources]
        blanks, held = set(blank), set(sources)
        if len(blanks) != len(blank) or len(held) != len(sources):
            raise RuntimeError("a host slot is in a list twice")
        for slot in self.slots:
            states = (slot.id in blanks) + (slot.id in held) + (slot.home is not None)
            if states != 1:
                raise RuntimeError(f"host slot {slot!r} is in {states} states instead of one")
            if (slot.hash is None) != (slot.id in blanks):
                raise RuntimeError(f"host slot {slot!r} is blank with a name, or kept without one")
            rests = slot.home is not None and slot.home is not self._doubles
            if rests and slot.hash is not None and slot.hash in on_device:
                raise RuntimeError(f"host slot {slot!r} rests though its content is on the device")
        if len(self._blank) + len(self._sources) + len(self._doubles) + len(self._retention) != len(self.slots):
            raise RuntimeError("host slots do not add up")
        self._cache.check(self.slots)
