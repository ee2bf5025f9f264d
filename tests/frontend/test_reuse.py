"""What is said of a conversation's prompt: the tokens that were cached, the first that differs, and the reason.

The oracle is an engine that keeps every page, and a comparison token by token with what the turn before left behind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.config import PAGE_TOKENS
from longturn.engine.records import SamplingParams, unpack_tokens
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.conversation import ConversationMemory, MemoryLimits
from longturn.frontend.conversation_keys import text_history, text_key
from longturn.frontend.frontend import Frontend
from longturn.frontend.records import ChatPrompt, Reuse, ReuseReason, TextPrompt, TextRequest
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.frontend.validate import ModelLimits
from longturn.models.small_tokenizer import CHAT_TEMPLATE
from tests.frontend.caching import CachingEngine
from tests.frontend.fakes import CHATML, IM_END, tiny_tokenizer
from tests.frontend.m3 import block, invoke, tag
from tests.frontend.test_parsers_output import EOS, M3, TOKENIZER, TOOLS, VOCAB

Message = dict[str, Any]
SESSION = "0b5a2b9e-3a68-4a83-8d5e-2f4a8f8f5f11"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


LONG = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 12
TALK: list[Message] = [{"role": "system", "content": "You help."}, user(f"Question. {LONG}")]


class Talk:
    """A frontend, the engine behind it, and what the model is to write next."""

    def __init__(self, tokenizer: Tokenizer, end: int | None, memory: ConversationMemory | None = None) -> None:
        self.tokenizer = tokenizer
        self.next: Sequence[int] = tokenizer.encode(f"Answer. {LONG}")
        self.engine = CachingEngine(lambda: self.next, end)
        ends = () if end is None else (end,)
        limits = ModelLimits(100_000, tokenizer.vocab_size, ends)
        self.frontend = Frontend(tokenizer, ChatTemplates.of(tokenizer), self.engine, limits, memory)

    async def ask(self, messages: Sequence[Message], **options: Any) -> tuple[str, Reuse, list[int]]:
        """The answer's text, what was reused, and the prompt's ids."""
        prompt = ChatPrompt(tuple(messages), options.pop("tools", ()), options.pop("kwargs", {}))
        return await self.run(TextRequest("r", prompt, SamplingParams(max_tokens=0), **options))

    async def run(self, request: TextRequest) -> tuple[str, Reuse, list[int]]:
        chunks = [chunk async for chunk in self.frontend.generate(request)]
        reuse, usage = chunks[0].reuse, chunks[-1].usage
        assert reuse is not None and usage is not None and all(chunk.reuse is None for chunk in chunks[1:])
        assert usage.reuse_reason is reuse.reason and usage.diverged_at == reuse.diverged_at
        assert usage.cached_tokens == reuse.cached_tokens
        return "".join(chunk.text for chunk in chunks), reuse, list(chunks[0].prompt_token_ids or ())


@pytest.fixture
def talk(smollm: Tokenizer) -> Talk:
    return Talk(smollm, smollm.eos_id)


def whole(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """None if `a` begins with all of `b`."""
    return next((i for i, token in enumerate(b) if i >= len(a) or a[i] != token), None)


async def two_turns(talk: Talk, **options: Any) -> list[Message]:
    """A conversation of two turns, and a third question."""
    messages = list(TALK)
    for number in range(2):
        text, _, _ = await talk.ask(messages, **options)
        messages += [assistant(text), user(f"And question {number}?")]
    return messages


# --- reasons ---------------------------------------------------------------------------------------------------------


async def test_first_turns_and_continued_ones(talk: Talk) -> None:
    _, reuse, _ = await talk.ask(TALK)
    assert reuse == Reuse(0, None, ReuseReason.FIRST_TURN)
    messages = await two_turns(talk)
    left = talk.engine.left[-1]
    _, reuse, ids = await talk.ask(messages)
    assert reuse == Reuse(whole(len(left) - 1), None, ReuseReason.EXTENDED) and ids[: len(left)] == left
    # The same beginning in another conversation is cached, and a first turn all the same.
    _, reuse, _ = await talk.ask([*TALK[:1], user(f"{TALK[1]['content']} Another.")])
    assert reuse.reason is ReuseReason.FIRST_TURN and reuse.cached_tokens > 0


@pytest.mark.parametrize("session", [None, SESSION])
@pytest.mark.parametrize("at", [1, 2, 3])
async def test_an_edited_history(talk: Talk, session: str | None, at: int) -> None:
    messages = await two_turns(talk, session_id=session)
    left = talk.engine.left[-1]
    content = messages[at]["content"]
    messages[at] = {**messages[at], "content": content[: len(content) // 2] + " edited " + content[len(content) // 2 :]}
    _, reuse, ids = await talk.ask(messages, session_id=session)
    expected = first_difference(ids, left)
    assert expected is not None
    if session is None and at == 1:  # nothing names this conversation any more
        assert reuse == Reuse(whole(expected), None, ReuseReason.NOT_REMEMBERED)
    else:
        assert reuse == Reuse(whole(expected), expected, ReuseReason.EDITED_HISTORY)
    rendered = talk.frontend._drafts.render(ChatPrompt(tuple(messages)))
    assert first_difference(talk.tokenizer.encode(rendered), left) == expected


async def test_an_edited_tail_continues_the_turn_before_it(talk: Talk) -> None:
    messages = await two_turns(talk)
    left = talk.engine.left[-2]
    _, reuse, ids = await talk.ask([*messages[:3], user("Something else?")])
    assert reuse == Reuse(whole(len(left) - 1), None, ReuseReason.EXTENDED) and ids[: len(left)] == left


async def test_a_tool_result_that_was_cleared(talk: Talk) -> None:
    """Agents replace old results to save context; all behind them is computed again, and the reason is named."""
    messages = list(TALK)
    for number in range(3):
        text, _, _ = await talk.ask(messages)
        messages += [
            assistant(text),
            {"role": "tool", "content": f"Result {number}. {LONG}", "tool_call_id": str(number)},
        ]
    left = talk.engine.left[-1]
    messages[3] = {**messages[3], "content": "[cleared]"}
    _, reuse, ids = await talk.ask(messages)
    expected = first_difference(ids, left)
    assert expected is not None and reuse == Reuse(whole(expected), expected, ReuseReason.EDITED_HISTORY)
    # From here on the conversation is the one with the cleared result.
    text, left = "".join(talk.tokenizer.decode(talk.next)), talk.engine.left[-1]
    _, reuse, _ = await talk.ask([*messages, assistant(text), user("Go on.")])
    assert reuse == Reuse(whole(len(left) - 1), None, ReuseReason.EXTENDED)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"tools": ({"type": "function", "function": {"name": "f"}},)}, ReuseReason.TOOLS_CHANGED),
        ({"kwargs": {"mood": "gay"}}, {"kwargs": {"mood": "grim"}}, ReuseReason.TEMPLATE_CHANGED),
    ],
)
async def test_tools_and_template_arguments(before: dict[str, Any], after: dict[str, Any], reason: ReuseReason) -> None:
    tokenizer = tiny_tokenizer("{{ mood or '' }}{{ tools | tojson if tools else '' }}" + CHATML)
    talk = Talk(tokenizer, IM_END)
    messages = await two_turns(talk, **before)
    left = talk.engine.left[-1]
    _, reuse, ids = await talk.ask(messages, **after)
    expected = first_difference(ids, left)
    assert expected is not None and reuse == Reuse(whole(expected), expected, reason)


async def test_evicted_pages(talk: Talk) -> None:
    messages = await two_turns(talk)
    hashes = talk.engine.requests[-1].page_hashes
    assert len(hashes) > 2
    talk.engine.pages.discard(hashes[1])
    _, reuse, _ = await talk.ask(messages)
    assert reuse == Reuse(PAGE_TOKENS, None, ReuseReason.EVICTED)
    # Without a prefix cache nothing is evicted from it.
    frontend = talk.frontend
    talk.frontend = Frontend(
        frontend.tokenizer, ChatTemplates.of(frontend.tokenizer), talk.engine, frontend.limits, caches=False
    )
    messages = await two_turns(talk)
    talk.engine.pages.clear()
    _, reuse, _ = await talk.ask(messages)
    assert reuse == Reuse(0, None, ReuseReason.EXTENDED)


async def test_a_conversation_that_was_forgotten(smollm: Tokenizer) -> None:
    now = 0.0
    talk = Talk(smollm, smollm.eos_id, ConversationMemory(MemoryLimits(ttl_s=10), now_s=lambda: now))
    messages = await two_turns(talk, session_id=SESSION)
    now = 11.0
    _, reuse, _ = await talk.ask(messages, session_id=SESSION)
    assert (reuse.reason, reuse.diverged_at) == (ReuseReason.NOT_REMEMBERED, None)


@pytest.mark.parametrize(
    ("session", "tenant", "expected"),
    [
        (SESSION, None, ReuseReason.OTHER_SALT),
        (f"user_x_session_{SESSION}", None, ReuseReason.OTHER_SALT),
        # Whoever guesses a session's name must not learn that there is one.
        ("my-session", None, ReuseReason.NOT_REMEMBERED),
        (SESSION, "another key", ReuseReason.NOT_REMEMBERED),
    ],
)
async def test_a_salt_that_changes(talk: Talk, session: str, tenant: str | None, expected: ReuseReason) -> None:
    messages = await two_turns(talk, session_id=session, cache_salt="a")
    _, reuse, _ = await talk.ask(messages, session_id=session, cache_salt="b", tenant=tenant)
    assert reuse == Reuse(0, None, expected)
    _, reuse, _ = await talk.ask(messages, session_id=session, cache_salt="b", tenant=tenant)
    assert reuse.reason is not ReuseReason.OTHER_SALT or reuse.cached_tokens > 0


async def test_a_subagent_of_the_same_session_is_another_conversation(talk: Talk) -> None:
    main = await two_turns(talk, session_id=SESSION)
    left = talk.engine.left[-1]
    other: list[Message] = [{"role": "system", "content": "You search."}, user("Search.")]
    text, _, _ = await talk.ask(other, session_id=SESSION)
    main[2] = assistant("Edited.")
    _, reuse, ids = await talk.ask(main, session_id=SESSION)
    assert (reuse.reason, reuse.diverged_at) == (ReuseReason.EDITED_HISTORY, first_difference(ids, left))
    _, reuse, _ = await talk.ask([*other, assistant(text), user("More.")], session_id=SESSION)
    assert reuse.reason is ReuseReason.EXTENDED


# --- any conversation ------------------------------------------------------------------------------------------------

WORDS = ["The", " cat", "\n", " 12", "é", " {", '"a": 1', "}", " naïve", "…", "  ", " end", "."]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30))
async def test_random_conversations_against_brute_force(smollm: Tokenizer, seed: int) -> None:
    """Turns with tool results, edits anywhere, cut tails and forgotten pages; tokens as no tokenizer would cut them."""
    rng = random.Random(seed)
    talk = Talk(smollm, smollm.eos_id)

    def text(most: int) -> str:
        return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most)))

    messages: list[Message] = [{"role": "system", "content": text(200)}, user(text(300))]
    options, edited = {"session_id": SESSION}, None
    for _ in range(rng.randrange(2, 7)):
        talk.next = [token for piece in text(150).split(" ") for token in smollm.encode(f" {piece}")]
        before = list(talk.engine.left)
        computed = set(talk.engine.pages)
        _, reuse, ids = await talk.ask(messages, **options)
        if not any(message["role"] == "assistant" for message in messages):
            assert reuse.reason is ReuseReason.FIRST_TURN
        else:
            gaps = [first_difference(ids, left) for left in before]
            # It continues some earlier turn, or the place is where it leaves the latest one.
            if reuse.reason in (ReuseReason.EXTENDED, ReuseReason.EVICTED):
                assert None in gaps and reuse.diverged_at is None
                extended = max(len(left) for left, gap in zip(before, gaps, strict=True) if gap is None)
                assert (reuse.reason is ReuseReason.EXTENDED) is (reuse.cached_tokens >= whole(extended - 1))
            else:
                # An edit of the system prompt that leaves most of it as it was looks like a volatile header.
                edits = {ReuseReason.EDITED_HISTORY} | ({ReuseReason.VOLATILE_HEADER} if edited == 0 else set())
                assert reuse.reason in edits and reuse.diverged_at == gaps[-1]
        hashes = talk.engine.requests[-1].page_hashes
        cached = next((i for i, page in enumerate(hashes) if page not in computed), len(hashes))
        assert reuse.cached_tokens == min(cached * PAGE_TOKENS, whole(len(ids) - 1))
        answer = smollm.decode(talk.next)
        new = user(text(100)) if rng.random() < 0.5 else {"role": "tool", "content": text(200), "tool_call_id": "1"}
        messages = [*messages, assistant(answer), new]
        edited = None
        if rng.random() < 0.3:
            edited = rng.randrange(len(messages))
            # White space at the ends alone is no edit: clients strip what models write.
            messages[edited] = {**messages[edited], "content": f"{text(100)}; {messages[edited]['content']}"}
        if rng.random() < 0.2:
            talk.engine.pages -= set(rng.sample(sorted(talk.engine.pages), len(talk.engine.pages) // 3))


# --- templates that leave out reasoning ------------------------------------------------------------------------------

DROPS = CHAT_TEMPLATE.replace(
    "{%- for message in (messages[1:]",
    "{%- set asked = namespace(at=0) -%}{%- for message in messages if message.role == 'user' -%}"
    "{%- set asked.at = messages.index(message) -%}{%- endfor -%}"
    "{%- for message in (messages[1:]",
).replace("if message.reasoning_content -", "if message.reasoning_content and messages.index(message) > asked.at -")
assert DROPS.count("asked.at") == 2
M3_TOKENIZER = Tokenizer(TOKENIZER._backend, TokenizerSettings(TOKENIZER.settings.special_tokens, {"default": DROPS}))


def pieces(text: str) -> list[int]:
    """Tokens of single characters where there are such: other ones than the tokenizer's."""
    ids: list[int] = []
    for part in text.split("]<]minimax[>["):
        if ids or part != text.split("]<]minimax[>[")[0]:
            ids += TOKENIZER.encode("]<]minimax[>[")
        ids += TOKENIZER.encode(part) if "<" in part else [token for char in part for token in TOKENIZER.encode(char)]
    return ids


