"""Stored responses: bounds, expiry, sharing, against a twin that counts everything anew."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.server.response_store import Part, ResponseStore

ENTRY = 1024


def size(messages: tuple[Any, ...]) -> int:
    return len(msgspec.json.encode(messages))


def said(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_conversation_is_kept_once() -> None:
    store = ResponseStore(1 << 20, 60)
    part: Part | None = None
    for turn in range(10):
        store.put("a", f"r{turn}", b"{}", said("x" * 1000), part)
        stored = store.get("a", f"r{turn}")
        assert stored is not None
        part = stored.part
    assert len(store) == 10 and store.nbytes == 10 * (ENTRY + 2 + size(said("x" * 1000)))
    assert part is not None and len(part.conversation()) == 10


def test_what_a_response_continues_outlives_it() -> None:
    store = ResponseStore(1 << 20, 60)
    store.put(None, "r0", b"{}", said("zero"), None)
    first = store.get(None, "r0")
    assert first is not None
    store.put(None, "r1", b"{}", said("one"), first.part)
    assert store.delete(None, "r0") and not store.delete(None, "r0")
    assert store.get(None, "r0") is None
    second = store.get(None, "r1")
    assert second is not None
    assert [message["content"] for message in second.part.conversation()] == ["zero", "one"]
    assert store.nbytes == ENTRY + 2 + size(said("zero")) + size(said("one"))
    store.delete(None, "r1")
    assert store.nbytes == 0


def test_a_response_that_is_forgotten_while_it_is_continued() -> None:
    store = ResponseStore(1 << 20, 60)
    store.put(None, "r0", b"{}", said("zero"), None)
    first = store.get(None, "r0")
    assert first is not None
    store.delete(None, "r0")
    assert store.nbytes == 0
    store.put(None, "r1", b"{}", said("one"), first.part)
    assert store.nbytes == ENTRY + 2 + size(said("zero")) + size(said("one"))


def test_responses_expire_when_nobody_uses_them() -> None:
    clock = Clock()
    store = ResponseStore(1 << 20, 60, now_s=clock)
    for name in ("used", "unused"):
        store.put(None, name, b"{}", said(name), None)
    clock.now_s += 40
    assert store.get(None, "used") is not None
    clock.now_s += 40
    assert store.get(None, "unused") is None and store.get(None, "used") is not None
    clock.now_s += 61
    assert store.get(None, "used") is None and store.nbytes == 0
    store.put(None, "old", b"{}", said("old"), None)
    clock.now_s += 61
    assert not store.delete(None, "old"), "it had been forgotten already"
    store.put(None, "older", b"{}", said("older"), None)
    clock.now_s += 61
    store.put(None, "new", b"{}", said("new"), None)
    assert len(store) == 1


def test_nothing_larger_than_the_store_is_kept() -> None:
    store = ResponseStore(2000, 60)
    store.put(None, "r", b"x" * 3000, said("x"), None)
    assert len(store) == 0 and store.nbytes == 0
    assert not ResponseStore(0, 60).keeps and ResponseStore(1, 60).keeps


def test_clients_are_apart() -> None:
    store = ResponseStore(1 << 20, 60)
    store.put("a", "r", b'"a"', said("a"), None)
    store.put("b", "r", b'"b"', said("b"), None)
    assert store.get(None, "r") is None and not store.delete(None, "r")
    assert [store.get(tenant, "r").body for tenant in "ab"] == [b'"a"', b'"b"']  # type: ignore[union-attr]
    store.delete("a", "r")
    assert store.get("b", "r") is not None


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "get", "delete", "wait"]), st.integers(0, 9), st.integers(0, 400)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(1500, 12_000))
def test_any_history_against_a_twin(actions: list[Action], max_bytes: int) -> None:
    clock = Clock()
    store = ResponseStore(max_bytes, 60, now_s=clock)
    kept: dict[str, tuple[float, tuple[tuple[Any, ...], ...]]] = {}
    """The twin: name, last use, and the messages of every turn, in order of last use."""
    parts: dict[str, Part] = {}

    def twin_bytes() -> int:
        # Every turn counts once, whoever shares it: a turn is told apart by all that leads to it.
        turns = {turns[: i + 1] for _, turns in kept.values() for i in range(len(turns))}
        own = sum(size(tuple({"role": "user", "content": text} for text in turn[-1])) for turn in turns)
        return own + len(kept) * (ENTRY + 2)

    for number, (action, which, length) in enumerate(actions):
        name = f"n{which * 3}"
        for gone in [key for key, (used_s, _) in kept.items() if used_s < clock.now_s - 60]:
            del kept[gone]
        if action == "wait":
            clock.now_s += length / 10
            continue
        if action == "delete":
            assert store.delete(None, name) == (kept.pop(name, None) is not None)
        elif action == "get":
            found = store.get(None, name)
            assert (found is None) == (name not in kept)
            if found is not None:
                _, turns = kept.pop(name)
                kept[name] = (clock.now_s, turns)
                texts = [message["content"] for message in found.part.conversation()]
                assert texts == [text for turn in turns for text in turn]
        else:
            before = next(iter(reversed(kept)), None) if length % 3 else None
            part = None if before is None else parts[before]
            earlier = () if before is None else kept[before][1]
            text = f"{number}" + "x" * length
            store.put(None, f"n{number}", b"{}", said(text), part)
            kept[f"n{number}"] = (clock.now_s, (*earlier, (text,)))
            while twin_bytes() > max_bytes:
                del kept[next(iter(kept))]
            if (stored := store._entries.get((None, f"n{number}"))) is not None:
                parts[f"n{number}"] = stored[1].part
        assert [key[1] for key in store._entries] == list(kept)
        assert store.nbytes == twin_bytes() <= max_bytes
