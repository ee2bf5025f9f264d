"""Conversation memory: exact continuation, tolerance for what clients change, bounds, and separation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.records import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.conversation import ConversationMemory, MemoryLimits
from longturn.frontend.conversation_ids import Turn, common_tokens, continuation, text_digest
from longturn.frontend.conversation_keys import History, canonical_message, history_of
from longturn.frontend.frontend import Frontend
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest
from longturn.frontend.tokenizer import Tokenizer
from tests.frontend.fakes import CHATML, IM_END, fake_frontend, outputs_of, tiny_tokenizer

Message = dict[str, Any]


class Writer:
    """The script of an engine that writes what it is told."""

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()
        self.finish = FinishReason.STOP
        self.stop_token_id: int | None = IM_END

    def __call__(self, request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, self.ids, self.finish, stop_token_id=self.stop_token_id)


def chat_request(messages: Sequence[Message], **options: Any) -> TextRequest:
    fields = {"tools": (), "template_kwargs": {}} | {
        k: options.pop(k) for k in ("tools", "template_kwargs") if k in options
    }
    return TextRequest("r", ChatPrompt(tuple(messages), **fields), SamplingParams(max_tokens=0), **options)


async def turn(frontend: Frontend, messages: Sequence[Message], **options: Any) -> tuple[str, TextChunk, list[int]]:
    """One turn: the text, the last chunk, and the prompt's ids."""
    text, prompt_ids, last = "", [], None
    async for chunk in frontend.generate(chat_request(messages, **options)):
        text += chunk.text
        if chunk.prompt_token_ids is not None:
            prompt_ids = list(chunk.prompt_token_ids)
        last = chunk
    assert last is not None and last.usage is not None
    return text, last, prompt_ids


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **extra: Any) -> Message:
    return {"role": "assistant", "content": text, **extra}