def m3_talk() -> Talk:
    talk = Talk(M3_TOKENIZER, EOS)
    limits = ModelLimits(100_000, VOCAB, (EOS,))
    talk.frontend = Frontend(M3_TOKENIZER, ChatTemplates.of(M3_TOKENIZER), talk.engine, limits, output=M3)
    return talk


async def m3_turn(talk: Talk, messages: list[Message], wrote: list[int], **message: Any) -> Reuse:
    """One turn; the answer is added to the messages as most clients send it back, without its reasoning."""
    talk.next = wrote
    request = TextRequest(
        "r", ChatPrompt(tuple(messages), TOOLS), SamplingParams(max_tokens=0), split_reasoning=True, parse_tools=True
    )
    text, reuse, _ = await talk.run(request)
    calls = (
        [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"lines": 1}'}}]
        if b"tool_call" in b"".join(map(TOKENIZER.token_bytes, wrote))
        else None
    )
    messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **message})
    return reuse


async def test_reasoning_is_kept_in_a_loop_and_left_out_behind_it() -> None:
    """Qwen3.8#112: a new question drops the loop's reasoning. What stood before the loop must not be lost with it."""
    talk = m3_talk()
    call = block(invoke("look", tag("lines", "1")))
    messages: list[Message] = [user(f"Look. {LONG}")]
    await m3_turn(talk, messages, pieces(f"It is written. {LONG}"))
    before_loop = talk.engine.left[-1]
    messages.append(user(f"Look closer. {LONG}"))
    for number in range(3):
        reuse = await m3_turn(talk, messages, TOKENIZER.encode(f"<mm:think>thought {number}</mm:think>{call}"))
        assert reuse == Reuse(reuse.cached_tokens, None, ReuseReason.EXTENDED)
        messages.append({"role": "tool", "content": f"line {number} {LONG}", "tool_call_id": "1"})
    in_loop = talk.engine.left[-1]
    messages.append(user("And now?"))
    reuse = await m3_turn(talk, messages, TOKENIZER.encode("Done."))
    ids = unpack_tokens(talk.engine.requests[-1].prompt)
    expected = first_difference(ids, in_loop)
    assert expected is not None and reuse == Reuse(whole(expected), expected, ReuseReason.RERENDERED)
    # The answer before the loop is still the model's own tokens, which no tokenizer would write.
    assert ids[: len(before_loop)] == before_loop and expected > len(before_loop)
    rendered = talk.frontend._drafts.render(ChatPrompt(tuple(messages[:-1]), TOOLS))
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == rendered
    assert first_difference(TOKENIZER.encode(rendered), before_loop) is not None
    left = talk.engine.left[-1]
    messages.append(user("Thanks."))
    reuse = await m3_turn(talk, messages, TOKENIZER.encode("Bye."))
    assert reuse == Reuse(whole(len(left) - 1), None, ReuseReason.EXTENDED)


