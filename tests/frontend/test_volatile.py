"""Volatile headers: what is found, what is not, what is said of it, and what moving them saves."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.assemble import build_frontend
from longturn.config import EngineConfig, FrontendConfig
from longturn.engine.records import SamplingParams
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.conversation_keys import history_of
from longturn.frontend.frontend import Frontend
from longturn.frontend.records import ChatPrompt, Reuse, ReuseReason, TextRequest, VolatileSpan
from longturn.frontend.tokenizer import Tokenizer
from longturn.frontend.validate import ModelLimits
from longturn.frontend.volatile import (
    ANCHOR_CHARS,
    MAX_SPANS,
    SPAN_CHARS,
    Difference,
    HeaderWatch,
    Mode,
    common_chars,
    differences,
    head_of,
)
from longturn.source import ModelSource
from tests.frontend.caching import CachingEngine

RULES = (
    "\n".join(
        f"Rule {chr(97 + i)}: never do what rule {chr(98 + i)} forbids, whatever else you are told." for i in range(24)
    )
    + "\nEnd."
)
USER = {"role": "user", "content": "hello"}


def billing(number: int) -> str:
    return f"x-billing-header: version=1; request={number:05x};\nYou are an agent.\n{RULES}"


def clock(number: int) -> str:
    return f"You are an agent.\nCurrent time: 10:{number:02}\n{RULES}"


def counter(number: int) -> str:
    return f"You are an agent.\nThis is step {number} of the plan.\n{RULES}"


def request(system: str, *rest: Any, **options: Any) -> TextRequest:
    messages = ({"role": "system", "content": system}, *(rest or (USER,)))
    return TextRequest("r", ChatPrompt(messages), SamplingParams(max_tokens=0), **options)


def observe(watch: HeaderWatch, asked: TextRequest) -> VolatileSpan | None:
    assert isinstance(asked.prompt, ChatPrompt)
    prompt = watch.settled(asked.prompt, asked)
    rendered = "".join(f"<{message['role']}>{message['content']}" for message in prompt.messages)
    names = {"tenant": asked.tenant, "cache_salt": asked.cache_salt, "session_id": asked.session_id}
    return watch.observe(prompt, rendered, asked, history_of(prompt, **names))


# --- comparing -------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab"), st.text(alphabet="ab"))
def test_common_chars(a: str, b: str) -> None:
    for at_end in (False, True):
        pairs = zip(a[::-1], b[::-1], strict=False) if at_end else zip(a, b, strict=False)
        assert common_chars(a, b, at_end=at_end) == [*(x == y for x, y in pairs), False].index(False)


@given(st.data())
def test_differences_lead_from_one_text_to_the_other(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.integers(0, 999), max_size=6))
    stable = ["".join(chr(97 + (31 * i * i + 7 * k * (i + 1)) % 26) for k in range(90)) for i in range(len(pieces) + 1)]
    old = new = stable[0]
    for number, text in zip(pieces, stable[1:], strict=True):
        old += f"[{number}]" + text
        new += f"[{data.draw(st.integers(0, 999))}]" + text
    found = differences(old, new)
    assert found is not None and len(found) <= len(pieces)
    made, at = "", 0
    for part in found:
        assert old[at : part.old_from] == new[len(made) : part.new_from]
        made += old[at : part.old_from] + new[part.new_from : part.new_to]
        at = part.old_to
        assert part.old_to - part.old_from <= 3 and part.new_to - part.new_from <= 3
    assert made + old[at:] == new
    assert (found == ()) == (old == new)


def test_texts_that_are_others() -> None:
    assert differences("a" * 600, "b" * 600) is None
    assert differences("x" + RULES, RULES[::-1]) is None
    end = len(RULES)
    assert differences(RULES, RULES + "z" * SPAN_CHARS) == (Difference(end, end, end, end + SPAN_CHARS),)
    assert differences(RULES, RULES + "z" * (SPAN_CHARS + 1)) is None
    assert differences("1" + "z" * SPAN_CHARS + RULES, "2" + RULES) is None
    many = [f"{sign}".join(chr(97 + i) * 2 * ANCHOR_CHARS for i in range(MAX_SPANS + 2)) for sign in "12"]
    assert differences(*many) is None


def test_the_head_ends_where_the_first_message_begins() -> None:
    prompt = ChatPrompt(({"role": "system", "content": "Say hello"}, {"role": "user", "content": " hello \n"}))
    assert head_of(prompt, "<s>Say hello</s><u>hello</u>") == "<s>Say hello</s><u>"
    assert head_of(ChatPrompt((USER,)), "<u>hello") == "<u>"
    assert head_of(ChatPrompt((USER,)), "<u>HELLO") == "<u>HELLO"
    assert head_of(ChatPrompt(({"role": "system", "content": "a"},)), "<s>a") == "<s>a"
    assert head_of(ChatPrompt(({"role": "user", "content": None},)), "<u>") == "<u>"
    # Claude Code writes as the system in the middle of a conversation, too.
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}
    again = {"role": "system", "content": "Be kind."}
    assert head_of(ChatPrompt((system, user, again)), "<s>Be brief.<u>hello<s>Be kind.") == "<s>Be brief.<u>"


# --- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "kind", "at"),
    [
        (billing, "header", len("<system>x-billing-header: version=1; request=0000")),
        (clock, "date", len("<system>You are an agent.\nCurrent time: 10:0")),
        (counter, "other", len("<system>You are an agent.\nThis is step ")),
        (lambda n: f"Working directory: /home/{n}\n{RULES}", "directory", len("<system>Working directory: /home/")),
        (lambda n: f"Git branch: b{n}\n{RULES}", "git", len("<system>Git branch: b")),
        (lambda n: f"Session id 0{n}abcdef01\n{RULES}", "id", len("<system>Session id 0")),
    ],
)
@pytest.mark.parametrize("session", [None, "s"])
def test_a_short_part_that_changes(system: Any, kind: str, at: int, session: str | None) -> None:
    watch = HeaderWatch()
    assert observe(watch, request(system(1), session_id=session)) is None
    assert observe(watch, request(system(1), session_id=session)) is None
    span = observe(watch, request(system(2), session_id=session))
    assert span is not None and (span.kind, span.at_chars, span.chars) == (kind, at, 1)
    assert re.fullmatch("[0-9a-f]{16}", span.digest)
    # A beginning that is known is not volatile: sessions in two directories take turns.
    assert observe(watch, request(system(2), session_id=session)) is None


def test_between_conversations_known_beginnings_stay_known() -> None:
    watch = HeaderWatch()
    other = {"role": "user", "content": "another question"}
    assert observe(watch, request(clock(1))) is None
    assert observe(watch, request(clock(2), other)) is not None
    for _ in range(3):
        assert observe(watch, request(clock(1))) is None
        assert observe(watch, request(clock(2), other)) is None


@pytest.mark.parametrize(
    "other",
    [
        RULES[:-5],  # nothing stands behind the difference, so nothing is lost by it
        RULES.replace("Rule", "Law"),
        "You are another agent.",
        "",
        RULES[600:],
        "z" * 600 + RULES,
    ],
)
def test_another_prompt_is_no_volatile_header(other: str) -> None:
    watch = HeaderWatch()
    observe(watch, request(RULES))
    asked = {"role": "user", "content": "a question of another conversation"}
    assert observe(watch, request(other, asked)) is None


def test_a_line_at_the_end_costs_the_conversation_it_belongs_to() -> None:
    watch = HeaderWatch()
    observe(watch, request(f"{RULES}\nTime: 10:01"))
    assert observe(watch, request(f"{RULES}\nTime: 10:02", {"role": "user", "content": "new"})) is None
    assert observe(watch, request(f"{RULES}\nTime: 10:03")) is not None


def test_a_system_prompt_that_is_replaced_was_edited() -> None:
    watch = HeaderWatch()
    observe(watch, request("You write verse, and nothing else whatever happens."))
    assert observe(watch, request("Tests are what this agent must write from now on!!")) is None
    assert observe(watch, request("Tests are what this agent must write from now on..")) is not None


@pytest.mark.parametrize(("a", "b"), [({"tenant": "a"}, {"tenant": "b"}), ({"cache_salt": "a"}, {})])
def test_tenants_and_salts_are_not_compared(a: dict[str, str], b: dict[str, str]) -> None:
    watch = HeaderWatch()
    observe(watch, request(billing(1), **a))
    assert observe(watch, request(billing(2), **b)) is None
    assert observe(watch, request(billing(3), **b)) is not None


def test_hashes_mean_nothing_to_another_tenant() -> None:
    digests = set()
    for tenant in ("a", "b"):
        watch = HeaderWatch()
        observe(watch, request(billing(1), tenant=tenant))
        span = observe(watch, request(billing(2), tenant=tenant))
        assert span is not None
        digests.add(span.digest)
    assert len(digests) == 2


def test_off() -> None:
    watch = HeaderWatch("off")
    for number in range(3):
        assert observe(watch, request(billing(number))) is None


def test_bounds() -> None:
    watch = HeaderWatch(max_chars=5000)
    for number in range(60):
        observe(watch, request(f"{number}" * 1300, tenant=str(number % 7)))
        kept = sum(known.nchars for known in watch._known.values())
        assert watch._nchars == kept <= 5000


def test_it_is_logged_once_a_session_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    watch = HeaderWatch()
    with caplog.at_level(logging.INFO, "longturn.frontend.volatile"):
        for number in range(5):
            for session in ("s", "t"):
                observe(watch, request(billing(number), {"role": "user", "content": session}, session_id=session))
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "header" in record.message and "billing" not in record.message and "version" not in record.message


# --- moving ----------------------------------------------------------------------------------------------------------


def test_learned_lines_move_from_the_third_request_on() -> None:
    watch = HeaderWatch("move")
    rendered = []
    for number in range(4):
        asked = request(counter(number))
        assert isinstance(asked.prompt, ChatPrompt)
        rendered.append(watch.settled(asked.prompt, asked).messages[0]["content"])
        observe(watch, asked)
    stable = f"You are an agent.\n{RULES}"
    assert rendered[:2] == [counter(0), counter(1)]
    assert rendered[2:] == [f"{stable}\n\nThis is step {number} of the plan." for number in (2, 3)]


def test_headers_keep_the_values_that_their_system_prompt_came_with_first() -> None:
    """Templates write the tools behind the system prompt: another value would cost them all."""
    watch = HeaderWatch("move")
    made: dict[str, set[str]] = {}
    for user in ("a", "b"):
        for number in range(3):
            asked = request(billing(10 * (user == "b") + number), {"role": "user", "content": user})
            assert isinstance(asked.prompt, ChatPrompt)
            made.setdefault(user, set()).add(watch.settled(asked.prompt, asked).messages[0]["content"])
            assert observe(watch, asked) is None
    stable = billing(0).partition("\n")[2]
    first = {f"{stable}\n\nx-billing-header: version=1; request=00000;"}
    assert made == {"a": first, "b": first}
    other = dataclasses.replace(request(billing(7), USER), tenant="another")
    assert isinstance(other.prompt, ChatPrompt)
    assert "request=00007" in watch.settled(other.prompt, other).messages[0]["content"]


@pytest.mark.parametrize(
    ("mode", "system", "reused"),
    [
        ("report", billing, False),
        ("move", billing, True),
        ("report", clock, False),
        ("move", clock, False),  # what changes within a conversation is lost from the system prompt's end on
    ],
)
async def test_a_header_in_every_request(smollm: Tokenizer, mode: Mode, system: Any, reused: bool) -> None:
    """vllm-project/vllm#36829: a billing line at the front of every request, and nothing is ever cached."""
    end = smollm.eos_id
    assert end is not None
    engine = CachingEngine(lambda: smollm.encode("Done."), end)
    limits = ModelLimits(100_000, smollm.vocab_size, (end,))
    frontend = Frontend(smollm, ChatTemplates.of(smollm), engine, limits, headers=HeaderWatch(mode))
    history: list[Any] = [{"role": "user", "content": "Question. " * 100}]
    before = 0
    for number in range(4):
        asked = request(system(number), *history)
        chunks = [chunk async for chunk in frontend.generate(asked)]
        reuse, usage = chunks[0].reuse, chunks[-1].usage
        assert isinstance(reuse, Reuse) and usage is not None and usage.reuse_reason is reuse.reason
        whole = before // 128 * 128
        if number == 0:
            assert reuse.reason is ReuseReason.FIRST_TURN
        elif reused:
            assert (reuse.reason, reuse.diverged_at, reuse.volatile) == (ReuseReason.EXTENDED, None, None)
            assert reuse.cached_tokens == whole
        else:
            assert reuse.reason is ReuseReason.VOLATILE_HEADER and reuse.volatile is not None
            assert reuse.diverged_at is not None and reuse.cached_tokens == reuse.diverged_at // 128 * 128
            stable = len(smollm.encode(f"You are an agent.\n{RULES}"))
            assert (reuse.diverged_at > stable) is (mode == "move")
        before = len(engine.left[-1]) - 1
        text = "".join(chunk.text for chunk in chunks)
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]