def uncanonical(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text, byte by byte: as no tokenizer writes them, but a model may."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


# --- turns -----------------------------------------------------------------------------------------------------------


async def test_next_turn_is_the_last_turns_ids_and_the_new_part() -> None:
    writer = Writer()
    frontend, engine = fake_frontend(writer)
    tokenizer = frontend.tokenizer
    first = [{"role": "system", "content": "be hello"}, user("hello world " * 40)]
    writer.ids = uncanonical("hello abc", tokenizer)
    text, _, prompt = await turn(frontend, first)
    assert text == "hello abc"
    second = [*first, assistant(text), user("and more")]
    _, last, next_prompt = await turn(frontend, second)
    kept = [*prompt, *writer.ids, IM_END]
    assert next_prompt[: len(kept)] == kept
    assert tokenizer.decode(next_prompt, skip_special_tokens=False) == ChatTemplates.of(tokenizer).render(
        ChatPrompt(tuple(second))
    )
    assert next_prompt[len(kept) :] == tokenizer.encode(
        "\n<|im_start|>user\nand more<|im_end|>\n<|im_start|>assistant\n"
    )
    assert last.usage is not None and last.usage.diverged_at is None and frontend.memory.hits == 1
    request = engine.requests[-1]
    assert request.page_hashes == page_hashes(request.prompt, salt_key(None, None))
    assert len(request.page_hashes) > len(engine.requests[0].page_hashes) > 0
    # Plain rendering would have left the model's own tokens: the test would be empty if both were the same.
    assert tokenizer.encode(tokenizer.decode(next_prompt, skip_special_tokens=False)) != next_prompt


@pytest.mark.parametrize(
    "sent_back",
    [
        assistant("hello  "),
        assistant("\nhello"),
        assistant("hello", refusal=None, tool_calls=None, annotations=[]),
        assistant("hello", tool_calls=[]),
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
    ],
)
async def test_what_clients_change_on_the_way_back(sent_back: Message) -> None:
    template = CHATML.replace("message['content'] | default('')", "text(message['content'])")
    macro = "{% macro text(c) %}{{ c if c is string else c[0].text }}{% endmacro %}"
    writer = Writer()
    frontend, _ = fake_frontend(writer, tokenizer=tiny_tokenizer(macro + template))
    writer.ids = uncanonical("hello", frontend.tokenizer)
    _, _, prompt = await turn(frontend, [user("x")])
    _, last, next_prompt = await turn(frontend, [user("x"), sent_back, user("y")])
    kept = [*prompt, *writer.ids, IM_END]
    assert next_prompt[: len(kept)] == kept and last.usage is not None and last.usage.diverged_at is None


async def test_empty_answer_comes_back_as_null_or_empty() -> None:
    for content in ("", None):
        writer = Writer()
        frontend, _ = fake_frontend(writer)
        _, _, prompt = await turn(frontend, [user("x")])
        _, _, next_prompt = await turn(frontend, [user("x"), assistant(content), user("y")])
        assert next_prompt[: len(prompt) + 1] == [*prompt, IM_END] and frontend.memory.hits == 1


async def test_answer_cut_by_length_gets_the_templates_end_of_turn() -> None:
    writer = Writer()
    writer.finish, writer.stop_token_id = FinishReason.LENGTH, None
    frontend, _ = fake_frontend(writer)
    writer.ids = uncanonical("hello", frontend.tokenizer)
    _, _, prompt = await turn(frontend, [user("x")])
    _, _, next_prompt = await turn(frontend, [user("x"), assistant("hello"), user("y")])
    kept = [*prompt, *writer.ids]
    assert next_prompt[: len(kept)] == kept and next_prompt[len(kept)] == IM_END


async def test_answer_cut_inside_a_character() -> None:
    writer = Writer()
    writer.finish, writer.stop_token_id = FinishReason.LENGTH, None
    frontend, _ = fake_frontend(writer)
    writer.ids = uncanonical("a\u00e9", frontend.tokenizer)[:-1]
    text, _, prompt = await turn(frontend, [user("x")])
    assert text == "a\ufffd"
    _, _, next_prompt = await turn(frontend, [user("x"), assistant(text), user("y")])
    kept = [*prompt, *writer.ids]
    assert next_prompt[: len(kept)] == kept and next_prompt[len(kept)] == IM_END


async def test_other_stop_token_than_the_templates() -> None:
    writer = Writer()
    writer.stop_token_id = 302  # <|endoftext|>, while the template ends a turn with <|im_end|>
    frontend, _ = fake_frontend(writer)
    writer.ids = uncanonical("hello", frontend.tokenizer)
    _, _, prompt = await turn(frontend, [user("x")])
    messages = [user("x"), assistant("hello"), user("y")]
    _, last, next_prompt = await turn(frontend, messages)
    kept = [*prompt, *writer.ids]
    assert next_prompt[: len(kept) + 1] == [*kept, IM_END] and frontend.memory.hits == 1
    rendered = ChatTemplates.of(frontend.tokenizer).render(ChatPrompt(tuple(messages)))
    assert frontend.tokenizer.decode(next_prompt, skip_special_tokens=False) == rendered
    assert last.usage is not None and last.usage.diverged_at is None


async def test_page_that_the_dropped_stop_token_had_filled() -> None:
    writer = Writer()
    writer.stop_token_id = 302
    frontend, engine = fake_frontend(writer)
    writer.ids = uncanonical("hello", frontend.tokenizer)
    overhead = len(frontend.tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")) + 5 + 1
    question = user("x" * (2 * 128 - overhead))
    _, _, prompt = await turn(frontend, [question])
    assert len(prompt) + 5 + 1 == 2 * 128
    await turn(frontend, [question, assistant("hello"), user("y" * 128)])
    request = engine.requests[-1]
    assert frontend.memory.hits == 1
    assert request.page_hashes == page_hashes(request.prompt, salt_key(None, None)) and len(request.page_hashes) == 3


async def test_edit_on_a_page_that_was_known() -> None:
    writer = Writer()
    frontend, engine = fake_frontend(writer)
    writer.ids = uncanonical("hello", frontend.tokenizer)
    messages = [user("x" * 200), assistant("sure"), user("y" * 200)]
    await turn(frontend, messages)
    _, last, _ = await turn(frontend, [*messages[:2], user("y" * 100 + "z" * 100), assistant("hello"), user("more")])
    request = engine.requests[-1]
    assert last.usage is not None and last.usage.diverged_at is not None and last.usage.diverged_at > 300
    assert request.page_hashes == page_hashes(request.prompt, salt_key(None, None))


async def test_stop_string_inside_a_token_keeps_the_tokens_before_it() -> None:
    writer = Writer()
    frontend, _ = fake_frontend(writer)
    (hello,) = frontend.tokenizer.encode("hello")
    writer.ids = [ord_id(frontend, "x"), hello, ord_id(frontend, "y")]
    text, last, prompt = await turn(frontend, [user("q")], stop=("ll",))
    assert (text, last.stop_text) == ("xhe", "ll")
    messages = [user("q"), assistant(text), user("y")]
    _, _, next_prompt = await turn(frontend, messages)
    assert next_prompt[: len(prompt) + 1] == [*prompt, writer.ids[0]] and frontend.memory.hits == 1
    rendered = ChatTemplates.of(frontend.tokenizer).render(ChatPrompt(tuple(messages)))
    assert frontend.tokenizer.decode(next_prompt, skip_special_tokens=False) == rendered


def ord_id(frontend: Frontend, char: str) -> int:
    (token_id,) = frontend.tokenizer.encode(char)
    return token_id


async def test_end_of_turn_token_that_takes_the_space_behind_it() -> None:
    """Some checkpoints' end-of-turn token swallows the newline; the new part must be tokenised behind it."""
    writer = Writer()
    frontend, _ = fake_frontend(writer, tokenizer=tiny_tokenizer(rstrip_end=True))
    writer.ids = frontend.tokenizer.encode("hello")
    messages = [user("x")]
    text, _, _ = await turn(frontend, messages)
    messages += [assistant(text), user("y")]
    _, _, next_prompt = await turn(frontend, messages)
    assert frontend.memory.hits == 1
    rendered = ChatTemplates.of(frontend.tokenizer).render(ChatPrompt(tuple(messages)))
    assert next_prompt == frontend.tokenizer.encode(rendered)


async def test_edited_history_renders_plainly_and_says_where() -> None:
    writer = Writer()
    frontend, _ = fake_frontend(writer)
    tokenizer = frontend.tokenizer
    writer.ids = uncanonical("hello", tokenizer)
    messages = [user("x")]
    prompts = []
    for question in ("y", "z"):
        text, _, prompt = await turn(frontend, messages)
        prompts.append(prompt)
        messages += [assistant(text), user(question)]
    first = prompts[0]
    _, _, third = await turn(frontend, messages)
    before = [*third, *writer.ids, IM_END]
    edited = [*messages[:3], assistant("HELLO"), user("z")]
    _, last, prompt = await turn(frontend, edited)
    assert last.usage is not None
    first_difference = next(i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b)
    assert last.usage.diverged_at == first_difference
    # The unedited first answer is still the model's own tokens.
    assert prompt[: len(first) + len(writer.ids) + 1] == [*first, *writer.ids, IM_END]
    rendered = ChatTemplates.of(tokenizer).render(ChatPrompt(tuple(edited)))
    assert tokenizer.decode(prompt, skip_special_tokens=False) == rendered


async def test_template_that_drops_old_reasoning_renders_plainly() -> None:
    template = CHATML.replace(
        "message['content'] | default('')",
        "(message['content'] if loop.last else message['content'].split('</think>')[-1])",
    )
    writer = Writer()
    frontend, _ = fake_frontend(writer, tokenizer=tiny_tokenizer(template))
    writer.ids = frontend.tokenizer.encode("<think>abc</think>hello")
    text, _, first = await turn(frontend, [user("x")])
    messages = [user("x"), assistant(text), user("y")]
    _, last, prompt = await turn(frontend, messages)
    assert prompt == frontend.tokenizer.encode(ChatTemplates.of(frontend.tokenizer).render(ChatPrompt(tuple(messages))))
    assert last.usage is not None and last.usage.diverged_at == len(first)


async def test_tenants_salts_tools_and_arguments_are_apart() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"tenant": "a"},
        {"cache_salt": "a"},
        {"tools": ({"name": "f"},)},
        {"template_kwargs": {"k": 1}},
    ]
    for kept in variants:
        writer = Writer()
        frontend, engine = fake_frontend(writer)
        writer.ids = uncanonical("hello", frontend.tokenizer)
        await turn(frontend, [user("x" * 200)], **kept)
        for asked in variants:
            hits = frontend.memory.hits
            await turn(frontend, [user("x" * 200), assistant("hello"), user(str(asked))], **asked)
            assert (frontend.memory.hits - hits == 1) is (asked == kept)
        keys = {request.hash_key for request in engine.requests}
        assert len(keys) == 3  # no tenant, one tenant, one salt
        assert len({request.page_hashes[0] for request in engine.requests}) == 3