async def test_reasoning_that_the_client_has_changed_is_an_edit() -> None:
    talk = m3_talk()
    call = block(invoke("look", tag("lines", "1")))
    messages: list[Message] = [user(f"Look. {LONG}")]
    await m3_turn(talk, messages, TOKENIZER.encode(f"<mm:think>one</mm:think>{call}"), reasoning_content="two")
    messages.append({"role": "tool", "content": "line", "tool_call_id": "1"})
    reuse = await m3_turn(talk, messages, TOKENIZER.encode("Done."))
    expected = first_difference(unpack_tokens(talk.engine.requests[-1].prompt), talk.engine.left[0])
    assert expected is not None and reuse == Reuse(whole(expected), expected, ReuseReason.EDITED_HISTORY)


# --- prompts that clients render themselves --------------------------------------------------------------------------


def text_request(text: str, **options: Any) -> TextRequest:
    return TextRequest("r", TextPrompt(text), SamplingParams(max_tokens=0), **options)


async def test_text_completions_of_a_rendered_conversation(smollm: Tokenizer) -> None:
    """Agents that render the template themselves get their own tokens back too."""
    talk = Talk(smollm, smollm.eos_id)
    end = smollm.special_text(smollm.eos_id or 0)
    text = f"<|im_start|>user\n{LONG}{end}\n<|im_start|>assistant\n"
    talk.next = [token for char in "It is here. Look." for token in smollm.encode(char)]
    for number in range(3):
        written, reuse, ids = await talk.run(text_request(text))
        assert smollm.decode(ids, skip_special_tokens=False) == text
        if number:
            left = talk.engine.left[-2]
            assert ids[: len(left)] == left != smollm.encode(text)[: len(left)]
            assert reuse == Reuse(whole(len(left) - 1), None, ReuseReason.EXTENDED)
        for options in ({"tenant": "b"}, {"cache_salt": "b"}):
            _, other, other_ids = await with_empty_cache(talk).run(text_request(text, **options))
            assert other_ids == smollm.encode(text) and other.cached_tokens == 0
        text += f"{written}{end}\n<|im_start|>user\nMore {number}{end}\n<|im_start|>assistant\n"


