"""The one internal form of a request for text, and what comes back. Every API dialect becomes these records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, overload

from longturn.engine.records import FinishReason, RequestTimes, SamplingParams, unpack_tokens
from longturn.frontend.grammar import GrammarSpec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the OpenAI chat API has them, content parts already flattened to text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As the OpenAI chat API has them. Where the template shows no tools they are written into the system message."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template. `enable_thinking` (true or false) is translated where the template has another name
    for it; templates that know no thinking ignore it."""
    add_generation_prompt: bool = True
    deferred_tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that may be called and are not among the prompt's: the messages say what must be known of them."""

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """All that may be called."""
        return (*self.tools, *self.deferred_tools)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


class PromptIds(Sequence[int]):
    """Token ids of a prompt, read when somebody asks for them: most callers want their number alone."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        """`packed`: int32 little-endian."""
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // 4

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return unpack_tokens(self.packed)[at]

    def __iter__(self) -> Iterator[int]:
        return iter(unpack_tokens(self.packed))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PromptIds):
            return self.packed == other.packed
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.packed)


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of a chat's tools its answer may call."""

    mode: Literal["none", "auto", "required"] = "auto"
    """none: what looks like a call is text. auto: the model decides. required: the answer is one call or several, which
    a grammar made of the tools sees to."""
    names: tuple[str, ...] | None = None
    """The only functions that may be called; None is all of them. The others stay in the prompt, whose cached pages a
    change would cost."""
    parallel: bool = True
    """Whether one answer may have several calls."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One generation request, whatever API it came through."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    """Without the model's own end tokens: the frontend adds them unless `ignore_eos`. `max_tokens` 0 means up to the
    context's end."""
    stop: tuple[str, ...] = ()
    """Stop strings; the output ends before the first of them."""
    ignore_eos: bool = False
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    split_reasoning: bool = False
    """Of a chat: give reasoning apart from the text, if the model has a parser for it."""
    parse_tools: bool = False
    """Of a chat: give tool calls apart from the text, if the model has a parser for them."""
    tool_choice: ToolChoice = ToolChoice()
    """Counts where `parse_tools` is set."""
    grammar: GrammarSpec | None = None
    """What the answer must be. Where a chat's model reasons first, the grammar holds behind the reasoning. The end of a
    grammar ends the answer, also with `ignore_eos` or before `min_tokens`."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens of the answer; it ends by itself only if an end token is one of them. Not beside a grammar."""
    session_id: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    """What separates conversation memory and cache beside the salt: the API key."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token with its text and its log-probabilities."""

    token_id: int
    text: str
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """(token id, text, bytes, log-probability), most likely first."""
    rank: int = 0
    """As `engine.records.TokenLogprobs` has it."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A prompt's tokens with their log-probabilities."""

    first_id: int
    first_text: str
    """The first token, which nothing precedes that could make it likely."""
    tokens: tuple[TokenLogprob, ...]
    """All others."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Those with one index make one call: their fields, each joined in order."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    """Of all pieces together: a JSON object; its beginning if the answer was cut off inside."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    """A JSON object; its beginning if the answer was cut off inside, other text if the model wrote no JSON."""


class ReuseReason(StrEnum):
    """Why as much of a conversation's prompt came from the cache as did."""

    EXTENDED = "extended"
    """It continues what the conversation left behind, and all of that was cached."""
    FIRST_TURN = "first_turn"
    """It has no answer in it yet."""
    NOT_REMEMBERED = "not_remembered"
    """Nothing is known of the conversation: it is too old, began elsewhere, or belongs to another tenant or salt."""
    OTHER_SALT = "other_salt"
    """As before, and its session, named by a UUID, has come with another `cache_salt` until now."""
    EDITED_HISTORY = "edited_history"
    """An earlier message is not what it was."""
    VOLATILE_HEADER = "volatile_header"
    """The system prompt differs in a short part (a date, a counter) and is the same behind it."""
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_CHANGED = "template_changed"
    """Arguments of the chat template, such as `enable_thinking`, are not what they were."""
    RERENDERED = "rerendered"
    """The messages are the same, and the template writes earlier ones differently now: it leaves out old reasoning."""
    EVICTED = "evicted"
    """It continues what the conversation left behind, of which pages had to go."""


@dataclass(frozen=True, slots=True)
class VolatileSpan:
    """A short part near the front of a prompt that changes between requests which are the same behind it."""

    at_chars: int
    """Where it begins in the rendered prompt."""
    chars: int
    kind: str
    """What the line with it looks like: header, date, directory, git, id, other."""
    digest: str
    """Keyed hash of that line; tells its owner which one it is, and nobody else anything."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of a prompt came from the cache."""

    cached_tokens: int
    diverged_at: int | None = None
    """As `Usage` has it."""
    reason: ReuseReason | None = None
    """None for prompts that are no conversation."""
    volatile: VolatileSpan | None = None
    """Where this prompt's beginning is new and differs from a known one in a short part only."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    diverged_at: int | None = None
    """First prompt token that differs from what the conversation's earlier turns left in the cache, where the history
    was edited; None where this turn extends the last one or the conversation is new."""
    reasoning_tokens: int = 0
    """Of `completion_tokens`, those of the reasoning."""
    reuse_reason: ReuseReason | None = None
    """Why no more of the prompt was cached; None for prompts that are no conversation."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the answer. The texts of all chunks add up to the whole; the last one has `finish` and `usage`."""

    text: str = ""
    """All that the model wrote, or what is left for the reader where reasoning and tool calls are given apart."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: Sequence[int] | None = None
    """On the first chunk only."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of a request with `sampling.prompt_logprobs`: on the first chunk that has tokens, or ends the answer."""
    finish: FinishReason | None = None
    stop_text: str | None = None
    """The stop string that ended the output, if one did."""
    usage: Usage | None = None
    times: RequestTimes | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    behind_calls: int = 0
    """Characters at the end of `text` that the model wrote behind its first call; all before them stand before it."""
    reuse: Reuse | None = None
    """On the first chunk only."""