async def test_new_conversations_and_repeated_questions_do_not_diverge() -> None:
    writer = Writer()
    frontend, _ = fake_frontend(writer)
    writer.ids = frontend.tokenizer.encode("hello")
    for messages in ([user("x")], [user("x")], [user("other")]):
        _, last, _ = await turn(frontend, messages)
        assert last.usage is not None and last.usage.diverged_at is None


async def test_session_names_the_conversation_whose_beginning_was_edited() -> None:
    for session, expected in (("s", True), (None, False)):
        writer = Writer()
        frontend, _ = fake_frontend(writer)
        writer.ids = frontend.tokenizer.encode("hello")
        await turn(frontend, [user("x")], session_id=session)
        _, last, _ = await turn(frontend, [user("changed"), assistant("hello"), user("y")], session_id=session)
        assert last.usage is not None and (last.usage.diverged_at is not None) is expected


async def test_aborted_answers_are_not_remembered() -> None:
    writer = Writer()
    writer.finish, writer.stop_token_id = FinishReason.ABORT, None
    frontend, _ = fake_frontend(writer)
    await turn(frontend, [user("x")])
    assert len(frontend.memory) == 0


# --- any conversation ------------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet='helo wrabc\n\u00e9\U0001f600{}"', max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.data())
async def test_random_conversations(data: st.DataObject) -> None:
    """Turns, edits and branches: the ids always stand for the rendering, and repeat what was not edited."""
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    writer = Writer()
    frontend, engine = fake_frontend(writer, tokenizer=tiny_tokenizer(rstrip_end=data.draw(st.booleans())))
    tokenizer, templates = frontend.tokenizer, ChatTemplates.of(frontend.tokenizer)
    messages: list[Message] = [user("x" * data.draw(st.sampled_from([0, 100, 300])) + data.draw(TEXTS))]
    extends, edited, kept, hits = False, False, [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        answer = data.draw(TEXTS)
        writer.ids = [
            i for c in answer for i in (uncanonical(c, tokenizer) if rng.random() < 0.5 else tokenizer.encode(c))
        ]
        writer.finish, writer.stop_token_id = rng.choice(
            [
                (FinishReason.STOP, IM_END),
                (FinishReason.STOP, IM_END),
                (FinishReason.STOP, 302),
                (FinishReason.LENGTH, None),
            ]
        )
        stops = ("lo",) if rng.random() < 0.3 else ()
        text, _, prompt = await turn(frontend, messages, stop=stops)
        rendered = templates.render(ChatPrompt(tuple(messages)))
        shown = tokenizer.decode(prompt, skip_special_tokens=False)
        if edited:  # an edit of white space around an answer is none: the model's own tokens stay
            assert "".join(shown.split()) == "".join(rendered.split())
        else:  # the end-of-turn token may have taken the newline behind it
            assert shown.replace("<|im_end|>\n", "<|im_end|>") == rendered.replace("<|im_end|>\n", "<|im_end|>")
        request = engine.requests[-1]
        assert request.page_hashes == page_hashes(request.prompt, request.hash_key)
        if extends:
            assert frontend.memory.hits == hits + 1 and prompt[: len(kept)] == kept
        extends, hits = True, frontend.memory.hits
        # A stop string may cut into the last tokens, and a foreign stop token gives way to the template's.
        kept = prompt if stops else [*prompt, *writer.ids]
        messages = [*messages, assistant(text), user(data.draw(TEXTS))]
        if rng.random() < 0.2:
            at = rng.randrange(len(messages))
            messages[at] = {**messages[at], "content": messages[at]["content"][: rng.randrange(400)] + data.draw(TEXTS)}
            extends, edited = False, True
        elif rng.random() < 0.2:
            messages = messages[: 2 * rng.randrange(len(messages) // 2) + 1]
            extends = False


# --- the memory by itself --------------------------------------------------------------------------------------------


def make_turn(tokens: int = 10, text: str = "") -> Turn:
    return Turn(pack_tokens(range(tokens)), (), 0, text_digest(""), text, "")


def make_history(*messages: Message, **options: Any) -> History:
    names: dict[str, Any] = {"tenant": None, "cache_salt": None, "session_id": None} | options
    return history_of(ChatPrompt(messages), **names)


def test_memory_is_bounded_and_extended_turns_go_first() -> None:
    memory = ConversationMemory(MemoryLimits(max_entries=3))
    memory.remember(make_history(user("a")), assistant("1"), make_turn())
    memory.remember(make_history(user("b")), assistant("1"), make_turn())
    memory.remember(make_history(user("b"), assistant("1"), user("c")), assistant("2"), make_turn())
    memory.remember(make_history(user("d")), assistant("1"), make_turn())
    known = [
        memory.find(make_history(*messages, user("next"))).turn is not None
        for messages in (
            (user("a"), assistant("1")),
            (user("b"), assistant("1")),
            (user("b"), assistant("1"), user("c"), assistant("2")),
            (user("d"), assistant("1")),
        )
    ]
    assert known == [True, False, True, True] and len(memory) == 3


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 400)), max_size=40))
def test_bytes_are_counted_and_bounded(steps: list[tuple[int, int]]) -> None:
    memory = ConversationMemory(MemoryLimits(max_bytes=6000, max_entries=4))
    for name, tokens in steps:
        memory.remember(make_history(user(str(name))), assistant("x"), make_turn(tokens))
        turns = [turn for place in (memory._older, memory._newest) for _, turn in place.values()]
        assert memory.nbytes == sum(turn.nbytes for turn in turns) <= 6000
        assert len(memory) == len(turns) <= 4