def with_empty_cache(talk: Talk) -> Talk:
    """The same memory before an engine of its own, which keeps nothing."""
    other = Talk(talk.tokenizer, talk.tokenizer.eos_id)
    other.frontend.memory = talk.frontend.memory
    return other


async def test_texts_that_are_no_conversation_never_depend_on_the_past(smollm: Tokenizer) -> None:
    talk = Talk(smollm, None)
    talk.next = [token for char in " there was a kin" for token in smollm.encode(char)]
    written, reuse, _ = await talk.run(text_request("Once"))
    assert reuse == Reuse(0)
    _, _, ids = await talk.run(text_request(f"Once{written}gdom"))
    assert ids == smollm.encode("Once there was a kingdom")
    assert len(talk.frontend.memory) == 0


@given(st.lists(st.sampled_from(["a", "<|im_end|>", "\n", "é", "<|im_"]), max_size=12))
def test_text_keys_are_those_of_the_text_up_to_each_end(parts: list[str]) -> None:
    text = "".join(parts)
    history = text_history(text, ("<|im_end|>",), tenant="t", cache_salt=None, session_id=None)
    ends = [i + 10 for i in range(len(text)) if text.startswith("<|im_end|>", i)]
    assert history.keys == tuple(text_key(text[:end], history.scope) for end in [0, *ends])
    assert history.answers == tuple(range(len(ends), 0, -1))
