"""Bodies of requests whose prompts are exact for the server under test, as chat or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey, TokenPrompts
from longturn.bench.synth_chat import ChatPrompts
from longturn.bench.synth_words import HttpTokenize, Tokenize, find_words, measure_costs
from longturn.bench.traces.tree import SessionTree

Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Prompt:
    fields: dict[str, Any]
    """`messages` or `prompt` of the body."""
    tokens: int
    """What the server should count."""
    slack_tokens: int = 0
    """How far off its count may be."""
    prefix_tokens: int = 0
    """With live carry-over: tokens at its start that the server has computed or written before."""


class Bodies(Protocol):
    """Makes the prompts of one set of sessions."""

    @property
    def path(self) -> str:
        """Where they are posted."""
        ...

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        """The prompt of one request of one replay of a session. Called from several threads."""
        ...

    def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
        """A measured request has ended, well or not; the next prompt of its agent is asked for after this."""
        ...

    def forget(self, marker: str) -> None:
        """The replay has ended: no prompt of this marker will be asked for again."""
        ...


class RecordedBodies:
    """What prompts are made of does not depend on the answers."""

    __slots__ = ()

    def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
        pass

    def forget(self, marker: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TokenBodies(RecordedBodies):
    """Prompts as token ids."""

    prompts: TokenPrompts
    path: str = "/v1/completions"

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        ids = self.prompts.prompt(tree, key, marker)
        return Prompt({"prompt": ids}, len(ids))


@dataclass(frozen=True, slots=True)
class ChatBodies(RecordedBodies):
    """Prompts as messages of whole words."""

    prompts: ChatPrompts
    path: str = "/v1/chat/completions"

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        made = self.prompts.prompt(tree, key, marker)
        return Prompt({"messages": list(made.messages)}, made.tokens)


async def make_bodies(
    api: Api,
    trees: Sequence[SessionTree],
    seed: int,
    *,
    url: str,
    model: str,
    api_key: str | None = None,
    token_ids: Sequence[int] | None = None,
) -> Bodies:
    """Ask the server for what exact prompts need, and set them up.

    Args:
        api: `chat` needs the server's `/tokenize`; `completions` needs it unless `token_ids` are given.
        trees: the sessions that will be replayed, scaled and filtered already.
        seed: of the prompts' content.
        url: the server.
        model: its name.
        api_key: bearer key.
        token_ids: for completions, ordinary tokens of the model's vocabulary.

    Raises:
        TargetError: the server has no `/tokenize`, or its chat template adds lengths that cannot be predicted.
        ConfigError: too few words or ids for the blocks of these sessions.
    """
    async with HttpTokenize(url, model, api_key=api_key) as tokenize:
        return await make_bodies_with(tokenize, api, trees, seed, token_ids=token_ids)


async def make_bodies_with(
    tokenize: Tokenize,
    api: Api,
    trees: Sequence[SessionTree],
    seed: int,
    *,
    token_ids: Sequence[int] | None = None,
) -> Bodies:
    """As `make_bodies`, for what has the tokenizer itself. With `token_ids` it is not asked."""
    if api == "completions" and token_ids is not None:
        return TokenBodies(TokenPrompts(trees, token_ids, seed))
    words = await find_words(tokenize)
    if api == "completions":
        return TokenBodies(TokenPrompts(trees, words.token_ids, seed))
    return ChatBodies(ChatPrompts(trees, words, await measure_costs(tokenize, words), seed))