def test_entries_expire() -> None:
    now = 0.0
    memory = ConversationMemory(MemoryLimits(ttl_s=10), now_s=lambda: now)
    memory.remember(make_history(user("a")), assistant("1"), make_turn())
    asked = make_history(user("a"), assistant("1"), user("b"))
    now = 9.0
    assert memory.find(asked).turn is not None  # and this use counts
    now = 18.0
    assert memory.find(asked).turn is not None
    now = 29.0
    assert memory.find(asked).turn is None and len(memory) == 0 and memory.nbytes == 0


def test_too_large_a_turn_is_not_kept() -> None:
    memory = ConversationMemory(MemoryLimits(max_bytes=2000))
    memory.remember(make_history(user("a")), assistant("1"), make_turn(1000))
    assert len(memory) == 0


def test_tool_calls_compare_by_name_and_arguments() -> None:
    def call(arguments: Any, **extra: Any) -> Message:
        return assistant(
            None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}, **extra}]
        )

    same = [call({"a": 1}), call('{"a": 1}', id="x"), call('{"a":1}', id="y", index=0)]
    assert all(canonical_message(message) == canonical_message(same[0]) for message in same)
    for other in (call({"a": 2}), call("not json"), assistant(""), assistant("t", tool_calls=same[0]["tool_calls"])):
        assert canonical_message(other) != canonical_message(same[0])
    # Other roles count whole: a tool's answer belongs to its call.
    tool = {"role": "tool", "content": "x", "tool_call_id": "1"}
    assert canonical_message(tool) != canonical_message({**tool, "tool_call_id": "2"})


