"""The rules by which volatile lines of a system prompt move, each by example, and what they promise together."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longturn.frontend.records import ChatPrompt
from longturn.frontend.volatile_lines import LearnedLine, learned_line, move_lines

USER = {"role": "user", "content": "Today's date: 2026-01-02\nhello"}
AGENT = """x-billing-header: version=2.1; entry=cli; id=a1b2c;
You are an agent.
Today's date: 2026-11-29

Working directory: /home/me

Be brief.
- Current date: 2026-11-29
<env>
Working directory: /home/me
cwd: /x
</env>
```
Date: 2026-01-01
```
Use tools."""
STABLE = """You are an agent.

Be brief.
- Current date: 2026-11-29
<env>
Working directory: /home/me
cwd: /x
</env>
```
Date: 2026-01-01
```
Use tools."""
HEADER = "x-billing-header: version=2.1; entry=cli; id=a1b2c;"


def prompt(system: str, role: str = "system") -> ChatPrompt:
    return ChatPrompt(({"role": role, "content": system, "name": "n"}, USER))


def moved(system: str, *learned: LearnedLine) -> str:
    found = move_lines(prompt(system), learned)
    return system if found is None else str(found.prompt(found.headers).messages[0]["content"])


def test_an_agents_prompt() -> None:
    found = move_lines(prompt(AGENT))
    assert found is not None and found.stable == STABLE and found.headers == (HEADER,)
    assert found.lines == ("Today's date: 2026-11-29", "Working directory: /home/me")
    made = found.prompt(("x-other: 1",))
    assert made.messages[0] == {
        "role": "system",
        "name": "n",
        "content": f"{STABLE}\n\nx-other: 1\nToday's date: 2026-11-29\nWorking directory: /home/me",
    }
    assert made.messages[1:] == (USER,)


@pytest.mark.parametrize(
    "line",
    [
        "X-Anthropic-Billing-Header: cc_version=1",
        "Today's date: 2026-05-01",
        "today's date is May 1st, 2026.",
        "Today is Friday, 1 May 2026.",
        "The current date is 2026-05-01.",
        "Date: 1 May 2026",
        "Current time: 10:15",
        "Current date and time: 2026-05-01T10:15",
        "cwd: /home",
        "  Working directory: /home",
        "The current working directory is /home/x.",
        "Primary working directory: C:\\x",
        "Git branch: main",
        "git commit is: 0abc",
    ],
)
def test_forms_that_move(line: str) -> None:
    assert moved(f"One.\n{line}\nTwo.") == f"One.\nTwo.\n\n{line}"
    assert moved(f"{line}\n\nTwo.") == f"Two.\n\n{line}"


@pytest.mark.parametrize(
    "line",
    [
        "Date: unknown",
        "Today is a good day to write 3 tests",
        "Update: 2026",
        "The date 2026-05-01 matters.",
        "Working directory",
        "Git status: 3 files changed",
        "Current branch: main",
        "x-header without a colon",
        "- Date: 2026-05-01",
        "* cwd: /home",
        "1. Date: 2026-05-01",
        "# Date: 2026-05-01",
    ],
)
def test_lines_that_stay(line: str) -> None:
    assert move_lines(prompt(f"One.\n{line}\nTwo.")) is None


def test_where_lines_stay() -> None:
    for system in (
        "One.\nDate: 2026-05-01",
        "One.\n\nDate: 2026-05-01\ncwd: /x\n",
        "Date: 2026-05-01",
        "x-header: 1",
        "",
        "<a>\nDate: 1\n</a>\nTwo.",
        "~~~\nDate: 1\n~~~\nTwo.",
        "```\nDate: 1\nTwo.",  # a fence that nothing closes
    ):
        assert move_lines(prompt(system)) is None, system
    assert move_lines(prompt("Date: 1\nTwo.", role="user")) is None
    assert move_lines(ChatPrompt((USER, {"role": "system", "content": "Date: 1\nTwo."}))) is None
    assert move_lines(ChatPrompt(())) is None
    # Elements that nothing closes are text.
    assert moved("<a>\nDate: 1\nTwo.") == "<a>\nTwo.\n\nDate: 1"


def test_empty_lines_elsewhere_stay() -> None:
    assert moved("One.\n\n\nTwo.\n\nDate: 1\n\nThree.") == "One.\n\n\nTwo.\n\nThree.\n\nDate: 1"
    assert moved("\n\nOne.\nDate: 1\n\n\nTwo.") == "\n\nOne.\n\n\nTwo.\n\nDate: 1"


def test_a_header_at_the_end_is_a_header_still() -> None:
    """Its value must not change within a conversation, wherever it stands."""
    found = move_lines(prompt("One.\n\nx-header: 1"))
    assert found is not None and found.headers == ("x-header: 1",)
    assert moved("One.\n\nx-header: 1") == "One.\n\nx-header: 1"


LINES = st.sampled_from([*AGENT.split("\n"), "", "", "text", "<b>", "</b>", "</env>", "x-a: 1", "Run 12 of the day"])


@given(st.lists(LINES, max_size=20))
@example([HEADER, "", "", "You are an agent."])  # the empty line that is left must not go the second time
def test_nothing_is_lost_and_moving_twice_is_moving_once(lines: list[str]) -> None:
    learned = LearnedLine("Run ", " of the day")
    once = moved("\n".join(lines), learned)
    assert moved(once, learned) == once
    assert sorted(filter(str.strip, once.split("\n"))) == sorted(filter(str.strip, lines))


@given(st.lists(LINES, max_size=12), st.text(alphabet="0123456789-", min_size=1), st.text(alphabet="0123", min_size=1))
def test_the_stable_part_does_not_depend_on_the_values(lines: list[str], a: str, b: str) -> None:
    """What it is all for: two prompts with other values begin alike."""
    one, other = (
        move_lines(prompt("\n".join([f"x-a: {value}", "Stable.", f"Date: {value} 1", *lines, "End."])))
        for value in (a, b)
    )
    assert one is not None and other is not None and one.stable == other.stable and one.stable.startswith("Stable.")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Request 12 of agent x", "Request 13 of agent x", LearnedLine("Request ", " of agent x")),
        ("Request 9 of agent 1", "Request 10 of agent 1", LearnedLine("Request ", " of agent 1")),
        ("Session id: 1ab", "Session id: 2cd", LearnedLine("Session id: ", "")),
        ("You are the coder.", "You are the reviewer.", None),  # words: what the prompt is about
        ("Day 1", "Day 2", None),  # too little to know the line by
        ("same line 1", "same line 1", None),
        (None, "Request 13 of agent x", None),
    ],
)
def test_learned_lines(old: str | None, new: str | None, expected: LearnedLine | None) -> None:
    assert learned_line(old, new) == expected
    if expected is not None:
        assert old is not None and new is not None and expected.fits(old) and expected.fits(new)
        assert moved(f"One.\n{old}\nTwo.", expected) == f"One.\nTwo.\n\n{old}"
        assert moved(f"One.\n- {old}\nTwo.", expected) == f"One.\n- {old}\nTwo."
