"""Stop strings against a twin that looks at every character, for every way to cut the text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from longturn.frontend.stop import StopFinder


def twin(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What is shown of a text that comes character by character, and the stop string that ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    finder = StopFinder(stops, include_stop_text=include)
    shown = ""
    for piece in pieces:
        result = finder.push(piece)
        shown += result.text
        if result.stop is not None:
            return shown, result.stop
    return shown + finder.flush(), None


@given(
    st.lists(st.text(alphabet="abc", max_size=6)),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
@example(["ab", "cd"], ["abcd", "bc"], False)
def test_any_cut_gives_what_the_twin_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == twin("".join(pieces), stops, include)


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_nothing_is_held_back_but_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    shown = ""
    for count, char in enumerate(text, 1):
        result = finder.push(char)
        shown += result.text
        if result.stop is not None:
            return
        held = text[len(shown) : count]
        longest = max((k for stop in stops for k in range(len(stop)) if text[:count].endswith(stop[:k])), default=0)
        assert len(held) == longest


def test_across_borders() -> None:
    finder = StopFinder(["\n\nUser:", "END"])
    assert finder.push("hello\n").text == "hello"
    assert finder.push("\nUse").text == ""
    assert finder.push("d. E").text == "\n\nUsed. "
    assert finder.push("N").text == ""
    result = finder.push("D of it")
    assert (result.text, result.stop) == ("", "END")