def remembered(prompt: str, text: str, end: str) -> Turn:
    return Turn(b"", (), len(prompt), text_digest(prompt), text, end)


@pytest.mark.parametrize(
    ("text", "end", "rendered", "expected"),
    [
        ("answer", "<e>", "P|answer<e>\nmore", (True, "\nmore")),
        ("answer", "", "P|answer<e>\nmore", (False, "<e>\nmore")),
        ("answer", "<x>", "P|answer<e>\nmore", (False, "<e>\nmore")),
        ("  answer\n", "<e>", "P|answer<e>more", (True, "more")),
        ("answer", "<e>", "P|answer \n<e>more", (True, "more")),
        ('{"a":1}', "<e>", 'P|{"a": 1}<e>more', (True, "more")),
        ("answer", "<e>", "P|other<e>more", None),
        ("ore", "<e>", "P|other<e>more", None),
        ("answer", "<e>", "P|ans", None),
        ("answer", "<e>", "Q|answer<e>more", None),
        ("answer", "<e>", "P", None),
        ("<think>t</think>answer", "<e>", "P|answer<e>more", None),
    ],
)
def test_continuation(text: str, end: str, rendered: str, expected: tuple[bool, str] | None) -> None:
    assert continuation(remembered("P|", text, end), rendered) == expected


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_tokens(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_tokens(pack_tokens(a), pack_tokens(b)) == expected
    assert unpack_tokens(pack_tokens(a)) == a