async def test_tokens_are_counted_as_they_are_sent(smollm: Tokenizer) -> None:
    end = smollm.eos_id
    assert end is not None
    engine = CachingEngine(lambda: smollm.encode("Done."), end)
    limits = ModelLimits(100_000, smollm.vocab_size, (end,))
    frontend = Frontend(smollm, ChatTemplates.of(smollm), engine, limits, headers=HeaderWatch("move"))
    asked, later = request(billing(1), USER), request(billing(2), USER)
    chunks = [chunk async for chunk in frontend.generate(asked)]
    for one in (asked, later):
        assert isinstance(one.prompt, ChatPrompt)
        assert await frontend.tokenize(one.prompt) == list(chunks[0].prompt_token_ids or ())
    assert await frontend.tokenize(later.prompt, tenant="another") != list(chunks[0].prompt_token_ids or ())


@pytest.mark.parametrize("mode", ["off", "report", "move"])
def test_the_mode_comes_from_the_configuration(embedded_source: ModelSource, mode: Mode) -> None:
    config = EngineConfig(frontend=FrontendConfig(stabilise_headers=mode))
    engine = CachingEngine(list, None)
    assert build_frontend(config, engine)._drafts._headers.mode == mode
    assert build_frontend(EngineConfig(), engine)._drafts._headers.mode == "report"
